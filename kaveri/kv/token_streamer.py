"""Streams the KV lines that decode steps write, beside the compute (DéjàVu, section 4.1.1, optimisation 3).

The step loop says how far its requests have come and goes on; one thread copies the new lines of all of them together
and gives them to a sink:

    kaveri.kv.line_file.LineDisk      a local disk, readable after a crash
    kaveri.kv.line_pool.LinePool      another pool of this process
    kaveri.kv.line_link.LineSender    another instance, whose LineReceiver has a sink of its own

>>> import tempfile
>>> from pathlib import Path
>>> from kaveri.kv.layout import KvLayout
>>> from kaveri.kv.line_file import LineDisk, read_line_file
>>> layout = KvLayout("model", layer_count=2, block_tokens=16, kv_head_count=2, head_dim=4, dtype="float16")
>>> pool, folder = KvPool(layout, block_count=4), tempfile.TemporaryDirectory()
>>> streamer = TokenStreamer(pool, LineDisk(Path(folder.name), layout, byte_limit=1 << 20))
>>> streamer.open("request-1", block_ids=[3, 1])
>>> for token_count in range(1, 21):
...     # ... a decode step writes the KV of one more token ...
...     streamer.advance({"request-1": token_count})
>>> streamer.flush(timeout_s=10.0)
>>> read_line_file(Path(folder.name) / "request-1.kvlines").runs[-1].tokens.stop
20
>>> streamer.end("request-1")
>>> streamer.close()
>>> folder.cleanup()
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kaveri.errors import DeadlineExceeded, InvalidArgument, KaveriError
from kaveri.kv.lines import LineRun, PoolLines
from kaveri.kv.places import require_request_name
from kaveri.kv.pool import KvPool
from kaveri.kv.staging import StagingBuffers
from kaveri.telemetry.logs import get_logger

ENDED_MAX = 1024
"""While a failing sink has yet to be told of the end of so many requests, it is offered none that it does not know."""


class LineSink(Protocol):
    """Where lines go. Called from one thread at a time."""

    def write(self, runs: Sequence[LineRun], timeout_s: float) -> None:
        """Takes lines, of several requests; on return their memory may be used again. Raises KaveriError; the same
        lines come once more then, or longer runs that begin with them, and to take some twice must do no harm."""

    def end(self, request: str) -> None:
        """The request is over, and its lines are of no use any more. Comes behind all of its lines, and once more when
        it raises KaveriError."""

    def settle(self, timeout_s: float) -> None:
        """Waits until all lines are as safe as the sink can make them. Raises KaveriError."""

    def close(self) -> None:
        """Ends it. Idempotent."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a request's stream is."""

    written_tokens: int
    """Tokens whose KV is in the pool."""
    streamed_tokens: int
    """Of these, the ones that the sink has: all before this number."""
    behind: bool
    """The sink is more than the streamer's `behind_tokens` late."""


@dataclass(slots=True, eq=False)
class _Stream:
    request: str
    block_ids: list[int]
    written: int
    streamed: int
    behind: bool = False
    # Its blocks are being read.
    reading: bool = False
    # The sink may have some of its lines.
    offered: bool = False
    # Why the sink did not take its lines the last time, and when it is offered them again: alone, so that one request
    # with a trouble of its own holds up no other.
    failure: str | None = None
    retry_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """One thing for the sink to do: take lines, forget a request, or settle."""

    runs: tuple[tuple[_Stream, range], ...] = ()
    ended: str | None = None
    settle: int = 0


class TokenStreamer:
    """Streams lines of `pool` to `sink`. Every method may be called from any thread; the step loop never waits for the
    sink, however slow.

    What is still to be streamed stays in the pool, so the queue is two numbers per open request and cannot run over: a
    slow sink makes requests `behind`, and they catch up by themselves, many tokens at a time. What a sink refuses it is
    offered again every retry_s, each request by itself. So are ends; while ENDED_MAX of them wait, requests that the
    sink knows nothing of are kept from it, so that no more names are remembered than these and one for each open
    request. Memory: one staging buffer of staging_bytes, at least one token's KV.

    interval_s: a streamer that has caught up rests until so long after its last write began, so that the lines of steps
    shorter than this go together: what a write costs the CPU, and the step loop that shares it, is paid by the second
    and not by the step. It is also how much later lines may be safe. 0: no rest. flush() does not wait for it.

    A request's tokens reach the sink in order. Only between open() and end() are its blocks read; a block is not to be
    given to anyone else before end() has returned.
    """

    def __init__(
        self,
        pool: KvPool,
        sink: LineSink,
        *,
        staging_bytes: int = 8 << 20,
        behind_tokens: int = 64,
        write_timeout_s: float = 10.0,
        retry_s: float = 1.0,
        interval_s: float = 0.02,
    ) -> None:
        self._lines = PoolLines(pool)
        if staging_bytes < self._lines.line_bytes:
            raise InvalidArgument("staging_bytes", staging_bytes, f"at least {self._lines.line_bytes}, a token's KV")
        self._sink = sink
        self._staging = StagingBuffers(staging_bytes, 1)
        self._behind_tokens = behind_tokens
        self._write_timeout_s = write_timeout_s
        self._retry_s = retry_s
        self._interval_s = interval_s
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        # Streams with something to do, in turn.
        self._due: dict[_Stream, None] = {}
        # Ended requests that the sink has yet to be told of, in turn, numbered: a name may end again and again.
        self._ended: dict[str, int] = {}
        self._end_numbers = itertools.count()
        # Calls of flush() that want the sink to settle, and those that have been served.
        self._settle_wanted = self._settle_done = 0
        # Until when the thread rests, and whether it waits for just that: a step need not wake it then.
        self._rest_until_s = 0.0
        self._resting = False
        # Calls of flush() under way: nobody rests meanwhile.
        self._flushing = 0
        # Of ends and settling, what _Stream has for lines.
        self._failure: str | None = None
        self._retry_at_s = 0.0
        self._closing = False
        # The thread has ended by an error of its own.
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="kv-token-streamer", daemon=True)
        self._thread.start()

    def open(self, request: str, block_ids: Sequence[int], first_token: int = 0) -> None:
        """Begins a request's stream: its tokens from first_token on will be streamed as they are written.

        Raises InvalidArgument when a block is none of the pool's, or the name none for files (require_request_name).
        """
        self._require_blocks(block_ids)
        require_request_name(request)
        with self._changed:
            assert request not in self._streams, "a request is streamed once at a time"
            self._streams[request] = _Stream(request, list(block_ids), first_token, first_token)

    def add_blocks(self, request: str, block_ids: Sequence[int]) -> None:
        """The request has got more blocks, behind those that it had. Unknown requests are ignored."""
        self._require_blocks(block_ids)
        with self._changed:
            stream = self._streams.get(request)
            if stream is not None:
                stream.block_ids.extend(block_ids)

    def advance(self, token_counts: Mapping[str, int]) -> None:
        """A step has ended: of each of these requests, the KV of so many tokens, from the first, is in the pool.

        Unknown requests are ignored. Raises InvalidArgument, having taken none, when a request has too few blocks.
        """
        with self._changed:
            for request, token_count in token_counts.items():
                stream = self._streams.get(request)
                if stream is not None:
                    self._lines.require_room(stream.block_ids, token_count)
            newly_behind = []
            for request, token_count in token_counts.items():
                stream = self._streams.get(request)
                if stream is not None and token_count > stream.written:
                    stream.written = token_count
                    self._due[stream] = None
                    if not stream.behind and token_count - stream.streamed > self._behind_tokens:
                        stream.behind = True
                        newly_behind.append(request)
            if not self._resting:
                self._changed.notify_all()
        if newly_behind:
            get_logger().warning("kv streams are behind", request_ids=newly_behind)

    def end(self, request: str) -> None:
        """Ends a request's stream: what was not streamed yet never will be, and the sink forgets the rest.

        On return the request's blocks are not read any more: waits for a copy under way, at most a staging buffer's.
        Unknown requests are ignored.
        """
        with self._changed:
            stream = self._streams.pop(request, None)
            if stream is None:
                return
            self._due.pop(stream, None)
            if stream.offered:
                assert request not in self._ended, "offered before the end of its namesake"
                self._ended[request] = next(self._end_numbers)
            self._changed.notify_all()
            while stream.reading and not self._is_broken:
                self._changed.wait()

    def position(self, request: str) -> StreamPosition | None:
        """How far a request's stream is; None when it is not open."""
        with self._changed:
            stream = self._streams.get(request)
            if stream is None:
                return None
            return StreamPosition(stream.written, stream.streamed, stream.behind)

    def flush(self, timeout_s: float) -> None:
        """Waits until the sink has everything that was written before this call, and has settled it.

        Raises DeadlineExceeded, with the sink's own trouble when it has any.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            marks = [(stream, stream.written) for stream in self._streams.values()]
            ended = dict(self._ended)

            def reached() -> bool:
                return all(self._ended.get(request) != number for request, number in ended.items()) and all(
                    stream.streamed >= written or self._streams.get(stream.request) is not stream
                    for stream, written in marks
                )

            self._flushing += 1
            self._changed.notify_all()
            try:
                self._wait(reached, deadline_s)
                self._settle_wanted += 1
                wanted = self._settle_wanted
                self._changed.notify_all()
                self._wait(lambda: self._settle_done >= wanted, deadline_s)
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Ends the thread, after what it is at, and then the sink; streams nothing more. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._sink.close()

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> None:
        if not self._changed.wait_for(condition, max(0.0, deadline_s - time.monotonic())):
            failures = (stream.failure for stream in self._streams.values())
            failure = next(filter(None, failures), self._failure)
            raise DeadlineExceeded(f"streaming KV lines{f' ({failure})' if failure else ''}")

    def _require_blocks(self, block_ids: Sequence[int]) -> None:
        count = self._lines.pool.block_count
        if any(not 0 <= block < count for block in block_ids):
            raise InvalidArgument("block_ids", tuple(block_ids), f"in [0, {count})")

    def _run(self) -> None:
        try:
            self._serve_sink()
        except Exception as error:
            with self._changed:
                self._is_broken, self._failure = True, f"the streamer broke: {error!r}"
                self._changed.notify_all()
            get_logger().exception("kv token streamer broke")

    def _serve_sink(self) -> None:
        while (work := self._take()) is not None:
            failure = None
            try:
                self._do(work)
            except KaveriError as error:
                failure = str(error)
            except Exception as error:
                # A sink's own trouble must not end all streams for good without a word.
                get_logger().exception("kv line sink failed")
                failure = repr(error)
            self._conclude(work, failure)

    def _take(self) -> _Work | None:
        """Waits for something to do; None when closing."""
        with self._changed:
            while not self._closing:
                now_s = time.monotonic()
                work = self._choose(now_s)
                if work is not None:
                    return work
                self._resting = now_s < self._rest_until_s and not self._flushing
                due = [stream.retry_at_s for stream in self._due if self._may_offer(stream)]
                wake_s = [self._rest_until_s] if self._resting else due
                if self._ended or self._settle_wanted > self._settle_done:
                    wake_s.append(self._retry_at_s)
                self._changed.wait(max(0.0, min(wake_s) - now_s) if wake_s else None)
                self._resting = False
            return None

    def _choose(self, now_s: float) -> _Work | None:
        if self._retry_at_s <= now_s:
            if self._ended:
                return _Work(ended=next(iter(self._ended)))
            if self._settle_wanted > self._settle_done:
                return _Work(settle=self._settle_wanted)
        if now_s < self._rest_until_s and not self._flushing:
            return None
        ready = [stream for stream in self._due if stream.retry_at_s <= now_s and self._may_offer(stream)]
        if not ready:
            return None
        together = ready[:1] if ready[0].failure else [stream for stream in ready if not stream.failure]
        runs = []
        room = self._staging.buffer_bytes // self._lines.line_bytes
        for stream in together:
            if not room:
                break
            # Out, and in again at the end of the queue if there is more of it: everyone gets a turn.
            del self._due[stream]
            tokens = range(stream.streamed, min(stream.written, stream.streamed + room))
            room -= len(tokens)
            stream.reading = stream.offered = True
            runs.append((stream, tokens))
        # While anything is left over there is no rest.
        self._rest_until_s = now_s + self._interval_s if room and len(together) == len(ready) else 0.0
        return _Work(runs=tuple(runs))

    def _may_offer(self, stream: _Stream) -> bool:
        """Whether the sink may know of the request; lines of a name that was used before come behind its end."""
        return stream.offered or (len(self._ended) < ENDED_MAX and stream.request not in self._ended)

    def _do(self, work: _Work) -> None:
        if work.ended is not None:
            self._sink.end(work.ended)
        elif work.settle:
            self._sink.settle(self._write_timeout_s)
        else:
            with self._staging.lend(0.0) as buffer:
                self._sink.write(self._gather(work, buffer), self._write_timeout_s)

    def _gather(self, work: _Work, buffer: npt.NDArray[np.uint8]) -> list[LineRun]:
        runs, position = [], 0
        try:
            for stream, tokens in work.runs:
                lines = buffer[position : position + len(tokens) * self._lines.line_bytes]
                position += lines.nbytes
                self._lines.gather(stream.block_ids, tokens, lines)
                runs.append(LineRun(stream.request, tokens, lines))
        finally:
            with self._changed:
                for stream, _ in work.runs:
                    stream.reading = False
                self._changed.notify_all()
        return runs

    def _conclude(self, work: _Work, failure: str | None) -> None:
        caught_up, newly_failed = [], []
        with self._changed:
            retry_at_s = 0.0 if failure is None else time.monotonic() + self._retry_s
            if not work.runs:
                self._failure, self._retry_at_s = failure, retry_at_s
                if work.ended is not None:
                    number = self._ended.pop(work.ended)
                    if failure is not None:
                        # Behind the others, which it is not to hold up.
                        self._ended[work.ended] = number
                elif failure is None:
                    self._settle_done = work.settle
            for stream, tokens in work.runs:
                if failure is None:
                    stream.streamed = tokens.stop
                elif stream.failure is None:
                    newly_failed.append(stream.request)
                stream.failure, stream.retry_at_s = failure, retry_at_s
                if stream.streamed < stream.written and self._streams.get(stream.request) is stream:
                    self._due[stream] = None
                if stream.behind and stream.written - stream.streamed <= self._behind_tokens:
                    stream.behind = False
                    caught_up.append(stream.request)
            self._changed.notify_all()
        if caught_up:
            get_logger().info("kv streams have caught up", request_ids=caught_up)
        if newly_failed:
            get_logger().warning(
                "kv lines were refused, and will be offered again", request_ids=newly_failed, reason=failure
            )
