"""The router's gRPC services: proto <-> domain."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import InternalError, KaveriError, ModelNotFound, NoCapacity, SlowReader, Unavailable
from kaveri.feeds.expiring import ExpiringMap
from kaveri.lives.request_values import Ended
from kaveri.parsers.answer import PLAIN
from kaveri.policy.byte_budget import ByteBudget
from kaveri.policy.placement import max_model_len, missing_phases
from kaveri.policy.rate_limit import RateLimit
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.telemetry.tracing import OpenSpan, begin_span, error_in_span, is_tracing, traceparent_of
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES
from kaveri.wire.messages import form_to_proto, grammar_to_proto, id_drawn_from, params_to_proto
from kaveri.wire.status import abort, status_of
from services.router import metrics
from services.router.accepted_request import NOTHING_RECEIVED, AcceptedRequest, hint_from_store
from services.router.claims import RequestClaims
from services.router.config import RouterConfig
from services.router.intake import Intake
from services.router.peers import cancel_elsewhere, router_addresses
from services.router.relay import ServicerContext, write_answer, write_cancelled
from services.router.request_account import RequestAccount
from services.router.request_placer import RequestPlacer
from services.router.request_table import RETRY_AFTER_S, RecentRequests, RequestTable
from services.router.requests import Interrupted, RequestEntry, SentAway

_GONE_WITHIN_S = 1.0
"""Seconds to wait for gRPC to cancel a call whose client has disconnected."""
_CANCELLED_REMEMBERED_S = 60.0
"""Seconds for which a Cancel between two sessions is remembered; longer than clients take to re-attach."""


class RouterParts(Protocol):
    """Parts of a router that its gRPC services use."""

    config: RouterConfig
    store: ClusterStore
    channels: Channels
    intake: Intake
    claims: RequestClaims
    table: RequestTable
    bodies: ByteBudget
    placer: RequestPlacer
    recent: RecentRequests
    incarnation: int

    @property
    def draining(self) -> bool: ...


Stage = Literal["admit", "reserve", "tokenize", "claim", "place", "relay"]
"""Stages of a request at its router, in order; place and relay run side by side. Spans, and `stage` in logs, have these
names; a `place` span is one wait for an instance. Admit and reserve take no time and have no span."""


@dataclass(slots=True)
class GenerateProgress:
    """Progress of one Generate call, for its logs, span and token limits. The call fills it in."""

    request_id: str
    key_name: str = ""
    """Name of the client's API key; empty: it did not come through the public port."""
    entry: RequestEntry | None = None
    """Set once the request was validated."""
    span: OpenSpan | None = None
    """Span of the call; None: it is not traced."""
    stage: Stage = "admit"
    since_s: float = 0.0
    """time.monotonic() at which the stage began."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt plus those generated in this call; 0 before the request is validated."""
        if self.entry is None:
            return 0
        accepted = self.entry.accepted
        generated = len(self.entry.answer.token_ids) - len(accepted.received.token_ids)
        return len(accepted.prompt_token_ids) + generated

    def span_attributes(self) -> dict[str, object]:
        """Attributes of the call's trace span at its end."""
        if self.entry is None:
            return {}
        accepted, finish = self.entry.accepted, self.entry.finish
        return {
            "session": accepted.session,
            "prompt_tokens": len(accepted.prompt_token_ids),
            "completion_tokens": len(self.entry.answer.token_ids),
            "attempts": self.entry.account.timing.attempts,
            "finish_reason": finish.value if finish is not None else None,
        }

    def log_fields(self) -> dict[str, object]:
        # An unchecked id may have any length.
        return {
            "request_id": self.request_id[:MAX_REQUEST_ID_BYTES],
            "attempt": self.entry.attempt_number if self.entry is not None else 0,
            "stage": self.stage,
        }


def _enter(progress: GenerateProgress, stage: Stage) -> None:
    """Begin a stage; write the former one's span."""
    now_s = time.monotonic()
    if progress.span is not None and progress.stage not in ("admit", "reserve"):
        progress.span.write(progress.stage, progress.since_s, now_s)
    progress.stage, progress.since_s = stage, now_s


@contextlib.contextmanager
def _traced(progress: GenerateProgress, context: ServicerContext, arrived_s: float) -> Iterator[None]:
    traceparent = traceparent_of(context.invocation_metadata())
    span = progress.span = begin_span(
        "generate", traceparent, arrived_s, request_id=progress.request_id[:MAX_REQUEST_ID_BYTES]
    )
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if span is not None:
            _enter(progress, progress.stage)
            span.end(time.monotonic(), error_in_span(error), **progress.span_attributes())


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """gRPC InferenceService of a router."""

    def __init__(self, router: RouterParts) -> None:
        self._router = router
        self._model_name = router.config.model_name
        self._unread_count = 0
        """Calls whose client has not read its SlowReader error. gRPC ends them when it reads or disconnects."""
        config = router.config
        self._reattaches = RateLimit(config.max_reattaches_per_s, config.max_requests, time.monotonic())
        self._cancelled: ExpiringMap[tuple[str, str], bool] = ExpiringMap(_CANCELLED_REMEMBERED_S)
        """Requests cancelled between two sessions: (request id, hash of the secret)."""

    # A coroutine that writes, not a generator: cancellation always arrives inside it, so its cleanup always runs.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: ServicerContext, progress: GenerateProgress | None = None
    ) -> None:
        """Answer a request, and write the responses to `context`. progress: filled in meanwhile; None: not needed."""
        arrived_s = time.monotonic()
        progress = progress or GenerateProgress(request.request_id or new_request_id())
        tracing = _traced(progress, context, arrived_s) if is_tracing() else contextlib.nullcontext()
        try:
            with tracing, self._router.bodies.hold(progress.key_name, request.ByteSize()):
                await self._generate(request, progress, context, arrived_s)
        except SlowReader as error:
            metrics.REQUESTS.labels(outcome="slow_reader").inc()
            get_logger().warning("client_too_slow", **progress.log_fields(), slow_reader_s=error.limit_s)
            await self.abort_unread(context, error)
        except Interrupted as error:
            metrics.LOST_ATTEMPTS.inc()
            metrics.REQUESTS.labels(outcome="interrupted").inc()
            get_logger().warning("request_interrupted", **progress.log_fields(), error=error.cause)
            await abort(context, Unavailable(error.reason, error.retry_after_s))
        except SentAway as error:
            metrics.REQUESTS.labels(outcome="moved").inc()
            get_logger().info("request_moved", **progress.log_fields())
            await abort(context, Unavailable(error.reason, error.retry_after_s))
        except KaveriError as error:
            code = status_of(error)[0].name
            metrics.REQUESTS.labels(outcome=code.lower()).inc()
            get_logger().info("request_failed", **progress.log_fields(), code=code, error=str(error))
            await abort(context, error)
        except asyncio.CancelledError:
            _note_gone(progress)
            raise
        except aio.InternalError:
            # A message could not be written: the client has gone. gRPC cancels this call when it notices it too.
            _note_gone(progress)
            await asyncio.sleep(_GONE_WITHIN_S)
            raise
        except Exception:
            if context.cancelled():
                # Writing to a client that has gone fails in ways of its own.
                _note_gone(progress)
                raise
            metrics.REQUESTS.labels(outcome="internal").inc()
            get_logger().exception("request_failed_unexpectedly", **progress.log_fields())
            reason = f"the router failed while it served request {progress.request_id!r:.140}"
            await abort(context, InternalError(reason))

    async def abort_unread(self, context: ServicerContext, error: SlowReader) -> None:
        """Abort the call of a client that did not read a response. gRPC keeps such calls until the client reads or
        disconnects, so they are counted and limited."""
        self._unread_count += 1
        metrics.UNREAD.inc()
        try:
            await abort(context, error)
        finally:
            self._unread_count -= 1
            metrics.UNREAD.dec()

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: ServicerContext
    ) -> inference_pb2.CancelResponse:
        router, request_id = self._router, request.request_id
        slot = router.table.slot_of(request_id)
        found = slot is not None
        if slot is not None:
            slot.stop(FinishReason.CANCELLED)
        else:
            claim = await router.store.find_request(request_id)
            if claim is not None:
                # Between two sessions: the next one may come here.
                self._cancelled.put((request_id, claim.secret_hash), True, time.monotonic())
            if not request.forwarded:
                view = router.store.view()
                found, without_it = await cancel_elsewhere(request_id, view, router.config, router.channels)
                without_it.add((router.config.instance_id, router.incarnation))
                is_orphan = claim is not None and (claim.router_id, claim.router_incarnation) not in without_it
                found = found or is_orphan
        return inference_pb2.CancelResponse(found=found)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: ServicerContext
    ) -> inference_pb2.GetModelResponse:
        if request.model != self._router.config.model_name:
            await abort(context, ModelNotFound(request.model, (self._router.config.model_name,)))
        return inference_pb2.GetModelResponse(model=self._model())

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: ServicerContext, key_name: str = ""
    ) -> inference_pb2.TokenizeResponse:
        try:
            self._router.intake.check_model(request.model)
            with self._router.bodies.hold(key_name, request.ByteSize()):
                tokenized, limit = await self._router.intake.tokenize(request, self.until_s(context))
        except KaveriError as error:
            await abort(context, error)
        grammar = None if tokenized.grammar is None else grammar_to_proto(tokenized.grammar)
        form = None if tokenized.form == PLAIN else form_to_proto(tokenized.form)
        return inference_pb2.TokenizeResponse(
            token_ids=tokenized.token_ids,
            max_model_len=limit,
            answer_form=form,
            grammar=grammar,
            show_special_tokens=tokenized.shows_special,
        )

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: ServicerContext, key_name: str = ""
    ) -> inference_pb2.DetokenizeResponse:
        try:
            self._router.intake.check_model(request.model)
            with self._router.bodies.hold(key_name, request.ByteSize()):
                text = await self._router.intake.detokenize(request.token_ids, self.until_s(context))
        except KaveriError as error:
            await abort(context, error)
        return inference_pb2.DetokenizeResponse(text=text)

    def until_s(self, context: ServicerContext) -> float:
        """Deadline of a call as a time.monotonic(), at most default_timeout_s from now."""
        remaining_s = context.time_remaining()
        limit_s = self._router.config.default_timeout_s
        return time.monotonic() + (limit_s if remaining_s is None else min(remaining_s, limit_s))

    async def Beat(  # noqa: N802
        self, request: inference_pb2.BeatRequest, context: ServicerContext
    ) -> inference_pb2.BeatResponse:
        return inference_pb2.BeatResponse()

    def _model(self) -> inference_pb2.Model:
        router = self._router
        view = router.store.view()
        return inference_pb2.Model(
            name=router.config.model_name,
            max_model_len=max_model_len(view, router.config.model_name),
            vocab_size=router.intake.tokenizer.vocab_size,
            has_chat_template=router.intake.tokenizer.has_chat_template,
            ready=not missing_phases(view, router.config.model_name) and not router.draining,
            default_params=params_to_proto(router.intake.defaults.params),
        )

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        progress: GenerateProgress,
        context: ServicerContext,
        arrived_s: float,
    ) -> None:
        router, request_id = self._router, progress.request_id
        params = self._admit(request, request_id)
        _enter(progress, "reserve")
        remaining_s = context.time_remaining()
        timeout_s = router.config.default_timeout_s if remaining_s is None else remaining_s
        is_public = bool(progress.key_name)
        accept = partial(
            router.intake.accept, request, request_id, params, arrived_s, arrived_s + timeout_s, is_public=is_public
        )
        task = asyncio.current_task()
        assert task is not None
        former = router.table.slot_of(request_id)
        was_accepted = former is not None and former.entry is not None
        slot = router.table.reserve(request_id, request.session, request.secret, task)
        claim = router.claims.claim_of(request_id, request.session, request.secret)
        if request.session and self._cancelled.get((request_id, claim.secret_hash), arrived_s):
            # Takes effect at the first await below.
            slot.stop(FinishReason.CANCELLED)
        metrics.IN_FLIGHT.inc()
        accepted: AcceptedRequest | None = None
        try:
            _enter(progress, "tokenize")
            accepted = await accept()
            _enter(progress, "claim")
            tokenized_s = progress.since_s
            is_drawn = not request.session and bool(request.secret) and request_id == id_drawn_from(request.secret)
            if is_drawn or not request.request_id:
                # No other client can use the id.
                router.claims.open_later(claim, timeout_s, slot.supersede)
            elif stored := await router.claims.open(claim, timeout_s):
                accepted = replace(accepted, received=replace(accepted.received, owner=hint_from_store(stored)))
            answer = await router.intake.begin_answer(accepted)
            account = RequestAccount(request_id, request.session, tokenized_s, progress.span)
            entry = progress.entry = RequestEntry(
                accepted, answer, account, router.placer.act, partial(router.claims.note, claim)
            )
            router.table.enter(slot, entry)
            # A later session that no router knows of is the first to be accepted: routers before failed or refused.
            if accepted.received == NOTHING_RECEIVED and not was_accepted:
                router.recent.note_arrival(arrived_s)
            _enter(progress, "relay")
            await self._answer(entry, context, names_tokens=request.token_texts, is_public=is_public)
        except asyncio.CancelledError:
            if slot.interruption is None:
                raise
            task.uncancel()
            if isinstance(slot.interruption, KaveriError):
                raise slot.interruption from None
            await self._answer_cancelled(request, request_id, accepted, accept, context)
        finally:
            if accepted is not None:
                # Also when the claim was refused or interrupted: only this router's own claim is closed.
                router.claims.close(claim)
            router.table.release(slot)
            metrics.IN_FLIGHT.dec()

    def _admit(self, request: inference_pb2.GenerateRequest, request_id: str) -> SamplingParams:
        """Do the checks that cost nothing. Raises Unavailable while the router drains, InvalidArgument, ModelNotFound,
        and NoCapacity for too many re-attaches or clients that do not read."""
        router = self._router
        # The last router takes back what another one has just sent away.
        if router.draining and not (
            request.session
            and not router_addresses(router.store.view(), self._model_name, without=router.config.instance_id)
        ):
            raise Unavailable("this router is draining", retry_after_s=0.0)
        if self._unread_count >= router.config.max_requests:
            reason = f"{self._unread_count} clients do not read the end of their answers"
            raise NoCapacity("router", RETRY_AFTER_S, reason)
        params = router.intake.check(request, request_id)
        if request.session and (wait_s := self._reattaches.wait_s(time.monotonic())):
            reason = f"more than {router.config.max_reattaches_per_s:g} re-attaches a second"
            raise NoCapacity("router", max(wait_s, RETRY_AFTER_S), reason)
        return params

    async def _answer(
        self, entry: RequestEntry, context: ServicerContext, *, names_tokens: bool, is_public: bool
    ) -> None:
        router, config, outcome = self._router, self._router.config, "its client has gone"
        placing = router.placer.start(entry)
        try:
            await write_answer(
                entry,
                context,
                config.slow_reader_s,
                lambda: router_addresses(
                    router.store.view(),
                    self._model_name,
                    without=config.instance_id if router.draining else "",
                    public=is_public,
                ),
                router.intake.tokenizer.token_piece if names_tokens else None,
                router.placer.address_of,
            )
            if entry.finish is not None:
                outcome = entry.finish.value
        except Exception as error:
            outcome = str(error) or repr(error)
            raise
        finally:
            if not isinstance(entry.state, Ended):
                entry.stop(Unavailable("the request was released"))
            placing.cancel()
            router.recent.add(entry, outcome)

    async def _answer_cancelled(
        self,
        request: inference_pb2.GenerateRequest,
        request_id: str,
        accepted: AcceptedRequest | None,
        accept: Callable[[], Awaitable[AcceptedRequest]],
        context: ServicerContext,
    ) -> None:
        prompt_tokens, token_count, text = 0, 0, ""
        if request.session:
            self._router.placer.abandon(request_id, request.session, request.secret)
            accepted = accepted or await accept()
            token_count = len(accepted.received.token_ids)
            prompt_tokens = len(accepted.prompt_token_ids) if token_count else 0
            # Text that the former router withheld, such as an unfinished character, is final now.
            answer = await self._router.intake.begin_answer(accepted)
            answer.flush()
            text = answer.take().text
        await write_cancelled(request_id, prompt_tokens, token_count, text, context)


def _note_gone(progress: GenerateProgress) -> None:
    metrics.REQUESTS.labels(outcome="client_gone").inc()
    get_logger().info("request_abandoned", **progress.log_fields())


def new_request_id() -> str:
    """Random id for a request whose caller gave none."""
    return secrets.token_hex(16)
