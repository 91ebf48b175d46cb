"""KV lines, their records and their files: against plain indexing, and cut and damaged at every place."""

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch, NoCapacity, TransferFailed
from kaveri.kv import line_file
from kaveri.kv.layout import KvLayout
from kaveri.kv.line_file import LineDisk, LineFile, read_line_file
from kaveri.kv.line_pool import LinePool
from kaveri.kv.lines import LineRun, PoolLines, TornRecord, decode_record, encode_header
from kaveri.kv.partition import KvPartition
from kaveri.kv.pool import KvPool
from kaveri.testing.transport_peer import WAIT_S
from tests.library.kv.kv_reference import MARK, Instance, layouts, make_reference, token_ranges

LAYOUT = KvLayout("model", 2, block_tokens=16, kv_head_count=2, head_dim=3, dtype="float16")


def run_of(request: str, tokens: range, seed: int = 0, layout: KvLayout = LAYOUT) -> LineRun:
    lines = np.random.default_rng(seed).integers(0, MARK, len(tokens) * layout.token_bytes, dtype=np.uint8)
    return LineRun(request, tokens, lines)


def assert_same(found: LineRun, expected: LineRun) -> None:
    assert (found.request, found.tokens) == (expected.request, expected.tokens)
    assert np.array_equal(found.lines, expected.lines)


@settings(max_examples=40)
@given(layouts(), token_ranges(), st.integers(0, 2**32 - 1), st.sampled_from((16, 32, 48)))
def test_lines_leave_a_pool_and_enter_another(
    layout: KvLayout, tokens: range, seed: int, other_block_tokens: int
) -> None:
    chance = np.random.default_rng(seed)
    reference = make_reference(layout, tokens.stop, chance)
    other = dataclasses.replace(layout, block_tokens=other_block_tokens, order="2HND")
    source, target = (Instance.of(KvPartition.even(each), tokens.stop, chance) for each in (layout, other))
    source.write(reference)
    lines = np.empty(len(tokens) * layout.token_bytes, np.uint8)
    PoolLines(source.pools[0]).gather(source.block_ids[0], tokens, lines)
    # The form of lines: [layer, K or V, token, head, byte].
    expected = reference[:, tokens.start :].transpose(0, 2, 1, 3, 4)
    assert lines.tobytes() == expected.tobytes()
    PoolLines(target.pools[0]).store(target.block_ids[0], LineRun("request", tokens, lines))
    target.assert_holds(reference, tokens)


def test_opaque_pools_have_no_lines() -> None:
    with pytest.raises(LayoutMismatch, match="order"):
        PoolLines(KvPool(dataclasses.replace(LAYOUT, order="opaque"), 1))


def records(*runs: LineRun) -> np.ndarray:
    return np.frombuffer(b"".join(encode_header(run) + run.lines.tobytes() for run in runs), np.uint8)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(min_size=1, max_size=20), st.integers(0, 10**6), st.integers(0, 9)), max_size=6))
def test_records_come_back_as_they_were(written: list[tuple[str, int, int]]) -> None:
    runs = [run_of(name, range(first, first + count), seed=first) for name, first, count in written]
    data, position = records(*runs), 0
    for run in runs:
        found, position = decode_record(data, position)
        assert_same(found, run)
    assert position == data.nbytes


def test_a_record_cut_anywhere_is_torn() -> None:
    data = records(run_of("request", range(3, 5)))
    for length in range(data.nbytes):
        with pytest.raises(TornRecord):
            decode_record(data[:length], 0)
        zero_filled = np.zeros_like(data)
        zero_filled[:length] = data[:length]
        if not np.array_equal(zero_filled, data):
            with pytest.raises(TransferFailed):
                decode_record(zero_filled, 0)


def test_a_bit_flipped_anywhere_is_found() -> None:
    whole = records(run_of("request", range(3, 5)), run_of("request", range(5, 6)))
    _, end = decode_record(whole, 0)
    for position in range(end):
        damaged = whole.copy()
        damaged[position] ^= 1 << position % 8
        with pytest.raises(TransferFailed):
            decode_record(damaged, 0)


@pytest.mark.parametrize("request_name", ["", "r" * 121, "ü" * 61])
def test_names_too_long_for_a_record_are_refused(request_name: str) -> None:
    with pytest.raises(InvalidArgument, match="request"):
        encode_header(run_of(request_name, range(1)))


def write_file(folder: Path, runs: list[LineRun]) -> Path:
    disk = LineDisk(folder, LAYOUT, 10**6)
    disk.write(runs, WAIT_S)
    disk.settle(WAIT_S)
    disk.close()
    return folder / f"{runs[0].request}.kvlines"


def tokens_of(file: LineFile) -> list[range]:
    return [run.tokens for run in file.runs]


def test_a_file_cut_anywhere_gives_its_whole_records_and_is_gone_on_with(tmp_path: Path) -> None:
    runs = [run_of("a", range(token, token + 1), token) for token in range(3)]
    data = write_file(tmp_path / "whole", runs).read_bytes()
    whole = read_line_file(tmp_path / "whole" / "a.kvlines")
    assert (whole.layout, whole.torn_bytes, whole.whole_bytes) == (LAYOUT, 0, len(data))
    record_bytes = len(encode_header(runs[0])) + runs[0].lines.nbytes
    header_bytes = len(data) - 3 * record_bytes
    for length in range(len(data) - 1, 0, -7):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "a.kvlines").write_bytes(data[:length])
        whole_runs = max(0, length - header_bytes) // record_bytes
        if length >= header_bytes:
            file = read_line_file(folder / "a.kvlines")
            assert tokens_of(file) == [range(token, token + 1) for token in range(whole_runs)]
            assert file.torn_bytes == length - header_bytes - whole_runs * record_bytes
        else:
            with pytest.raises(TornRecord):
                read_line_file(folder / "a.kvlines")
        write_file(folder, runs[whole_runs:])
        assert (folder / "a.kvlines").read_bytes() == data


def test_a_record_that_the_disk_took_half_of_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of("a", range(token, token + 1), token) for token in range(3)]
    disk = LineDisk(tmp_path, LAYOUT, 10**6)
    disk.write(runs[:1], WAIT_S)

    def fill_up(file: int, buffers: list[memoryview]) -> None:
        os.write(file, b"".join(buffers)[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(line_file, "write_all", fill_up)
        with pytest.raises(TransferFailed, match="No space left"):
            disk.write(runs[1:2], WAIT_S)
    disk.write(runs[1:], WAIT_S)
    disk.close()
    found = read_line_file(tmp_path / "a.kvlines")
    assert found.torn_bytes == 0
    for run, expected in zip(found.runs, runs, strict=True):
        assert_same(run, expected)


def test_damage_before_the_end_of_a_file_is_no_tear_and_is_never_written_over(tmp_path: Path) -> None:
    path = write_file(tmp_path, [run_of("a", range(token, token + 1), token) for token in range(3)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(TransferFailed) as caught:
        read_line_file(path)
    assert not isinstance(caught.value, TornRecord)
    with pytest.raises(TransferFailed):
        write_file(tmp_path, [run_of("a", range(3, 4))])
    assert path.read_bytes() == data


def test_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path, [run_of("a", range(1))])
    disk = LineDisk(tmp_path, dataclasses.replace(LAYOUT, dtype="bfloat16"), 10**6)
    with pytest.raises(LayoutMismatch, match="dtype"):
        disk.write([run_of("a", range(1, 2))], WAIT_S)
    disk.close()


def test_an_ended_request_leaves_no_file_and_frees_its_room(tmp_path: Path) -> None:
    disk = LineDisk(tmp_path, LAYOUT, byte_limit=1000)
    for number in range(10):
        disk.write([run_of(f"request-{number}", range(10))], WAIT_S)
        with pytest.raises(NoCapacity):
            disk.write([run_of("too-much", range(10))], WAIT_S)
        disk.end(f"request-{number}")
        disk.end("too-much")
    assert list(tmp_path.iterdir()) == []
    disk.close()


def pool_sink(block_tokens: int = 32) -> tuple[LinePool, KvPool, dict[str, list[int]]]:
    pool = KvPool(dataclasses.replace(LAYOUT, block_tokens=block_tokens, order="2HND"), 8)
    pool.memory.fill(MARK)
    blocks: dict[str, list[int]] = {}

    def blocks_of(request: str, token_count: int) -> list[int]:
        held = blocks.setdefault(request, [])
        while len(held) < pool.layout.block_count(token_count):
            held.append(sum(map(len, blocks.values())))
        return held

    return LinePool(pool, LAYOUT, blocks_of, blocks.__delitem__), pool, blocks


def test_a_copy_in_another_pool_knows_what_it_holds() -> None:
    sink, pool, blocks = pool_sink()
    runs = [run_of("a", range(5, 9), 1), run_of("b", range(2), 2), run_of("a", range(7, 40), 3)]
    sink.write(runs, WAIT_S)
    assert (sink.held("a"), sink.held("b"), sink.held("c")) == (range(5, 40), range(2), range(0))
    lines = np.empty(33 * LAYOUT.token_bytes, np.uint8)
    PoolLines(pool).gather(blocks["a"], range(7, 40), lines)
    assert np.array_equal(lines, runs[2].lines)
    sink.end("a")
    assert list(blocks) == ["b"]
    assert sink.held("a") == range(0)


def test_a_copy_refuses_lines_behind_a_gap() -> None:
    sink, _, _ = pool_sink()
    sink.write([run_of("a", range(3))], WAIT_S)
    with pytest.raises(TransferFailed, match="does not go on"):
        sink.write([run_of("a", range(4, 5))], WAIT_S)
    assert sink.held("a") == range(3)


def test_a_copy_refuses_another_model() -> None:
    with pytest.raises(LayoutMismatch, match="model_fingerprint"):
        LinePool(
            KvPool(dataclasses.replace(LAYOUT, model_fingerprint="other"), 1), LAYOUT, lambda *_: (), lambda _: None
        )
