"""stream_out and stream_in between instances that are partitioned differently, through every kind of place."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import DeadlineExceeded, InvalidArgument, LayoutMismatch
from kaveri.kv.chunk_link import ChunkReceiver, ChunkSender
from kaveri.kv.disk import LocalDisk
from kaveri.kv.layout import KvLayout
from kaveri.kv.partition import KvPartition
from kaveri.kv.places import FetchPlace, FlushPlace, HostMemory
from kaveri.kv.plan import make_plan
from kaveri.kv.staging import StagingBuffers
from kaveri.kv.streams import RequestCache, stream_in, stream_out
from kaveri.kv.ticket import KvEndpoint
from kaveri.testing.transport_peer import WAIT_S
from tests.library.kv.kv_reference import Instance, Reference, make_reference, pairs, token_ranges

MODEL = KvLayout("model", 6, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
PREFILL = KvPartition.even(MODEL, pipeline_stages=2, tensor_ranks=2)
DECODE = KvPartition.even(replace(MODEL, block_tokens=64, order="2HND"), pipeline_stages=3)
TOKENS = 150


def cache_of(instance: Instance, rank: int, request: str = "request") -> RequestCache:
    return RequestCache(request, instance.pools[rank], rank, instance.block_ids[rank])


def a_pair_of_instances(seed: int = 0) -> tuple[Reference, Instance, Instance]:
    chance = np.random.default_rng(seed)
    reference = make_reference(MODEL, TOKENS, chance)
    source, destination = (Instance.of(partition, TOKENS, chance) for partition in (PREFILL, DECODE))
    source.write(reference)
    return reference, source, destination


@settings(max_examples=40)
@given(pairs(), token_ranges(), st.integers(0, 2**32 - 1), st.sampled_from((512, 3000, 1 << 16)))
def test_every_byte_streams_between_any_two_partitions(
    pair: tuple[KvPartition, KvPartition], tokens: range, seed: int, chunk_bytes: int
) -> None:
    chance = np.random.default_rng(seed)
    reference = make_reference(pair[0].layout, tokens.stop, chance)
    source, destination = (Instance.of(partition, tokens.stop, chance) for partition in pair)
    source.write(reference)
    plan, staging = make_plan(*pair), StagingBuffers(chunk_bytes, 1)
    chunk_count = sum(len(list(plan.chunks(share, share.layers, tokens, chunk_bytes))) for share in plan.shares)
    place = HostMemory(chunk_bytes, chunk_count)
    to_ranks = dict.fromkeys(range(plan.destination.rank_count), place)
    from_ranks = dict.fromkeys(range(plan.source.rank_count), place)
    out = [
        stream_out(plan, cache_of(source, rank), to_ranks, staging, tokens=tokens, timeout_s=WAIT_S)
        for rank in range(plan.source.rank_count)
    ]
    into = [
        stream_in(plan, cache_of(destination, rank), from_ranks, staging, tokens=tokens, timeout_s=WAIT_S)
        for rank in range(plan.destination.rank_count)
    ]
    assert sum(out) == sum(into) == reference[:, tokens.start :].nbytes * destination.partition.replica_count
    destination.assert_holds(reference, tokens)
    with pytest.raises(DeadlineExceeded):  # what has been merged is not kept
        stream_in(plan, cache_of(destination, 0), from_ranks, staging, tokens=tokens, timeout_s=0.0)


@pytest.mark.parametrize("kind", ["host", "disk", "tcp", "shm"])
def test_ranks_stream_side_by_side_through_any_place(kind: str, tmp_path: Path) -> None:
    reference, source, destination = a_pair_of_instances()
    plan = make_plan(PREFILL, DECODE)
    with contextlib.ExitStack() as stack:
        # One place per destination rank, as if each were a machine of its own.
        ends = [both_ends(stack, kind, tmp_path / str(rank)) for rank in range(DECODE.rank_count)]
        to_ranks = {rank: out for rank, (out, _) in enumerate(ends)}

        def send(rank: int) -> None:
            stream_out(
                plan, cache_of(source, rank), to_ranks, StagingBuffers(6000), tokens=range(TOKENS), timeout_s=WAIT_S
            )

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(PREFILL.rank_count)]
        for thread in threads:
            thread.start()
        for rank, (_, back) in enumerate(ends):
            from_ranks = dict.fromkeys(range(PREFILL.rank_count), back)
            stream_in(
                plan,
                cache_of(destination, rank),
                from_ranks,
                StagingBuffers(6000),
                tokens=range(TOKENS),
                timeout_s=WAIT_S,
            )
        for thread in threads:
            thread.join(WAIT_S)
        for _, back in ends:
            if isinstance(back, ChunkReceiver):
                back.check_integrity()
    destination.assert_holds(reference, range(TOKENS))


def both_ends(stack: contextlib.ExitStack, kind: str, folder: Path) -> tuple[FlushPlace, FetchPlace]:
    if kind == "host":
        host = HostMemory(6000, 100)
        return host, host
    if kind == "disk":
        return LocalDisk(folder, 10**7), LocalDisk(folder, 0)
    folder.mkdir()
    address = "127.0.0.1:0" if kind == "tcp" else str(folder / "kv.sock")
    receiver = ChunkReceiver(listen=[KvEndpoint(kind, address)], epoch=1, block_count=100, block_bytes=4096)
    stack.callback(receiver.close)
    sender = ChunkSender(receiver.grant, block_count=6, block_bytes=4096)
    stack.callback(sender.close)
    return sender, receiver


def test_a_prompt_streams_layer_by_layer_and_chunk_by_chunk_as_it_is_computed() -> None:
    reference, source, destination = a_pair_of_instances()
    plan, staging, place = make_plan(PREFILL, DECODE), StagingBuffers(1 << 14, 1), HostMemory(1 << 14, 100)
    to_ranks, from_ranks = dict.fromkeys(range(3), place), dict.fromkeys(range(4), place)
    parts = [
        (range(start, min(start + 64, TOKENS)), range(layer, layer + 1))
        for start in range(0, TOKENS, 64)
        for layer in range(MODEL.layer_count)
    ]
    for done, (tokens, layers) in enumerate(parts):
        for rank in range(PREFILL.rank_count):
            stream_out(plan, cache_of(source, rank), to_ranks, staging, tokens=tokens, layers=layers, timeout_s=WAIT_S)
        for rank in range(DECODE.rank_count):
            stream_in(
                plan, cache_of(destination, rank), from_ranks, staging, tokens=tokens, layers=layers, timeout_s=WAIT_S
            )
        if done == MODEL.layer_count - 1:
            destination.assert_holds(reference, range(64))
    destination.assert_holds(reference, range(TOKENS))


def test_a_request_can_be_kept_and_streamed_in_twice() -> None:
    reference, source, destination = a_pair_of_instances()
    plan, staging, place = make_plan(PREFILL, DECODE), StagingBuffers(1 << 14), HostMemory(1 << 14, 100)
    for rank in range(4):
        stream_out(
            plan,
            cache_of(source, rank),
            dict.fromkeys(range(3), place),
            staging,
            tokens=range(TOKENS),
            timeout_s=WAIT_S,
        )
    for keep in (True, False):
        for rank in range(3):
            destination.pools[rank].memory.fill(0xEE)
            stream_in(
                plan,
                cache_of(destination, rank),
                dict.fromkeys(range(4), place),
                staging,
                tokens=range(TOKENS),
                timeout_s=WAIT_S,
                keep=keep,
            )
        destination.assert_holds(reference, range(TOKENS))


def test_requests_that_are_batched_differently_do_not_mix() -> None:
    # Two requests of one prefill instance go to two decode instances.
    reference, source, destination = a_pair_of_instances(0)
    other_reference, other_source, other_destination = a_pair_of_instances(1)
    plan, staging, place = make_plan(PREFILL, DECODE), StagingBuffers(1 << 14), HostMemory(1 << 14, 200)
    to_ranks, from_ranks = dict.fromkeys(range(3), place), dict.fromkeys(range(4), place)
    for rank in range(4):
        for name, instance in (("a", source), ("b", other_source)):
            cache = cache_of(instance, rank, name)
            stream_out(plan, cache, to_ranks, staging, tokens=range(TOKENS), timeout_s=WAIT_S)
    for rank in range(3):
        for name, instance in (("b", other_destination), ("a", destination)):
            cache = cache_of(instance, rank, name)
            stream_in(plan, cache, from_ranks, staging, tokens=range(TOKENS), timeout_s=WAIT_S)
    destination.assert_holds(reference, range(TOKENS))
    other_destination.assert_holds(other_reference, range(TOKENS))


def test_a_pool_that_is_not_the_plans_is_refused() -> None:
    _, source, _ = a_pair_of_instances()
    plan = make_plan(KvPartition.even(MODEL), DECODE)
    with pytest.raises(LayoutMismatch):
        stream_out(plan, cache_of(source, 0), {}, StagingBuffers(1 << 14), tokens=range(1), timeout_s=WAIT_S)


def test_blocks_outside_the_pool_are_refused() -> None:
    _, source, _ = a_pair_of_instances()
    outside = replace(cache_of(source, 0), block_ids=(0, source.pools[0].block_count))
    plan, places = make_plan(PREFILL, DECODE), dict.fromkeys(range(3), HostMemory(1 << 14, 10))
    with pytest.raises(InvalidArgument, match="block_ids"):
        stream_out(plan, outside, places, StagingBuffers(1 << 14), tokens=range(1), timeout_s=WAIT_S)


def test_a_rank_without_a_place_is_named() -> None:
    _, source, _ = a_pair_of_instances()
    with pytest.raises(InvalidArgument, match="rank 0"):
        stream_out(
            make_plan(PREFILL, DECODE),
            cache_of(source, 0),
            {},
            StagingBuffers(1 << 14),
            tokens=range(1),
            timeout_s=WAIT_S,
        )
