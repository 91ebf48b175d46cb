"""Merges the responses of a request's router with a direct read at its decode instance."""

import asyncio
import time

from kaveri.client.direct import DirectRead, DirectStreams
from kaveri.client.received import Received
from kaveri.client.routers import RouterCall
from kaveri.v1 import feed_pb2, inference_pb2, term_pb2

_ROUTER_CONTINUES_S = 1.0
"""Time for a router to send tokens, or an interruption, after the direct read has failed."""


class AttachAgain(Exception):
    """Signal to send the request to the same router again, without direct reads."""


class AnswerSources:
    """Sources of one request's answer: a call to a router and a direct read at the decode instance. For one reader."""

    def __init__(self, streams: DirectStreams, received: Received) -> None:
        self._streams = streams
        self._received = received
        self._read: DirectRead | None = None
        self._reading: asyncio.Task[inference_pb2.GenerateResponse | None] | None = None
        """Pending read of the router's call."""
        self._repeats = False
        """True once responses may repeat what was received."""
        self._interrupted = False
        self._give_up_s: float | None = None
        """Time to stop waiting for a silent router, on the monotonic clock."""
        self._woken: asyncio.Future[None] | None = None

    async def next(self, call: RouterCall[inference_pb2.GenerateResponse]) -> inference_pb2.GenerateResponse | None:
        """Return the next response of either source, without repeated tokens and text; None at the end of the call.
        Raises AttachAgain if direct reading has failed and the router cannot continue, and as call.read()."""
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
        """Start to read the rest of the answer at decode instance `at`. request: with its session and secret."""
        self._leave()
        self._repeats = True
        asked = feed_pb2.AttachRequest(
            form=feed_pb2.FORM_TEXT,
            request_id=request.request_id,
            term=term_pb2.Term(session=request.session),
            secret=request.secret,
            token_ids=self._received.token_ids,
            characters=self._received.characters,
        )
        self._read = self._streams.read(at, asked, self._wake)

    def end_session(self) -> None:
        """Drop later responses of the current call and direct read. Idempotent."""
        self._leave()
        self._reading = None
        self._repeats = self._interrupted = False
        self._give_up_s = None

    def _leave(self) -> None:
        if self._read is not None:
            self._streams.leave(self._read)
            self._read = None

    def _piece(self) -> inference_pb2.GenerateResponse | None:
        if self._received.is_complete:
            # Decode may send tokens sampled before a cancel reached it.
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
                self._give_up_s = time.monotonic() + _ROUTER_CONTINUES_S
        return None

    def _rest_of_routers(self, response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse | None:
        if not self._repeats:
            return response
        rest = self._received.rest_of(response)
        self._interrupted = rest.interrupted
        has_output = rest.HasField("prompt_logprobs") or rest.token_ids or rest.text or rest.finish_reason
        if has_output or rest.HasField("tokens_at"):
            self._give_up_s = None
            return rest
        return rest if rest.HasField("owner") or rest.routers else None

    async def _wait(self) -> None:
        """Wait for a response or a change. Raises AttachAgain when the router stays silent for too long."""
        woken = self._woken = asyncio.get_running_loop().create_future()
        left_s = None if self._give_up_s is None else self._give_up_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                await woken
        except TimeoutError:
            raise AttachAgain from None
        finally:
            self._woken = None

    def _has_read(self, reading: "asyncio.Task[inference_pb2.GenerateResponse | None]") -> None:
        # Mark the exception as retrieved: the session may have ended.
        if not reading.cancelled():
            reading.exception()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
