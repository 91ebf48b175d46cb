"""Token streaming beside a step loop: what reaches the sink, and what the loop does not have to wait for."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kaveri.errors import DeadlineExceeded, InvalidArgument, NoCapacity, TransferFailed
from kaveri.kv.blocks import BlockAllocator
from kaveri.kv.chunk_link import ChunkSender
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_file import LineDisk, read_line_file
from kaveri.kv.line_link import LineReceiver, LineSender
from kaveri.kv.line_pool import LinePool
from kaveri.kv.lines import LineRun, PoolLines, decode_record, encode_header
from kaveri.kv.places import HostMemory
from kaveri.kv.pool import KvPool
from kaveri.kv.ticket import KvEndpoint
from kaveri.kv.token_streamer import LineSink, StreamPosition, TokenStreamer
from kaveri.testing.transport_peer import WAIT_S, wait_until
from kaveri.testing.transport_runs import MARK

LAYOUT = KvLayout("model", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="bfloat16")
LINE_BYTES = LAYOUT.token_bytes


class MemorySink:
    """Keeps lines by request and token; may be shut, and may fail."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, bytes]] = {}
        self.ended: list[str] = []
        self.run_counts: list[int] = []
        self.settled = 0
        self.given_back = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail: Callable[[], bool] = lambda: False

    def write(self, runs: Sequence[LineRun], timeout_s: float) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.run_counts.append(len(runs))
        for run in runs:
            if self.fail():
                raise TransferFailed("the sink is ill")
            lines = run.lines.reshape(LAYOUT.layer_count, 2, len(run.tokens), -1)
            kept = self.lines.setdefault(run.request, {})
            for index, token in enumerate(run.tokens):
                kept[token] = lines[:, :, index].tobytes()
                self.given_back |= bytes([MARK]) in kept[token]

    def end(self, request: str) -> None:
        self.ended.append(request)
        self.lines.pop(request, None)

    def settle(self, timeout_s: float) -> None:
        self.settled += 1

    def close(self) -> None: ...


@pytest.fixture
def pool() -> KvPool:
    pool = KvPool(LAYOUT, 24)
    pool.memory[:] = np.random.default_rng(0).integers(0, MARK, pool.memory.shape, dtype=np.uint8)
    return pool


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


@pytest.fixture
def streamer(pool: KvPool, sink: MemorySink) -> Iterator[TokenStreamer]:
    streamer = TokenStreamer(pool, sink, behind_tokens=5, staging_bytes=7 * LINE_BYTES, retry_s=0.01)
    yield streamer
    sink.gate.set()
    streamer.close()


def line_of(pool: KvPool, block_ids: Sequence[int], token: int) -> bytes:
    blocks = pool.memory[:, block_ids[token // LAYOUT.block_tokens]]
    return blocks.reshape(LAYOUT.layer_count, 2, LAYOUT.block_tokens, -1)[:, :, token % LAYOUT.block_tokens].tobytes()


def lines_of(pool: KvPool, block_ids: Sequence[int], tokens: range) -> dict[int, bytes]:
    return {token: line_of(pool, block_ids, token) for token in tokens}


def test_the_lines_of_all_requests_of_a_step_reach_the_sink(
    pool: KvPool, sink: MemorySink, streamer: TokenStreamer
) -> None:
    blocks = {"a": [3, 9], "b": [1], "c": [7, 2, 5]}
    first = {"a": 4, "b": 0, "c": 9}
    for request, block_ids in blocks.items():
        streamer.open(request, block_ids, first[request])
    for step in range(1, 4):
        streamer.advance({request: token + step for request, token in first.items()})
    streamer.flush(WAIT_S)
    for request, block_ids in blocks.items():
        expected = lines_of(pool, block_ids, range(first[request], first[request] + 3))
        assert sink.lines[request] == expected
        assert streamer.position(request) == StreamPosition(first[request] + 3, first[request] + 3, behind=False)
    assert sink.settled == 1


def test_a_request_that_grows_gives_its_new_blocks(pool: KvPool, sink: MemorySink, streamer: TokenStreamer) -> None:
    streamer.open("a", [3])
    with pytest.raises(InvalidArgument, match="block_ids"):
        streamer.advance({"a": 5})
    streamer.add_blocks("a", [8])
    streamer.advance({"a": 5})
    streamer.flush(WAIT_S)
    assert sink.lines["a"] == lines_of(pool, [3, 8], range(5))


def test_steps_within_the_interval_reach_the_sink_together(pool: KvPool, sink: MemorySink) -> None:
    streamer = TokenStreamer(pool, sink, interval_s=3600.0)
    streamer.open("a", [3, 9])
    streamer.open("b", [1])
    streamer.advance({"a": 1})
    wait_until(lambda: sink.run_counts == [1], "nothing to rest from, so the first step goes out at once")
    for token_count in range(2, 5):
        streamer.advance({"a": token_count, "b": token_count - 1})
    streamer.flush(WAIT_S)
    assert sink.run_counts == [1, 2]
    assert sink.lines == {"a": lines_of(pool, [3, 9], range(4)), "b": lines_of(pool, [1], range(3))}
    streamer.close()


def test_a_streamer_that_has_not_caught_up_does_not_rest(pool: KvPool, sink: MemorySink) -> None:
    streamer = TokenStreamer(pool, sink, staging_bytes=7 * LINE_BYTES, interval_s=3600.0)
    streamer.open("a", range(6))
    streamer.advance({"a": 24})
    wait_until(lambda: positions(streamer, "a") == [24], "four writes, and no flush that asks for them")
    streamer.close()


def test_steps_go_on_while_the_sink_stands_still_and_streams_catch_up(
    pool: KvPool, sink: MemorySink, streamer: TokenStreamer
) -> None:
    sink.gate.clear()
    streamer.open("a", range(10))
    streamer.open("b", range(10, 20))
    # Every one of these returns, though nobody opens the gate.
    for token_count in range(1, 40):
        streamer.advance({"a": token_count, "b": token_count})
    position = streamer.position("a")
    assert position is not None
    assert position.behind
    assert position.written_tokens == 39
    with pytest.raises(DeadlineExceeded):
        streamer.flush(0.01)
    sink.gate.set()
    streamer.flush(WAIT_S)
    assert streamer.position("a") == streamer.position("b") == StreamPosition(39, 39, behind=False)
    assert sink.lines == {"a": lines_of(pool, range(10), range(39)), "b": lines_of(pool, range(10, 20), range(39))}


def test_a_sink_that_fails_is_tried_again_until_it_has_everything(
    pool: KvPool, sink: MemorySink, streamer: TokenStreamer
) -> None:
    ill = True
    sink.fail = lambda: ill
    streamer.open("a", range(10))
    streamer.advance({"a": 30})
    # Long enough for a first try.
    assert sink.entered.wait(WAIT_S)
    with pytest.raises(DeadlineExceeded, match="the sink is ill"):
        streamer.flush(0.5)
    ill = False
    streamer.flush(WAIT_S)
    assert sink.lines["a"] == lines_of(pool, range(10), range(30))


def test_a_request_that_the_sink_refuses_holds_up_no_other(
    pool: KvPool, sink: MemorySink, streamer: TokenStreamer
) -> None:
    refused = True
    write = sink.write

    def refuse_one(runs: Sequence[LineRun], timeout_s: float) -> None:
        for run in runs:
            if run.request == "refused" and refused:
                raise TransferFailed("not this one")
            write((run,), timeout_s)

    sink.write = refuse_one  # type: ignore[method-assign]
    blocks = {"refused": range(8), "a": range(8, 16), "b": range(16, 24)}
    for request, block_ids in blocks.items():
        streamer.open(request, block_ids)
    for token_count in range(1, 31):
        streamer.advance(dict.fromkeys(blocks, token_count))
    wait_until(lambda: positions(streamer, "a", "b") == [30, 30], "the others")
    with pytest.raises(DeadlineExceeded, match="not this one"):
        streamer.flush(0.0)
    refused = False
    streamer.flush(WAIT_S)
    assert sink.lines == {request: lines_of(pool, block_ids, range(30)) for request, block_ids in blocks.items()}


def positions(streamer: TokenStreamer, *requests: str) -> list[int]:
    found = [streamer.position(request) for request in requests]
    return [position.streamed_tokens for position in found if position is not None]


def test_an_end_and_a_settling_that_fail_are_tried_again(sink: MemorySink, streamer: TokenStreamer) -> None:
    troubles = {"end": 2, "settle": 2}
    end, settle = sink.end, sink.settle

    def trouble(what: str) -> None:
        if troubles[what]:
            troubles[what] -= 1
            raise TransferFailed(what)

    def end_at_last(request: str) -> None:
        trouble("end")
        end(request)

    def settle_at_last(timeout_s: float) -> None:
        trouble("settle")
        settle(timeout_s)

    sink.end, sink.settle = end_at_last, settle_at_last  # type: ignore[method-assign]
    streamer.open("a", [1])
    streamer.advance({"a": 4})
    streamer.flush(WAIT_S)
    streamer.end("a")
    # The same name anew: its lines come behind the end.
    streamer.open("a", [2])
    streamer.advance({"a": 1})
    streamer.flush(WAIT_S)
    assert troubles == {"end": 0, "settle": 0}
    assert sink.ended == ["a"]
    assert list(sink.lines["a"]) == [0]


@pytest.mark.parametrize("request_name", ["", "../up", "a b", "a~b", "a" * 121])
def test_names_that_no_sink_could_use_are_refused(streamer: TokenStreamer, request_name: str) -> None:
    with pytest.raises(InvalidArgument):
        streamer.open(request_name, [1])


@pytest.mark.usefixtures("breaks_are_expected")
def test_an_unforeseen_error_of_a_sink_ends_no_stream(pool: KvPool, sink: MemorySink, streamer: TokenStreamer) -> None:
    def fail_once() -> bool:
        sink.fail = lambda: False
        raise ZeroDivisionError

    sink.fail = fail_once
    streamer.open("a", [1])
    streamer.advance({"a": 4})
    streamer.flush(WAIT_S)
    assert sink.lines["a"] == lines_of(pool, [1], range(4))


def test_ended_requests_are_forgotten_behind_their_lines(sink: MemorySink, streamer: TokenStreamer) -> None:
    streamer.open("a", [1])
    streamer.open("never-streamed", [2])
    streamer.advance({"a": 2})
    streamer.flush(WAIT_S)
    streamer.end("a")
    streamer.end("never-streamed")
    streamer.end("unknown")
    streamer.flush(WAIT_S)
    assert sink.ended == ["a"]
    assert sink.lines == {}
    assert streamer.position("a") is None


def test_while_a_sink_forgets_nobody_it_is_offered_nobody_new(
    pool: KvPool, sink: MemorySink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.kv.token_streamer.ENDED_MAX", 3)
    streamer = TokenStreamer(pool, sink, retry_s=0.001, interval_s=0.0)
    forget, ill = sink.end, True

    def end(request: str) -> None:
        if ill:
            raise TransferFailed("the sink is ill")
        forget(request)

    sink.end = end  # type: ignore[method-assign]
    streamer.open("open", [1])
    streamer.advance({"open": 1})
    wait_until(lambda: "open" in sink.lines, "the sink knows of one that stays open")
    for number in range(10):
        streamer.open(f"r{number}", [2])
        streamer.advance({f"r{number}": 1})
        if number < 3:
            wait_until(lambda number=number: f"r{number}" in sink.lines, "its line is there")
        streamer.end(f"r{number}")
    streamer.open("new", [3])
    streamer.advance({"open": 2, "new": 1})
    wait_until(lambda: 1 in sink.lines["open"], "one that it knows goes on")
    with pytest.raises(DeadlineExceeded, match="the sink is ill"):
        streamer.flush(0.05)
    assert set(sink.lines) == {"open", "r0", "r1", "r2"}
    ill = False
    streamer.flush(WAIT_S)
    assert sorted(sink.ended) == ["r0", "r1", "r2"]
    assert sink.lines == {"open": lines_of(pool, [1], range(2)), "new": lines_of(pool, [3], range(1))}
    streamer.close()


def test_an_end_that_the_sink_refuses_holds_up_no_other(pool: KvPool, sink: MemorySink) -> None:
    streamer = TokenStreamer(pool, sink, retry_s=0.001, interval_s=0.0)
    forget = sink.end

    def end(request: str) -> None:
        if request == "refused":
            raise TransferFailed("not this one")
        forget(request)

    sink.end = end  # type: ignore[method-assign]
    for request in ("refused", "a", "b"):
        streamer.open(request, [1])
        streamer.advance({request: 1})
        streamer.flush(WAIT_S)
    for request in ("refused", "a", "b"):
        streamer.end(request)
    wait_until(lambda: sink.ended == ["a", "b"], "the others are forgotten")
    # The last end went well, which clears the trouble; the next refusal brings it back.
    with pytest.raises(DeadlineExceeded, match="not this one"):
        streamer.flush(1.0)
    streamer.close()


def test_an_end_returns_while_the_sink_stands_still(sink: MemorySink, streamer: TokenStreamer) -> None:
    sink.gate.clear()
    streamer.open("a", [1])
    streamer.advance({"a": 2})
    assert sink.entered.wait(WAIT_S)
    streamer.end("a")
    sink.gate.set()
    streamer.flush(WAIT_S)
    assert sink.ended == ["a"]


def test_an_end_does_not_return_while_its_blocks_are_being_copied(
    sink: MemorySink, streamer: TokenStreamer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    gather = PoolLines.gather

    def slow_gather(lines: PoolLines, block_ids: Sequence[int], tokens: range, into: np.ndarray) -> None:
        copying.set()
        assert go_on.wait(WAIT_S)
        gather(lines, block_ids, tokens, into)

    monkeypatch.setattr(PoolLines, "gather", slow_gather)
    streamer.open("a", [1])
    streamer.advance({"a": 2})
    assert copying.wait(WAIT_S)
    ending = threading.Thread(target=streamer.end, args=("a",))
    ending.start()
    wait_until(lambda: streamer.position("a") is None, "the end")
    ending.join(0.05)
    assert ending.is_alive()
    go_on.set()
    ending.join(WAIT_S)
    assert not ending.is_alive()


@pytest.mark.parametrize("blocks", [[24], [-1]])
def test_blocks_outside_the_pool_are_refused(streamer: TokenStreamer, blocks: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="block_ids"):
        streamer.open("a", blocks)


def test_staging_that_holds_no_token_is_refused(pool: KvPool, sink: MemorySink) -> None:
    with pytest.raises(InvalidArgument, match="staging_bytes"):
        TokenStreamer(pool, sink, staging_bytes=LINE_BYTES - 1)


@pytest.mark.parametrize("seed", range(10))
def test_no_line_is_lost_or_of_a_block_given_back_under_random_loads(
    pool: KvPool, sink: MemorySink, streamer: TokenStreamer, seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    bytes_of_chance = np.random.default_rng(seed)
    sink_chance = random.Random(seed + 1)
    sink.fail = lambda: sink_chance.random() < 0.1
    allocator = BlockAllocator(pool.block_count)
    running: dict[str, int] = {}
    number = 0

    def fill(blocks: Sequence[int]) -> None:
        shape = pool.memory[:, blocks].shape
        pool.memory[:, blocks] = bytes_of_chance.integers(0, MARK, shape, dtype=np.uint8)

    for _ in range(150):
        if len(running) < 4 and chance.random() < 0.3:
            # A few names, used again and again.
            request = f"request-{number % 6}"
            number += 1
            if request not in running:
                first = chance.randrange(4)
                blocks = allocator.allocate(request, 1)
                fill(blocks)
                streamer.open(request, blocks, first)
                running[request] = first
        for request in list(running):
            if chance.random() < 0.1 or running[request] >= 20:
                streamer.end(request)
                # From here on the blocks are anyone's.
                pool.memory[:, list(allocator.blocks_of(request))] = MARK
                allocator.release(request)
                del running[request]
        for request in running:
            running[request] += chance.choice((1, 1, 1, 3))
            new = LAYOUT.block_count(running[request]) - len(allocator.blocks_of(request))
            blocks = allocator.allocate(request, max(0, new))
            fill(blocks)
            streamer.add_blocks(request, blocks)
        streamer.advance(running)
    streamer.flush(WAIT_S)
    assert not sink.given_back
    for request, token_count in running.items():
        kept = sink.lines.get(request, {})
        first = min(kept, default=token_count)
        assert kept == lines_of(pool, allocator.blocks_of(request), range(first, token_count))
    assert set(sink.lines) <= set(running)


def far_pool() -> tuple[LinePool, KvPool, BlockAllocator]:
    """Of another instance: larger blocks in another order."""
    pool = KvPool(replace(LAYOUT, block_tokens=8, order="2HND"), 20)
    allocator = BlockAllocator(20)

    def blocks_of(request: str, token_count: int) -> Sequence[int]:
        missing = pool.layout.block_count(token_count) - len(allocator.blocks_of(request))
        allocator.allocate(request, max(0, missing))
        return allocator.blocks_of(request)

    return LinePool(pool, LAYOUT, blocks_of, allocator.release), pool, allocator


def assert_copied(
    source: KvPool, block_ids: Sequence[int], target: KvPool, target_ids: Sequence[int], count: int
) -> None:
    ours, theirs = np.empty(count * LINE_BYTES, np.uint8), np.empty(count * LINE_BYTES, np.uint8)
    PoolLines(source).gather(block_ids, range(count), ours)
    PoolLines(target).gather(target_ids, range(count), theirs)
    assert np.array_equal(ours, theirs)


def stream_two_requests(pool: KvPool, sink: LineSink) -> TokenStreamer:
    streamer = TokenStreamer(pool, sink, staging_bytes=20 * LINE_BYTES, retry_s=0.01)
    streamer.open("a", [5, 3, 4])
    streamer.open("b", [0, 7])
    streamer.advance({"a": 4, "b": 2})
    for step in range(1, 7):
        streamer.advance({"a": 4 + step, "b": 2 + step})
    return streamer


def test_a_copy_is_kept_current_in_a_pool_of_another_layout(pool: KvPool) -> None:
    copy, target, allocator = far_pool()
    streamer = stream_two_requests(pool, copy)
    streamer.flush(WAIT_S)
    assert (copy.held("a"), copy.held("b")) == (range(10), range(8))
    assert_copied(pool, [5, 3, 4], target, allocator.blocks_of("a"), 10)
    assert_copied(pool, [0, 7], target, allocator.blocks_of("b"), 8)
    streamer.end("a")
    streamer.flush(WAIT_S)
    allocator.check_integrity(["b"])
    streamer.close()


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
def test_a_copy_is_kept_current_on_another_instance(pool: KvPool, tmp_path: Path, transport: str) -> None:
    copy, target, allocator = far_pool()
    address = "127.0.0.1:0" if transport == "tcp" else str(tmp_path / "kv.sock")
    receiver = LineReceiver(copy, listen=[KvEndpoint(transport, address)], epoch=1, chunk_bytes=1 << 16)
    sender = ChunkSender(receiver.grant, block_count=2)
    streamer = stream_two_requests(pool, LineSender(sender, "prefill-1", chunk_bytes=1 << 16))
    streamer.flush(WAIT_S)
    wait_until(lambda: (copy.held("a"), copy.held("b")) == (range(10), range(8)), "the copy")
    assert_copied(pool, [5, 3, 4], target, allocator.blocks_of("a"), 10)
    streamer.end("a")
    streamer.flush(WAIT_S)
    wait_until(lambda: allocator.owners() == ("b",), "the end of a")
    streamer.close()
    sender.close()
    receiver.close()


def test_lines_go_in_as_many_chunks_as_they_need() -> None:
    place, landed = HostMemory(1000, 10), {}
    sender = LineSender(place, "s", chunk_bytes=700)
    runs = [
        LineRun(f"request-{i}", range(i, i + 2), np.full(2 * LINE_BYTES, i, np.uint8)) for i in range(5)
    ]  # of which two go into a chunk
    sender.end("ended")
    sender.write(runs, WAIT_S)
    record_bytes = len(encode_header(runs[0])) + runs[0].lines.nbytes
    end_bytes = len(encode_header(LineRun("ended", range(0), np.empty(0, np.uint8))))
    for sequence, (first, count) in enumerate(((0, 2), (2, 2), (4, 1))):
        chunk = np.empty(count * record_bytes + (end_bytes if sequence == 0 else 0), np.uint8)
        place.fetch(f"s~{sequence}", chunk, 0.0)
        position = 0
        while position < chunk.nbytes:
            run, position = decode_record(chunk, position)
            landed[run.request] = run
        assert set(landed) >= {f"request-{i}" for i in range(first, first + count)}
    assert len(landed["ended"].tokens) == 0
    assert all(np.array_equal(landed[run.request].lines, run.lines) for run in runs)


def test_ends_that_nothing_takes_along_go_by_themselves_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kaveri.kv.line_link._ENDS_MAX", 2)
    place = HostMemory(200, 1)
    sender = LineSender(place, "s", chunk_bytes=200)
    for request in ("a", "b", "c"):
        sender.end(request)
    sent = np.empty(2 * len(encode_header(LineRun("a", range(0), np.empty(0, np.uint8)))), np.uint8)
    place.fetch("s~0", sent, 0.0)
    first, position = decode_record(sent, 0)
    assert [first.request, decode_record(sent, position)[0].request] == ["a", "b"]
    sender.end("d")
    # The place is full: what it does not take is not remembered either.
    for _ in range(2):
        with pytest.raises(NoCapacity):
            sender.end("e")
    place.discard("s~0")
    sender.end("e")


def test_a_run_larger_than_a_chunk_is_refused() -> None:
    sender = LineSender(HostMemory(1000, 10), "s", chunk_bytes=1000)
    with pytest.raises(InvalidArgument, match="chunk_bytes"):
        sender.write([LineRun("a", range(9), np.zeros(9 * LINE_BYTES, np.uint8))], WAIT_S)


def test_a_receiver_that_refuses_lines_keeps_those_of_others(tmp_path: Path) -> None:
    copy, _, _ = far_pool()
    receiver = LineReceiver(copy, listen=[KvEndpoint("unix", str(tmp_path / "kv.sock"))], epoch=1, chunk_bytes=1 << 16)
    sender = ChunkSender(receiver.grant, block_count=2)
    lines = LineSender(sender, "s", chunk_bytes=1 << 16)
    line = np.zeros(LINE_BYTES, np.uint8)
    lines.write([LineRun("a", range(1), line)], WAIT_S)
    lines.write([LineRun("a", range(2, 3), line), LineRun("b", range(1), line)], WAIT_S)  # a has a gap
    wait_until(lambda: copy.held("b") == range(1), "b")
    assert copy.held("a") == range(1)
    with pytest.raises(InvalidArgument, match="byte_count"):
        receiver.grant("too-large", (1 << 16) + 1, WAIT_S)
    sender.close()
    receiver.close()


def test_another_instance_that_goes_away_stops_no_step_and_is_told_of(pool: KvPool, tmp_path: Path) -> None:
    copy, _, _ = far_pool()
    receiver = LineReceiver(copy, listen=[KvEndpoint("tcp", "127.0.0.1:0")], epoch=1, chunk_bytes=1 << 16)
    sender = ChunkSender(receiver.grant, block_count=2)
    streamer = stream_two_requests(pool, LineSender(sender, "prefill-1", chunk_bytes=1 << 16))
    streamer.flush(WAIT_S)
    receiver.close()
    streamer.advance({"a": 12})
    with pytest.raises(DeadlineExceeded, match="closed"):
        streamer.flush(1.0)
    streamer.close()
    sender.close()


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_file import LineDisk
from kaveri.kv.pool import KvPool
from kaveri.kv.token_streamer import TokenStreamer
layout = KvLayout("model", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="bfloat16")
pool = KvPool(layout, 2000)
pool.memory[:] = np.random.default_rng(7).integers(0, 256, pool.memory.shape, dtype=np.uint8)
streamer = TokenStreamer(pool, LineDisk(Path(sys.argv[1]), layout, 10**9))
for request in range(4):
    streamer.open(f"request-{request}", range(500 * request, 500 * request + 500))
for token_count in range(1, 2001):
    streamer.advance({f"request-{request}": token_count for request in range(4)})
    if token_count == 20:
        streamer.flush(20.0)
        print("flushed", flush=True)
streamer.flush(20.0)
sys.stdin.read()
"""


def test_after_a_kill_every_file_holds_whole_lines_from_the_first(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "flushed\n"
    # Somewhere among the steps that follow.
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=WAIT_S)
    pool = KvPool(LAYOUT, 2000)
    pool.memory[:] = np.random.default_rng(7).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    for request in range(4):
        file = read_line_file(tmp_path / f"request-{request}.kvlines")
        position = 0
        restored = KvPool(LAYOUT, 500)
        for run in file.runs:
            assert run.tokens.start == position
            position = run.tokens.stop
            PoolLines(restored).store(range(500), run)
        assert position >= 20
        assert_copied(pool, range(500 * request, 500 * request + 500), restored, range(500), position)
        # And whoever comes back goes on from there.
        disk = LineDisk(tmp_path, LAYOUT, 10**9)
        disk.write(
            [LineRun(f"request-{request}", range(position, position + 1), np.zeros(LINE_BYTES, np.uint8))], WAIT_S
        )
        disk.close()
        assert read_line_file(tmp_path / f"request-{request}.kvlines").runs[-1].tokens.start == position
