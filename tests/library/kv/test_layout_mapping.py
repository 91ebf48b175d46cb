"""KV cache mapped between partitions of one model, against a plain array of the whole model."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch
from kaveri.kv.layout import KvLayout
from kaveri.kv.partition import KvPartition
from kaveri.kv.plan import KvPlan, make_plan
from kaveri.kv.pool import KvPool
from kaveri.kv.regions import RegionCopy, copy_regions
from tests.library.kv.kv_reference import Instance, make_reference, pairs, token_ranges

MODEL = KvLayout("model", 8, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
PROPERTY = settings(max_examples=60)


def layers_of(pool: KvPool, layers: slice) -> np.ndarray:
    """[layers, layer_bytes]: a pool as the copies see it."""
    return pool.memory[layers].reshape(len(pool.memory[layers]), -1)


@PROPERTY
@given(pairs(), token_ranges(), st.integers(0, 2**32 - 1), st.booleans())
def test_every_byte_gets_from_blocks_to_blocks_of_another_layout(
    pair: tuple[KvPartition, KvPartition], tokens: range, seed: int, direct: bool
) -> None:
    chance = np.random.default_rng(seed)
    reference = make_reference(pair[0].layout, tokens.stop, chance)
    source, destination = (Instance.of(partition, tokens.stop, chance) for partition in pair)
    source.write(reference)
    plan = make_plan(*pair)
    for share in plan.shares:
        from_pool = layers_of(source.pools[share.source_rank], plan.source_layers(share, share.layers))
        to_pool = layers_of(destination.pools[share.destination_rank], plan.destination_layers(share, share.layers))
        from_ids, to_ids = source.block_ids[share.source_rank], destination.block_ids[share.destination_rank]
        if direct:
            copy_regions(plan.direct(share, tokens, from_ids, to_ids), from_pool, to_pool)
            continue
        layer_bytes = 2 * len(tokens) * len(share.heads) * plan.source.head_bytes
        chunk = np.empty((len(share.layers), layer_bytes), np.uint8)
        packing = plan.packing(share, tokens, from_ids)
        assert sum(copy.byte_count for copy in packing) == layer_bytes
        copy_regions(packing, from_pool, chunk)
        copy_regions(plan.unpacking(share, tokens, to_ids), chunk, to_pool)
    destination.assert_holds(reference, tokens)


@PROPERTY
@given(pairs())
def test_every_layer_and_head_of_every_rank_has_exactly_one_source(pair: tuple[KvPartition, KvPartition]) -> None:
    plan = make_plan(*pair)
    for rank in range(plan.destination.rank_count):
        given_to = [(layer, head) for share in plan.shares_to(rank) for layer in share.layers for head in share.heads]
        held = [(layer, head) for layer in plan.destination.layers(rank) for head in plan.destination.heads(rank)]
        assert sorted(given_to) == held
        for share in plan.shares_to(rank):
            assert set(share.layers) <= set(plan.source.layers(share.source_rank))
            assert set(share.heads) <= set(plan.source.heads(share.source_rank))


@PROPERTY
@given(pairs(), token_ranges(), st.integers(512, 40_000))
def test_chunks_cover_a_share_once_within_their_bound(
    pair: tuple[KvPartition, KvPartition], tokens: range, chunk_bytes: int
) -> None:
    plan = make_plan(*pair)
    for share in plan.shares:
        chunks = list(plan.chunks(share, range(pair[0].layout.layer_count), tokens, chunk_bytes))
        covered = [(layer, token) for chunk in chunks for layer in chunk.layers for token in chunk.tokens]
        assert sorted(covered) == [(layer, token) for layer in share.layers for token in tokens]
        assert all(0 < chunk.byte_count <= chunk_bytes for chunk in chunks)


def one_rank(block_tokens: int, order: str = "2NHD") -> KvPartition:
    return KvPartition.even(replace(MODEL, block_tokens=block_tokens, order=order))


def copies_of(plan: KvPlan, tokens: range, source_ids: range, destination_ids: range) -> tuple[RegionCopy, ...]:
    return plan.direct(plan.shares[0], tokens, tuple(source_ids), tuple(destination_ids))


def test_neighbouring_blocks_of_equal_layouts_are_one_run() -> None:
    copies = copies_of(make_plan(one_rank(16), one_rank(16)), range(160), range(10), range(5, 15))
    assert [(copy.run_bytes, copy.counts) for copy in copies] == [(10 * MODEL.block_bytes, ())]


def test_neighbouring_blocks_of_unequal_size_are_one_strided_copy() -> None:
    # K and V of 16 tokens each, for all of the five pairs of blocks.
    copies = copies_of(make_plan(one_rank(32), one_rank(16)), range(160), range(5), range(10))
    assert sum(copy.run_count for copy in copies) == 20
    assert {copy.run_bytes for copy in copies} == {MODEL.block_bytes // 2}


def test_the_number_of_copies_does_not_grow_with_the_context_where_blocks_are_neighbours() -> None:
    plan = make_plan(one_rank(16, "2HND"), one_rank(16))
    assert len(copies_of(plan, range(160), range(10), range(10))) == 1
    assert len(copies_of(plan, range(1600), range(100), range(100))) == 1


def test_a_plan_is_computed_once_per_pair() -> None:
    assert make_plan(one_rank(16), one_rank(32)) is make_plan(one_rank(16), one_rank(32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "another"),
        ("layer_count", 4),
        ("kv_head_count", 8),
        ("head_dim", 16),
        ("dtype", "bfloat16"),
    ],
)
def test_models_that_differ_are_refused_by_the_field(field: str, value: object) -> None:
    other = KvPartition.even(replace(MODEL, **{field: value}))
    with pytest.raises(LayoutMismatch) as caught:
        make_plan(KvPartition.even(MODEL), other)
    assert (caught.value.field, caught.value.theirs) == (field, value)


@pytest.mark.parametrize(("field", "value"), [("order", "vllm-opaque-7"), ("dtype", "fp8_e4m3")])
def test_opaque_layouts_are_refused_before_any_plan(field: str, value: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        KvPartition.even(replace(MODEL, **{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "stage_layers", "tensor_ranks"),
    [("stage_layers", (4, 3), 1), ("stage_layers", (8, 0), 1), ("stage_layers", (), 1), ("tensor_ranks", (8,), 3)],
)
def test_partitions_that_do_not_come_out_even_are_refused(
    field: str, stage_layers: tuple[int, ...], tensor_ranks: int
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        KvPartition(MODEL, stage_layers, tensor_ranks)
    assert caught.value.field == field


def test_heads_that_several_ranks_hold_are_taken_from_different_ones() -> None:
    few_heads = replace(MODEL, kv_head_count=1)
    source = KvPartition.even(few_heads, tensor_ranks=4)
    plan = make_plan(source, source)
    assert [(share.source_rank, share.destination_rank) for share in plan.shares] == [(r, r) for r in range(4)]


def test_too_few_blocks_for_the_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_ids"):
        copies_of(make_plan(one_rank(16), one_rank(32)), range(161), range(10), range(10))


def test_a_token_that_does_not_fit_into_a_chunk_is_refused() -> None:
    plan = make_plan(one_rank(16), one_rank(16))
    with pytest.raises(InvalidArgument, match="chunk_bytes"):
        list(plan.chunks(plan.shares[0], range(8), range(4), 2 * 4 * 8 * 2 - 1))


def test_copies_beyond_the_memory_are_refused() -> None:
    copies = copies_of(make_plan(one_rank(16), one_rank(16)), range(16), range(1), range(9, 10))
    with pytest.raises((ValueError, TypeError)):
        copy_regions(copies, np.zeros((1, MODEL.block_bytes), np.uint8), np.zeros((1, MODEL.block_bytes), np.uint8))
