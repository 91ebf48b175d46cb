"""The requests in flight on this router: what each has produced so far, where it is placed, and how it ends.

Tokens reach an entry by index: what was seen is dropped, what comes early waits. So every token leaves once and in
order, whatever instances die. One dispatch feeds an entry and one client's RPC drains it; tokens that the client has
not taken yet are one response, bounded by the answer's own length.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import DeadlineExceeded, KaveriError, NoCapacity, RequestAlreadyExists, Unavailable
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.text.detokenizer import Detokenizer
from kaveri.v1 import decode_pb2, inference_pb2, prefill_pb2, sampling_pb2
from kaveri.wire.messages import finish_from_proto

HAND_OVER_GRACE_S = 0.25
"""An answer of two tokens can end before its hand-over is reported; so long its timing waits for the report."""
RETRY_AFTER_S = 0.5
"""Told to clients that found the router full: about a short answer's time."""

MAX_OUTPUT_BYTES = MAX_MESSAGE_BYTES // 4
"""Of one response, by an estimate from above. A quarter, so that a wrong estimate does no harm."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request whose input was checked."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """With max_tokens and seed set."""
    max_model_len: int
    arrived_s: float
    """time.monotonic() at its arrival."""
    deadline_s: float
    """time.monotonic() at which it fails."""


class Attempt:
    """One placement of a request."""

    __slots__ = (
        "decode_done",
        "decode_incarnation",
        "decode_instance_id",
        "drawing_instance_id",
        "first_index",
        "first_token_seen",
        "handed_over",
        "lost",
        "number",
        "over",
        "prefill_incarnation",
        "prefill_instance_id",
        "prefill_open",
        "request_id",
        "stream_losses",
        "unsent",
    )

    def __init__(
        self, request_id: str, number: int, first_index: int, prefill_instance_id: str, prefill_incarnation: int
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.first_index = first_index
        """Index of the token that prefill draws."""
        self.prefill_instance_id = prefill_instance_id
        self.prefill_incarnation = prefill_incarnation
        self.decode_instance_id = ""
        self.decode_incarnation = 0
        self.stream_losses = 0
        """Of that decode instance, when it reserved room."""
        self.decode_done = False
        """Whether decode has ended the request by itself: nothing there is to be aborted."""
        self.unsent = False
        """Whether prefill could not be connected to: it knows nothing of the request."""
        self.prefill_open = True
        """Whether more is to come from the prefill stream."""
        self.first_token_seen = False
        self.handed_over = False
        self.drawing_instance_id = ""
        """The decode instance that has sent tokens of this attempt. Those of another one would not follow from them."""
        self.lost: KaveriError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the request has ended, or the attempt is lost."""

    def place_on(self, decode_instance_id: str, decode_incarnation: int, stream_losses: int = 0) -> None:
        """That life of a decode instance has reserved room. Forgets the progress at another one."""
        former = (self.decode_instance_id, self.decode_incarnation)
        moved = former not in (("", 0), (decode_instance_id, decode_incarnation))
        if moved:
            self.decode_done = False
        if self.decoding and (moved or self.drawing_instance_id != decode_instance_id):
            self.lose(Unavailable(f"it was placed on {decode_instance_id} after decode had begun elsewhere"))
        self.decode_instance_id = decode_instance_id
        self.decode_incarnation = decode_incarnation
        self.stream_losses = stream_losses

    @property
    def decoding(self) -> bool:
        """Whether decode has sent a token."""
        return bool(self.drawing_instance_id)

    @property
    def is_decodes_alone(self) -> bool:
        """Whether decode can end it without prefill: it has sent a token, and all that only prefill says is here."""
        return self.decoding and self.first_token_seen and bool(self.decode_instance_id)

    def lose(self, error: KaveriError) -> None:
        """This placement cannot go on; dispatch places the request anew. Ignored when it is over."""
        if not self.over.done():
            self.lost = error
            self.over.set_result(None)


class RequestEntry:
    """One request in flight. Lives on one event loop; every method is called there."""

    def __init__(self, accepted: AcceptedRequest, detokenizer: Detokenizer) -> None:
        self.accepted = accepted
        self.request_id = accepted.request_id
        self.token_ids: list[int] = []
        """The answer so far, over all attempts."""
        self.attempt: Attempt | None = None
        self.finish: FinishReason | None = None
        self.error: KaveriError | None = None
        self.ended = False
        """Whether finish or error is final; nothing is taken in any more."""
        self.timing = inference_pb2.Timing()
        self.delay_noted = False
        """Whether the log says already that the request could not be placed at once."""
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self._detokenizer = detokenizer
        self._early: list[tuple[str, decode_pb2.RequestTokens]] = []
        self._taken_count = 0
        self._text: deque[tuple[int, str]] = deque()
        """Pieces with the number of tokens that had come when each was decided."""
        self._logprobs: list[sampling_pb2.Logprobs] = []
        self._waiter: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        remaining_s = max(0.0, accepted.deadline_s - time.monotonic())
        self._deadline = loop.call_later(remaining_s, self.fail, DeadlineExceeded())
        self._grace: asyncio.TimerHandle | None = None

    # ---- what dispatch and the token streams tell ----

    def begin_attempt(self, number: int, prefill_instance_id: str, prefill_incarnation: int) -> Attempt:
        """Starts placement `number`; what older placements still send is dropped from now on."""
        self._early.clear()
        self.attempt = Attempt(self.request_id, number, len(self.token_ids), prefill_instance_id, prefill_incarnation)
        self.timing.attempts += 1
        self.timing.prefill_instance_id = prefill_instance_id
        self.timing.decode_instance_id = ""
        return self.attempt

    def take_first_token(self, attempt: Attempt, event: prefill_pb2.PrefillFirstToken) -> None:
        """The token that prefill drew; then whatever decode sent ahead of it."""
        if attempt is not self.attempt or attempt.lost is not None or self.ended or attempt.first_token_seen:
            return
        attempt.first_token_seen = True
        logprobs = (event.logprobs,) if event.HasField("logprobs") else ()
        self._append(attempt.first_index, (event.token_id,), logprobs, event.finish_reason)
        if event.finish_reason and not self.ended:
            self._finish(finish_from_proto(event.finish_reason))
        early, self._early = self._early, []
        for instance_id, update in early:
            self.take_tokens(instance_id, update)

    def take_tokens(self, instance_id: str, update: decode_pb2.RequestTokens) -> None:
        """Tokens that a decode instance drew. Those of other attempts, and tokens seen already, are dropped."""
        attempt = self.attempt
        if attempt is None or attempt.number != update.attempt or attempt.lost is not None or self.finish is not None:
            return
        if self.ended:
            return
        gives_up = bool(update.error) or update.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
        if (attempt.drawing_instance_id or attempt.decode_instance_id) not in ("", instance_id):
            # It was placed elsewhere since: two instances may draw different tokens from the same ones.
            return
        attempt.decode_done = bool(update.finish_reason or update.error)
        if not gives_up:
            attempt.drawing_instance_id = instance_id
        if gives_up:
            if update.replaced:
                attempt.lose(RequestAlreadyExists(self.request_id))
                return
            # Only this router cancels its requests: an instance that did has given the request up.
            reason = update.error or "gave the request up"
            attempt.lose(Unavailable(f"decode instance {attempt.decode_instance_id or instance_id}: {reason}"))
            return
        if update.index > len(self.token_ids):
            if attempt.first_token_seen:
                gap = f"tokens {len(self.token_ids)} to {update.index - 1} are missing"
                attempt.lose(Unavailable(f"decode instance {attempt.decode_instance_id}: {gap}"))
            else:
                # The first token comes by another road. At most max_tokens of these can queue up.
                self._early.append((instance_id, update))
            return
        self._append(update.index, update.token_ids, update.logprobs, update.finish_reason)
        if update.finish_reason and not self.ended:
            self.timing.decode_queue_s = update.timing.queue_s
            self.timing.decode_s = update.timing.decode_s
            self._finish(finish_from_proto(update.finish_reason))

    def prefill_closed(self, attempt: Attempt) -> None:
        """The prefill stream has ended; an answer that waited for its report is complete now."""
        attempt.prefill_open = False
        if attempt is self.attempt and self.finish is not None:
            self._end()

    # ---- how it ends ----

    def finish_with_length(self) -> None:
        """Ends a request whose tokens so far are all that it may have."""
        self._finish(FinishReason.LENGTH)

    def cancel(self) -> None:
        """Ends the request with FINISH_REASON_CANCELLED; what it has produced is still delivered."""
        if not self.ended:
            if self.finish is None:
                self._add_text(self._detokenizer.flush())
                self.finish = FinishReason.CANCELLED
            self._end()

    def fail(self, error: KaveriError) -> None:
        """Ends the request with an error. Ignored when it has ended."""
        if not self.ended:
            if self.finish is None:
                self.error = error
            self._end()

    def release(self) -> None:
        """Ends timers and whoever waits; the client's RPC is over."""
        self.fail(Unavailable("the request was released"))

    # ---- what the client's RPC takes ----

    @property
    def has_output(self) -> bool:
        """Whether take() has something."""
        return self._taken_count < len(self.token_ids) or bool(self._text)

    async def wait_for_output(self) -> None:
        """Returns when take() has something, or the request has ended. One waiter at a time."""
        if not self.has_output and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> inference_pb2.GenerateResponse:
        """What was not taken yet, in one response; the first part of it when that would be too large for a message."""
        index = self._taken_count
        count = self._fitting_count()
        self._taken_count += count
        response = inference_pb2.GenerateResponse(
            index=index,
            token_ids=self.token_ids[index : self._taken_count],
            text=self._take_text(),
            logprobs=self._logprobs[:count],
        )
        del self._logprobs[:count]
        return response

    def _fitting_count(self) -> int:
        """How many of the tokens that were not taken fit into a response, with their logprobs."""
        untaken = len(self.token_ids) - self._taken_count
        room = MAX_OUTPUT_BYTES // 2
        if not self._logprobs:
            return min(untaken, room // _TOKEN_BYTES)
        for position, logprobs in enumerate(self._logprobs):
            room -= _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(logprobs.top))
            if room < 0:
                return max(1, position)
        return untaken

    def _take_text(self) -> str:
        """The text of the tokens that were taken, as far as it fits into a response."""
        pieces: list[str] = []
        room = MAX_OUTPUT_BYTES // 2 // _CHARACTER_BYTES
        while self._text and self._text[0][0] <= self._taken_count and room > 0:
            count, piece = self._text.popleft()
            if len(piece) > room:
                self._text.appendleft((count, piece[room:]))
                piece = piece[:room]
            pieces.append(piece)
            room -= len(piece)
        return "".join(pieces)

    def _add_text(self, piece: str) -> None:
        if piece:
            self._text.append((len(self.token_ids), piece))

    def _append(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.Logprobs],
        finish_reason: "sampling_pb2.FinishReason.ValueType",
    ) -> None:
        seen = len(self.token_ids) - index
        if seen >= len(token_ids):
            return
        self.last_token_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s
        for position in range(seen, len(token_ids)):
            self.token_ids.append(token_ids[position])
            if logprobs:
                self._logprobs.append(logprobs[position])
            if finish_reason == sampling_pb2.FINISH_REASON_STOP and position == len(token_ids) - 1:
                # The stop token is part of the answer's tokens and logprobs, not of its text, like with vLLM.
                continue
            self._add_text(self._detokenizer.push(token_ids[position]))
            if self._detokenizer.stopped:
                self.finish = FinishReason.STOP
                self._end()
                return
        self._wake()

    def _finish(self, finish: FinishReason | None) -> None:
        self.finish = finish
        self._add_text(self._detokenizer.flush())
        if self._detokenizer.stopped:
            self.finish = FinishReason.STOP
        attempt = self.attempt
        if attempt is not None and attempt.prefill_open and attempt.decoding:
            self._grace = asyncio.get_running_loop().call_later(HAND_OVER_GRACE_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._deadline.cancel()
        if self._grace is not None:
            self._grace.cancel()
        if self.attempt is not None and not self.attempt.over.done():
            self.attempt.over.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Place:
    """A request's place in the table, from before its input is checked until its client's RPC is over."""

    def __init__(self, request_id: str, task: asyncio.Task[object]) -> None:
        self.request_id = request_id
        self.entry: RequestEntry | None = None
        self.cancelled = False
        """Whether cancel() came before there was an entry, and has interrupted the task."""
        self.error: KaveriError | None = None
        """What fail() was given before there was an entry; it has interrupted the task."""
        self._task = task

    def cancel(self) -> None:
        """Ends the request with FINISH_REASON_CANCELLED, in whatever phase it is."""
        if self.entry is not None:
            self.entry.cancel()
        elif not self.interrupted:
            self.cancelled = True
            self._task.cancel()

    def fail(self, error: KaveriError) -> None:
        """Ends the request with an error, in whatever phase it is."""
        if self.entry is not None:
            self.entry.fail(error)
        elif not self.interrupted:
            self.error = error
            self._task.cancel()

    @property
    def interrupted(self) -> bool:
        """Whether cancel() or fail() has cancelled the task."""
        return self.cancelled or self.error is not None


class RequestTable:
    """The requests in flight by request id; at most `max_requests` of them."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._places: dict[str, Place] = {}
        self._entries: dict[str, RequestEntry] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self.get: Callable[[str], RequestEntry | None] = self._entries.get
        """The entry of a request id, or None."""

    def __len__(self) -> int:
        return len(self._places)

    def place_of(self, request_id: str) -> Place | None:
        """The place of a request in flight."""
        return self._places.get(request_id)

    def reserve(self, request_id: str, task: asyncio.Task[object]) -> Place:
        """Takes a place for the RPC that runs in `task`. Raises RequestAlreadyExists and NoCapacity."""
        if request_id in self._places:
            raise RequestAlreadyExists(request_id)
        if len(self._places) >= self._max_requests:
            raise NoCapacity("router", RETRY_AFTER_S, f"{self._max_requests} requests are in flight")
        place = self._places[request_id] = Place(request_id, task)
        self._empty.clear()
        return place

    def enter(self, place: Place, entry: RequestEntry) -> None:
        """Fills a place: tokens find the entry from now on."""
        place.entry = self._entries[place.request_id] = entry

    def release(self, place: Place) -> None:
        """Frees the place."""
        del self._places[place.request_id]
        self._entries.pop(place.request_id, None)
        if not self._places:
            self._empty.set()

    def fail_all(self, error: KaveriError) -> None:
        """Ends every request with the error."""
        for place in tuple(self._places.values()):
            place.fail(error)

    async def wait_until_empty(self) -> None:
        """Returns when no request is in flight."""
        await self._empty.wait()
