"""One request over its sessions: sent to a router, and to the next one with what was received when a router fails."""

import asyncio
import contextlib
import secrets
import time

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
"""So long a request may take to its router."""

GenerateCall = RouterCall[inference_pb2.GenerateResponse]


class Sessions:
    """The calls of Generate that one request makes, one at a time. For one event loop."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        routers: Routers,
        deadline_s: float | None,
        direct: DirectStreams | None = None,
    ) -> None:
        """Sends the request. request: with its secret; owned from now on, and gets a seed unless it has one. direct:
        reads the answer at decode instances where that is possible; None: at routers.

        Raises DeadlineExceeded.
        """
        if not request.params.HasField("seed"):
            # Drawn here: another router must draw the same tokens.
            request.params.seed = secrets.randbits(_SEED_BITS)
        self.received = Received(request.params.HasField("prompt_logprobs"))
        request.direct = direct is not None
        self._sources = AnswerSources(direct, self.received) if direct is not None else None
        self.cancel_asked = False
        """Whether the caller has cancelled the request by its id: a later session is cancelled too."""
        self._traceparent = current_traceparent()
        """Of the span in which the caller has asked."""
        self._request = request
        self._routers = routers
        self._deadline_s = deadline_s
        self._tried = TriedRouters()
        self._may_be_taken = False
        """Whether a router was reached that may have taken the request."""
        self._left: list[GenerateCall] = []
        """Of earlier sessions, to silent routers. Cancelled once a later session is served: until then a router that
        wakes would take it that the client has gone, and end the request."""
        self._closing = asyncio.Event()
        self._cancelling: asyncio.Task[None] | None = None
        self.call: GenerateCall = self._send(routers.targets.choose(time.monotonic())[0])
        """Of the present session."""

    async def read(self) -> inference_pb2.GenerateResponse | None:
        """The next response, from whichever router; None at the end of the answer, and once closed.

        Raises KaveriErrors. When no router that could be reached has taken the request, each is asked once; otherwise
        it goes on until the deadline.
        """
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
            session = self._request.session
            try:
                response = await (self.call.read() if self._sources is None else self._sources.next(self.call))
                if self._closing.is_set():
                    # What was read when close() came is lost, so what comes next is not the answer's next part.
                    return None
                if response is None and not self.received.is_complete:
                    ended = f"{self.call.target} ended the answer of request {self._request.request_id!r} without a "
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
        """Cancels the request everywhere unless it has ended. Idempotent."""
        self._closing.set()
        self.call.cancel()
        if self._sources is not None:
            self._sources.end_session()
        self._cancel_left()
        if self._cancelling is not None:
            self._cancelling.cancel()

    def cancel_when_known(self) -> None:
        """Cancels the request by its id as soon as a router knows it. Does not wait."""
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel(), name="kaveri-client cancel")

    @property
    def _is_late(self) -> bool:
        """Whether the request's deadline has passed."""
        return self._deadline_s is not None and time.monotonic() >= self._deadline_s

    def _attach_again(self) -> None:
        """Begins the next session at the same router, which relays the answer from now on: the decode instance was
        lost, or cannot be heard."""
        if self._closing.is_set():
            return
        # A session counts its own attempts: a request that breaks instances must not begin many of them.
        self._request.direct = False
        if self._request.session == _MAX_SESSION:
            raise Unavailable(f"request {self._request.request_id!r} was interrupted too often")
        self._left.append(self.call)
        self._cancel_left(_MOST_LEFT)
        self._begin_session(self.call.target)

    async def _go_on(self, failure: RouterFailed) -> None:
        """Begins the next session, elsewhere if possible. Raises the failure when there is no way to go on."""
        self._left.append(self.call)
        self._cancel_left(_MOST_LEFT)
        self._routers.failed(self.call.target)
        if self._request.session == _MAX_SESSION or (self.received.token_ids and not self.received.max_tokens):
            raise failure.error from failure
        target, wait_s = self._routers.targets.choose(time.monotonic())
        self._tried.add(self.call.target, failure)
        self._may_be_taken |= self.call.was_reached and not failure.refused
        if self._may_be_taken:
            await self._wait(wait_s)
        elif (untried := self._tried.next(target, self._routers.targets.known)) is None:
            raise failure.error from failure
        else:
            target = untried
        if self._closing.is_set():
            self._cancel_left()
            return
        self._begin_session(target)

    def _begin_session(self, target: str) -> None:
        """Sends the request again, with what was received. What earlier sessions would still bring is dropped."""
        if self._sources is not None:
            self._sources.end_session()
        self._request.session += 1
        self._request.received.CopyFrom(self.received.to_proto())
        self.call = self._send(target)
        if self.cancel_asked:
            self.cancel_when_known()

    async def _wait(self, wait_s: float) -> None:
        """Waits, but not beyond the deadline or close()."""
        if self._deadline_s is not None:
            wait_s = min(wait_s, max(0.0, self._deadline_s - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._closing.wait()

    def _send(self, target: str) -> GenerateCall:
        leaves_unheard = self._tried.leaves_unheard(target)
        return self._routers.call(
            "Generate",
            self._request,
            target,
            self._deadline_s,
            leaves_unheard=leaves_unheard,
            traceparent=self._traceparent,
        )

    def _take(self, response: inference_pb2.GenerateResponse) -> None:
        self.received.take(response, self.call.target)
        if response.HasField("resolved_params"):
            # The router of a later session may have other defaults.
            self._request.params.MergeFrom(response.resolved_params)
        self._may_be_taken = True
        self._cancel_left()
        self._routers.worked(self.call.target)
        self._routers.learn(response.routers)
        if self._sources is not None and response.HasField("tokens_at") and not self.received.is_complete:
            self._sources.begin(response.tokens_at, self._request)

    def _cancel_left(self, but: int = 0) -> None:
        """Cancels the calls of earlier sessions, but for the last few."""
        while len(self._left) > but:
            self._left.pop(0).cancel()

    async def _cancel(self) -> None:
        """Asks until a router knows the request, it is over, or routers have not known it for a while: then its session
        has ended there. The next session asks again."""
        session, unknown_since_s = self._request.session, time.monotonic()
        request = inference_pb2.CancelRequest(request_id=self._request.request_id)
        while not (self.received.is_complete or self._closing.is_set() or self._is_late):
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
