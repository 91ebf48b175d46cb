"""Sends a request to a router and, if that fails, to the next one with the received part of the answer."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass

from kaveri.client.direct import DirectStreams
from kaveri.client.received import Received
from kaveri.client.routers import RouterCall, RouterFailed, Routers, TriedRouters
from kaveri.client.sources import AnswerSources, AttachAgain
from kaveri.errors import KaveriError, NoCapacity, Unavailable
from kaveri.telemetry.tracing import current_traceparent
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import inference_pb2

_SEED_BITS = 64
_MAX_SESSION = 65_535
_MOST_LEFT = 16
_CANCEL_AGAIN_S = 0.2
_CANCEL_UNKNOWN_S = 10.0
"""Max time for which a request may be on its way to a router."""

GenerateCall = RouterCall[inference_pb2.GenerateResponse]


@dataclass(eq=False, slots=True)
class _Cancellation:
    is_asked: bool = False
    """True once the caller has cancelled the request by its id: later sessions are cancelled too."""
    task: asyncio.Task[None] | None = None
    """Sends Cancel until a router knows the request."""


class Sessions:
    """Consecutive Generate calls (sessions) of one request; each continues the answer of a failed one."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        routers: Routers,
        deadline_s: float | None,
        direct: DirectStreams | None = None,
    ) -> None:
        """Send the request. request: with its secret; owned by this object, which adds a missing seed. deadline_s: on
        the monotonic clock. direct: reads tokens at decode instances; None: only routers send them. Raises
        DeadlineExceeded."""
        if not request.params.HasField("seed"):
            # Another router must sample the same tokens.
            request.params.seed = secrets.randbits(_SEED_BITS)
        self.received = Received(request.params.HasField("prompt_logprobs"))
        request.direct = direct is not None
        self._sources = AnswerSources(direct, self.received) if direct is not None else None
        self._cancellation = _Cancellation()
        self._traceparent = current_traceparent()
        self._request = request
        self._routers = routers
        self._deadline_s = deadline_s
        self._tried = TriedRouters()
        self._calls: list[GenerateCall] = []
        """The session's call, after those of earlier sessions to silent routers. Those are cancelled once a later
        session is served: before that, a router that wakes up would end the request, as if the client had
        disconnected."""
        self._closing = asyncio.Event()
        self._send(routers.targets.choose(time.monotonic())[0])

    async def read(self) -> inference_pb2.GenerateResponse | None:
        """Return the next response; None at the end of the answer, and once closed. Raises KaveriErrors. While no
        router can have accepted the request, each is tried once; afterwards they are retried until the deadline."""
        try:
            return await self._read()
        except KaveriError:
            if self._closing.is_set():
                return None
            self.close()
            raise
        except (Exception, asyncio.CancelledError):
            self.close()
            raise

    async def _read(self) -> inference_pb2.GenerateResponse | None:
        while True:
            session, call = self._request.session, self._calls[-1]
            try:
                response = await (call.read() if self._sources is None else self._sources.next(call))
                if self._closing.is_set():
                    # A response read during close() is lost, so the next one would leave a gap.
                    return None
                if response is None and not self.received.is_complete:
                    ended = f"{call.target} ended the answer of request {self._request.request_id!r} without a "
                    raise RouterFailed(Unavailable(f"{ended}finish reason"))
            except AttachAgain:
                self._attach_again()
            except RouterFailed as failure:
                if self.received.is_complete:
                    return None
                await self._go_on(failure)
            except NoCapacity as error:
                if session == 0:
                    raise
                await self._go_on(RouterFailed(error))
            else:
                if response is not None:
                    self._take(response)
                    if self._sources is not None and _brings_nothing(response):
                        continue
                return response
            if self._closing.is_set():
                return None

    def close(self) -> None:
        """Cancel the request in the whole cluster unless it has ended. Idempotent."""
        self._closing.set()
        self._calls[-1].cancel()
        if self._sources is not None:
            self._sources.end_session()
        self._cancel_left()
        if self._cancellation.task is not None:
            self._cancellation.task.cancel()

    def note_cancelled(self) -> None:
        """Cancel all later calls of this request: the caller has cancelled it by its id."""
        self._cancellation.is_asked = True

    def cancel_when_known(self) -> None:
        """Cancel the request by its id in the background, as soon as a router knows it."""
        if self._cancellation.task is None or self._cancellation.task.done():
            self._cancellation.task = asyncio.create_task(self._cancel(), name="kaveri-client cancel")

    def _attach_again(self) -> None:
        """Begin the next session (Generate call) at the same router, since reading directly failed."""
        if self._closing.is_set():
            return
        # Each session counts its own attempts, so a request that breaks instances must not begin many sessions.
        self._request.direct = False
        if self._request.session == _MAX_SESSION:
            raise Unavailable(f"request {self._request.request_id!r} was interrupted too often")
        self._begin_session(self._calls[-1].target)

    async def _go_on(self, failure: RouterFailed) -> None:
        """Begin the next session (Generate call), preferably at another router. If a router may have the request, any
        is tried again, after a pause; else failure.error is raised once all have failed."""
        call = self._calls[-1]
        self._routers.targets.failed(call.target, time.monotonic())
        if self._request.session == _MAX_SESSION or (self.received.token_ids and not self.received.max_tokens):
            raise failure.error from failure
        target, wait_s = self._routers.targets.choose(time.monotonic())
        self._tried.add(call.target, failure)
        self._tried.may_be_taken |= call.was_reached and not failure.refused
        if self._tried.may_be_taken:
            await self._wait(wait_s)
        elif (untried := self._tried.next(target, self._routers.targets.known)) is None:
            raise failure.error from failure
        else:
            target = untried
        if not self._closing.is_set():
            self._begin_session(target)

    def _begin_session(self, target: str) -> None:
        """Send the request again, with the received part of its answer; drop later responses of earlier calls."""
        if self._sources is not None:
            self._sources.end_session()
        self._request.session += 1
        self._request.received.CopyFrom(self.received.to_proto())
        self._cancel_left(_MOST_LEFT - 1)
        self._send(target)
        if self._cancellation.is_asked:
            self.cancel_when_known()

    async def _wait(self, wait_s: float) -> None:
        if self._deadline_s is not None:
            wait_s = min(wait_s, max(0.0, self._deadline_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closing.wait()

    def _send(self, target: str) -> None:
        call = self._routers.call(
            "Generate",
            self._request,
            target,
            self._deadline_s,
            leaves_unheard=target not in self._tried.left,
            traceparent=self._traceparent,
        )
        self._calls.append(call)

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        target = self._calls[-1].target
        self.received.take(response, target)
        if response.HasField("resolved_params"):
            # A later session's router may have other defaults.
            self._request.params.MergeFrom(response.resolved_params)
        self._tried.may_be_taken = True
        self._cancel_left()
        self._routers.targets.worked(target, time.monotonic())
        self._routers.targets.learn(response.routers)
        if self._sources is not None and response.HasField("tokens_at") and not self.received.is_complete:
            self._sources.begin(response.tokens_at, self._request)

    def _cancel_left(self, but: int = 0) -> None:
        """Cancel the calls to routers of earlier sessions, except the latest `but` of them."""
        while len(self._calls) > but + 1:
            self._calls.pop(0).cancel()

    async def _cancel(self) -> None:
        """Retry Cancel until a router knows the request, the answer ends, or no router has known the request for
        _CANCEL_UNKNOWN_S, so that its session has ended. The next session retries."""
        session, unknown_since_s = self._request.session, time.monotonic()
        request = inference_pb2.CancelRequest(request_id=self._request.request_id)
        while not (self.received.is_complete or self._closing.is_set()):
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                return
            with contextlib.suppress(KaveriError):
                limit_s = time.monotonic() + CALL_TIMEOUT_S
                if (await self._routers.ask("Cancel", request, limit_s)).found:
                    return
                now_s = time.monotonic()
                if self._request.session != session:
                    session, unknown_since_s = self._request.session, now_s
                if now_s - unknown_since_s > _CANCEL_UNKNOWN_S:
                    return
            await self._wait(_CANCEL_AGAIN_S)


def _brings_nothing(response: inference_pb2.GenerateResponse) -> bool:
    has_output = response.token_ids or response.text or response.finish_reason or response.HasField("prompt_logprobs")
    return not (has_output or response.HasField("usage"))
