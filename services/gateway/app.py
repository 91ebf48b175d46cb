"""HTTP API: its routes, and the mapping of failures to responses."""

import asyncio
import contextlib
import importlib.metadata
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from kaveri.client.answer import ModelInfo
from kaveri.client.async_client import AsyncClient
from kaveri.errors import (
    InvalidArgument,
    KaveriError,
    ModelNotFound,
    NoCapacity,
    SlowReader,
    Unauthenticated,
    Unavailable,
)
from kaveri.hosting.read_limit import read_limit
from kaveri.security.callers import Callers
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import OpenSpan, calls_below, error_in_span, trace_fields, traceparent_of
from kaveri.wire.messages import shown_params
from services.gateway import metrics
from services.gateway.answers import Answers
from services.gateway.body import BodyBudget, HeldBody
from services.gateway.config import GatewayConfig
from services.gateway.connection import CONNECTION_KEY, ClientGone, check_head, header, own_request_id, until_gone
from services.gateway.event_writer import EventWriter
from services.gateway.formats import DONE, AnswerFormat, ChatFormat, CompletionFormat
from services.gateway.http_errors import CLOSE, Headers, HttpError, http_error_of, is_too_long, unavailable
from services.gateway.openapi import openapi_document
from services.gateway.parsed_request import ParsedRequest, read_chat, read_completion
from services.gateway.shown_prompts import show_prompts
from services.gateway.tokenizing import detokenize, tokenize

_HEALTH_TIMEOUT_S = 2.0
_CLIENT_GONE_STATUS = 499
"""Status in metrics and logs when the client has closed its connection, as in nginx."""
_JSON: Headers = [(b"content-type", b"application/json")]
_OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no API key."""
STATE_KEY = "kaveri.request"
"""Key of the HttpRequest in an ASGI scope."""


@dataclass(slots=True)
class HttpRequest:
    """State of one HTTP request: id, times, status and token counts, for response headers, metrics and the log."""

    request_id: str
    arrived_s: float
    path: str = ""
    status: int = 0
    """Status that was sent; 0: nothing yet."""
    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    key_name: str = ""
    """Name of the client's API key; empty if none was required."""
    span: OpenSpan | None = None
    event_error: KaveriError | None = None


class App:
    """ASGI application of the gateway: assigns request ids, turns outcomes into responses, metrics and log lines."""

    def __init__(self, config: GatewayConfig, client: AsyncClient, callers: Callers | None) -> None:
        self.config = config
        self.client = client
        self.callers = callers
        self.bodies = BodyBudget(config)
        self.draining = False
        self.answering: set[Answers] = set()
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._routes = _routes(self)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count one completion or chat request as in flight until the context ends; `idle` is set while none is."""
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = HttpRequest(secrets.token_hex(16), time.monotonic())
        scope[STATE_KEY] = state
        # Unknown paths and methods then raise in the router instead of being answered.
        scope["app"] = self

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                state.status = message["status"]
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                scope["state"][CONNECTION_KEY].sends_events = not has_length
                date = formatdate(usegmt=True).encode()
                named = [(b"date", date), (b"x-request-id", state.request_id.encode())]
                message = {**message, "headers": [*message["headers"], *named]}
            await send(message)

        try:
            state.request_id = own_request_id(scope) or state.request_id
            check_head(scope, self.config.max_header_bytes)
            await self._serve(scope, receive, send_named, state)
        except ClientGone:
            state.status = _CLIENT_GONE_STATUS
        except HttpError as error:
            await _send_error(error, send_named)
        except HTTPException as error:
            await _send_error(_not_served(scope, error), send_named)
        except SlowReader as error:
            get_logger().warning("client_too_slow", request_id=state.request_id, slow_reader_s=error.limit_s)
            scope["state"][CONNECTION_KEY].transport.abort()
        except asyncio.CancelledError:
            # The gateway is shutting down. The client sees its connection closed.
            scope["state"][CONNECTION_KEY].transport.abort()
            raise
        except Exception:
            get_logger().exception("request_failed_unexpectedly", request_id=state.request_id, path=state.path)
            if state.status:
                scope["state"][CONNECTION_KEY].transport.abort()
            else:
                await _send_error(HttpError(500, "the gateway failed", "server_error", "internal_error"), send_named)
        finally:
            self._report(state)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, state: HttpRequest) -> None:
        if self.callers is None or scope["path"] in _OPEN_PATHS:
            await self._routes(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                caller = await stack.enter_async_context(self.callers.admit(header(scope, b"authorization") or None))
            except Unauthenticated as error:
                headers = [(b"www-authenticate", b"Bearer")]
                raise HttpError(401, str(error), code="invalid_api_key", headers=headers) from error
            except NoCapacity as error:
                raise http_error_of(error) from error
            state.key_name = caller.key.name
            try:
                await self._routes(scope, receive, send)
            finally:
                caller.tokens = state.prompt_tokens + state.completion_tokens

    def _report(self, state: HttpRequest) -> None:
        metrics.REQUESTS.labels(path=state.path or "other", status=str(state.status)).inc()
        if state.answers:
            get_logger().info(
                "http_request_finished",
                request_id=state.request_id,
                path=state.path,
                key_name=state.key_name,
                status=state.status,
                answers=state.answers,
                prompt_tokens=state.prompt_tokens,
                completion_tokens=state.completion_tokens,
                duration_s=time.monotonic() - state.arrived_s,
                **trace_fields(state.span),
            )


Reader = Callable[[Mapping[str, Any], int], ParsedRequest]


class _Generate:
    """ASGI application of /v1/completions or /v1/chat/completions."""

    def __init__(self, app: App, turn: asyncio.Lock, path: str, read: Reader, make_format: type[AnswerFormat]) -> None:
        """turn: lock for sending long prompts. read: takes the JSON body and the max number of answers."""
        self._app = app
        self._turn = turn
        self._path = path
        self._read = read
        self._make_format = make_format
        self._prompt_param = "prompt" if make_format is CompletionFormat else "messages"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: HttpRequest = scope[STATE_KEY]
        state.path = self._path
        app = self._app
        if app.draining:
            error = unavailable("this gateway is ending", 0.0, "draining")
            error.headers.append(CLOSE)
            raise error
        asked: ParsedRequest | None = None
        try:
            with app.serving(), app.bodies.hold(state.key_name) as body:
                asked = await body.read(scope, receive, lambda values: self._read(values, app.config.max_answers))
                async with until_gone(receive):
                    with _traced(scope, state):
                        await self._answer(asked, body, state, send)
        except SlowReader:
            raise
        except KaveriError as error:
            if asked is not None and isinstance(error, InvalidArgument):
                error = asked.named(error)
            length = 0 if asked is None or not is_too_long(error) else await _max_model_len(app.client, asked.model)
            raise http_error_of(error, self._prompt_param, length) from error

    async def _answer(self, asked: ParsedRequest, body: HeldBody, state: HttpRequest, send: Send) -> None:
        client = self._app.client
        model = asked.model or (await _the_model(client)).name
        asked.check_copies()
        asked, shown = await show_prompts(client, asked)
        asked.check_copies()
        body.hold_more(asked.copied_bytes + asked.report_bytes)
        made = self._make_format(asked, shown, state.request_id, model, int(time.time()))
        state.answers = len(asked.answers)
        metrics.IN_FLIGHT.inc(state.answers)
        answers = Answers(client, asked, state.request_id, self._turn)
        self._app.answering.add(answers)
        try:
            async with answers:
                if asked.stream:
                    await self._stream(answers, made, state, send)
                else:
                    await self._collect(answers, made, state, send)
        finally:
            self._app.answering.discard(answers)
            # Also counts answers that did not end.
            state.prompt_tokens = sum(stream.prompt_tokens or 0 for stream in answers.streams)
            state.completion_tokens = sum(stream.completion_tokens for stream in answers.streams)
            metrics.IN_FLIGHT.dec(state.answers)

    async def _collect(self, answers: Answers, made: AnswerFormat, state: HttpRequest, send: Send) -> None:
        async with contextlib.aclosing(answers.chunks()) as chunks:
            async for index, chunk in chunks:
                for _ in made.gather(index, chunk, answers.form(index)):
                    await asyncio.sleep(0)
        parts = []
        for part in made.whole():
            parts.append(part)
            await asyncio.sleep(0)
        await send_body(200, parts, _JSON, send)

    async def _stream(self, answers: Answers, made: AnswerFormat, state: HttpRequest, send: Send) -> None:
        limit_s = self._app.config.slow_reader_s
        async with read_limit(limit_s) as writes, contextlib.aclosing(answers.chunks()) as chunks:
            writer = EventWriter(send, writes)
            try:
                async for index, chunk in chunks:
                    if not writer.begun:
                        metrics.TTFT_S.observe(time.monotonic() - state.arrived_s)
                    metrics.TOKENS.inc(len(chunk.token_ids))
                    tokens = answers.streams[index].prompt_tokens or 0
                    for event in made.events(index, chunk, tokens, answers.form(index)):
                        await writer.write(event)
            except KaveriError as error:
                if not writer.begun:
                    raise
                state.event_error = error
                await writer.finish(b"data: " + http_error_of(error, self._prompt_param).body() + b"\n\n")
            else:
                await writer.finish(made.usage() + DONE)


@contextlib.contextmanager
def _traced(scope: Scope, state: HttpRequest) -> Iterator[None]:
    """Open a tracing span for this HTTP request during the context; spans of the routers become its children."""
    # Skip decoding when nothing is traced.
    headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    traceparent = traceparent_of(headers)
    with calls_below(f"POST {state.path}", traceparent, state.arrived_s, request_id=state.request_id) as span:
        state.span = span
        try:
            yield
        finally:
            if span is not None:
                error = sys.exception() or state.event_error
                span.end(time.monotonic(), error_in_span(error), answers=state.answers)


def _routes(app: App) -> Router:
    turn, rendering = asyncio.Lock(), asyncio.Lock()
    version = importlib.metadata.version("kaveri")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_object(one) for one in await app.client.list_models()]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model_object(await app.client.get_model(request.path_params["model"])))

    async def health(request: Request) -> Response:
        if app.draining:
            raise Unavailable("this gateway is ending")
        if not any(one.ready for one in await app.client.list_models(timeout_s=_HEALTH_TIMEOUT_S)):
            raise Unavailable("no model takes requests now")
        return JSONResponse({"status": "ok"})

    async def tokenizing(request: Request) -> Response:
        ask = tokenize if request.url.path == "/tokenize" else detokenize
        with app.bodies.hold(request.scope[STATE_KEY].key_name) as body:
            values = await body.read(request.scope, request.receive, lambda values: values)
            return JSONResponse(await ask(app.client, values))

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": version})

    async def describe(request: Request) -> Response:
        return JSONResponse(openapi_document(version))

    async def scrape(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # One at a time and on a thread: many concurrent scrapes must not delay requests.
        async with rendering:
            return Response(await asyncio.to_thread(encode, REGISTRY), media_type=content_type)

    def route(method: str, path: str, handle: Callable[[Request], Any], name: str = "") -> Route:
        return Route(path, _named(name or path, handle), methods=[method])

    completions = _Generate(app, turn, "/v1/completions", read_completion, CompletionFormat)
    chat = _Generate(app, turn, "/v1/chat/completions", read_chat, ChatFormat)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        route("POST", "/tokenize", tokenizing),
        route("POST", "/detokenize", tokenizing),
        route("GET", "/v1/models", models),
        route("GET", "/v1/models/", models, "/v1/models"),
        route("GET", "/v1/models/{model:path}", model, "/v1/models"),
        route("GET", "/health", health),
        route("GET", "/version", show_version),
        route("GET", "/openapi.json", describe),
        route("GET", "/metrics", scrape),
    ]
    return Router(routes, redirect_slashes=False)


def _named(path: str, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Wrap a handler: label its metrics with `path`, and convert each KaveriError to an HttpError."""

    async def handle_named(request: Request) -> Response:
        request.scope[STATE_KEY].path = path
        try:
            answer: Response = await handle(request)
        except KaveriError as error:
            raise http_error_of(error) from error
        return answer

    return handle_named


_NOT_BUILT = {
    "/v1/embeddings": ": Kaveri's models generate text",
    "/v1/images/generations": ": Kaveri's models generate text",
    "/v1/audio/speech": ": Kaveri's models generate text",
    "/v1/audio/transcriptions": ": Kaveri's models take text",
    "/v1/responses": "; /v1/chat/completions is, and smg in front of routers turns it into the Responses API",
    "/v1/messages": "; /v1/chat/completions is, and smg in front of routers turns it into Anthropic's Messages",
}
"""Why well-known paths of other servers are not here."""


def _not_served(scope: Scope, error: HTTPException) -> HttpError:
    code = {404: "no_such_path", 405: "method_not_allowed"}.get(error.status_code)
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    reason = _NOT_BUILT.get(scope["path"].rstrip("/"), "")
    message = f"{scope['method']} {scope['path']:.200} is not served here{reason}"
    return HttpError(error.status_code, message, code=code, headers=headers)


def _model_object(model: ModelInfo) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "kaveri",
        "root": model.name,
        "max_model_len": model.max_model_len,
        "default_sampling_params": shown_params(model.default_params),
    }


_STARTED_S = int(time.time())


async def _the_model(client: AsyncClient) -> ModelInfo:
    models = await client.list_models()
    if len(models) != 1:
        raise ModelNotFound("", tuple(one.name for one in models))
    return models[0]


async def _max_model_len(client: AsyncClient, model: str | None) -> int:
    try:
        return (await (client.get_model(model) if model else _the_model(client))).max_model_len
    except KaveriError:
        return 0


async def send_body(status: int, parts: Sequence[bytes], headers: Headers, send: Send) -> None:
    sized = [*headers, (b"content-length", str(sum(map(len, parts))).encode())]
    await send({"type": "http.response.start", "status": status, "headers": sized})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_error(error: HttpError, send: Send) -> None:
    await send_body(error.status, [error.body()], [*_JSON, *error.headers], send)
