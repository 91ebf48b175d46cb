"""What one session of a request brings: its router's responses, and what the client reads at the decode instance."""

import asyncio
import contextlib
import time

from kaveri.client.direct import DirectRead, DirectStreams
from kaveri.client.received import Received
from kaveri.client.routers import RouterCall
from kaveri.v1 import decode_pb2, inference_pb2

_ROUTER_GOES_ON_S = 1.0
"""So long a router may take, once the decode instance cannot be heard, to send tokens or to say that it was lost."""


class AttachAgain(Exception):
    """The next session is to begin, at the same router. It reads nothing at decode instances."""


class AnswerSources:
    """Of one request that is read directly where that is possible. For one reader."""

    def __init__(self, streams: DirectStreams, received: Received) -> None:
        self._streams = streams
        self._received = received
        self._read: DirectRead | None = None
        self._reading: asyncio.Task[inference_pb2.GenerateResponse | None] | None = None
        """The read of the router's call that is under way."""
        self._repeats = False
        """Whether responses may repeat what was received."""
        self._interrupted = False
        self._give_up_s: float | None = None
        """When a router that sends nothing is not waited for any more, on the monotonic clock."""
        self._woken: asyncio.Future[None] | None = None

    async def next(self, call: RouterCall[inference_pb2.GenerateResponse]) -> inference_pb2.GenerateResponse | None:
        """What comes next, without what was received; None when the call has ended.

        Raises AttachAgain, and as call.read()."""
        while True:
            if (piece := self._piece()) is not None:
                return piece
            if self._interrupted:
                raise AttachAgain
            if self._reading is None:
                self._reading = asyncio.create_task(call.read(), name="kaveri-client read")
                self._reading.add_done_callback(self._has_read)
            if self._reading.done():
                reading, self._reading = self._reading, None
                response = reading.result()
                if response is None:
                    return None
                if (rest := self._rest_of_routers(response)) is not None:
                    return rest
            else:
                await self._wait()

    def begin(self, at: inference_pb2.TokensAt, request: inference_pb2.GenerateRequest) -> None:
        """Reads the answer there too, from what was received on. request: with its session and secret."""
        self._leave()
        self._repeats = True
        asked = decode_pb2.ReadAnswerRequest(
            request_id=request.request_id,
            session=request.session,
            secret=request.secret,
            token_ids=self._received.token_ids,
            characters=self._received.characters,
        )
        self._read = self._streams.read(at, asked, self._wake)

    def end_session(self) -> None:
        """Drops what the session would still bring. Idempotent."""
        self._leave()
        self._reading = None
        self._repeats = self._interrupted = False
        self._give_up_s = None

    def _leave(self) -> None:
        if self._read is not None:
            self._streams.leave(self._read)
            self._read = None

    def _piece(self) -> inference_pb2.GenerateResponse | None:
        """What has come from the decode instance."""
        if self._received.is_complete:
            # Decode may send what it had drawn before a cancel reached it.
            self._leave()
        read = self._read
        if read is None:
            return None
        while (taken := read.take()) is not None:
            piece = self._received.rest_of(taken)
            if piece.token_ids or piece.text:
                return piece
        if read.ended:
            self._read = None
            if read.broken:
                self._give_up_s = time.monotonic() + _ROUTER_GOES_ON_S
        return None

    def _rest_of_routers(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        """What is new in a response of the router. None: nothing."""
        if not self._repeats:
            return response
        rest = self._received.rest_of(response)
        self._interrupted = rest.interrupted
        says_where = rest.HasField("tokens_at")
        if says_where or rest.HasField("prompt_logprobs") or rest.token_ids or rest.text or rest.finish_reason:
            self._give_up_s = None
            return rest
        return rest if rest.HasField("owner") or rest.routers else None

    async def _wait(self) -> None:
        """Returns when something has come. Raises AttachAgain when nothing comes any more."""
        woken = self._woken = asyncio.get_running_loop().create_future()
        try:
            if self._give_up_s is None:
                await woken
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._give_up_s - time.monotonic()):
                    await woken
                return
            raise AttachAgain
        finally:
            self._woken = None

    def _has_read(self, reading: "asyncio.Task[inference_pb2.GenerateResponse | None]") -> None:
        # Of a session that was left, it is of no interest how it has ended.
        if not reading.cancelled():
            reading.exception()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
