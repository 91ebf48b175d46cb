"""Sends planned requests to an OpenAI endpoint over HTTP, and reads answers as server-sent events."""

import asyncio
import json
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import httpx2

from kaveri.errors import ConfigError, Unavailable
from kaveri.loadgen.driver import LoadTarget, RequestRecord, RequestSettings
from kaveri.workload.prompts import RequestPrompt

_ASK_TIMEOUT_S = 30.0
_DONE = "[DONE]"
_MOST_SHOWN = 300


class HttpEndpoint(LoadTarget):
    """OpenAI server as a load target: /v1/completions, or /v1/chat/completions for conversations.

    A chunk with text counts as one token until the final usage gives the real number, so per-token times are exact
    where the server sends a chunk per token, and means are exact otherwise.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        """url: with or without /v1. Raises ConfigError for an invalid one."""
        self.url = base_url(url)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # Connections are kept, one per request in flight.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def models(self) -> dict[str, int | None]:
        """Return the longest sequence of each served model, in tokens; None if unknown. Raises Unavailable."""
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                response = await self._client.get(f"{self.url}/models")
            if response.status_code != httpx2.codes.OK:
                raise Unavailable(f"{self.url}/models answers {response.status_code}: {response.text[:_MOST_SHOWN]}")
            return {str(model["id"]): _length(model) for model in response.json()["data"]}
        except (httpx2.HTTPError, TimeoutError) as error:
            raise Unavailable(f"{self.url} does not answer: {error or type(error).__name__}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self.url}/models does not answer as OpenAI's does: {error!r}") from error

    async def send(
        self, record: RequestRecord, prompt: RequestPrompt, settings: RequestSettings, now_s: Callable[[], float]
    ) -> None:
        try:
            async with asyncio.timeout(settings.timeout_s):
                await self._stream(record, prompt, settings, now_s)
        except TimeoutError:
            record.error, record.reason = "DeadlineExceeded", f"after {settings.timeout_s:g} s"
        except httpx2.HTTPError as error:
            record.error, record.reason = type(error).__name__, str(error)

    async def _stream(
        self, record: RequestRecord, prompt: RequestPrompt, settings: RequestSettings, now_s: Callable[[], float]
    ) -> None:
        is_chat = prompt.kind == "messages"
        path = "chat/completions" if is_chat else "completions"
        body = {
            "model": settings.model,
            "messages" if is_chat else "prompt": prompt.content,
            "max_tokens": record.planned.lengths.output_tokens,
            "temperature": 0,
            "seed": settings.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not settings.natural_length:
            body["ignore_eos"] = True
        async with self._client.stream("POST", f"{self.url}/{path}", json=body) as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                record.error, record.reason = f"Http{response.status_code}", response.text[:_MOST_SHOWN]
                return
            async for event in httpx2.EventSource(response):
                if event.data == _DONE or not _note(record, event.data, now_s()):
                    return
        record.error, record.reason = "Truncated", f"the stream ended without {_DONE}"


def base_url(text: str) -> str:
    """Normalize "http://host:8000" and "http://host:8000/v1/" to "http://host:8000/v1". Raises ConfigError."""
    try:
        url = httpx2.URL(text.rstrip("/"))
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError("--http", f"is {text!r:.140}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError("--http", f"is {text!r:.140}; write http://HOST:PORT")
    return str(url) if url.path.endswith("/v1") else f"{url}".rstrip("/") + "/v1"


def _note(record: RequestRecord, data: str, now_s: float) -> bool:
    """Store a server-sent event's data in `record`. Returns False if it ended the answer with an error."""
    try:
        event = json.loads(data)
        if error := event.get("error"):
            is_object = isinstance(error, dict)
            record.error = str(error.get("type") or "Error") if is_object else "Error"
            record.reason = str(error.get("message") if is_object else error)[:_MOST_SHOWN]
            return False
        if any(_text(choice) for choice in event.get("choices", ())):
            record.arrivals_s.append(now_s)
            record.received_tokens += 1
        if usage := event.get("usage"):
            record.received_tokens = int(usage["completion_tokens"])
            record.prompt_tokens = int(usage["prompt_tokens"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        record.error, record.reason = "BadEvent", f"{error!r} in {data[:_MOST_SHOWN]!r}"
        return False
    return True


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text or ""


def _length(model: Mapping[str, Any]) -> int | None:
    length = model.get("max_model_len")
    return length if type(length) is int and length > 0 else None
