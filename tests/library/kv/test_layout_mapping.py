"""KV cache mapped between layouts of one model, compared with an array of the whole model."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kaveri.errors import InvalidArgument, LayoutMismatch
from kaveri.kv.layout.block_map import map_blocks
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.layout.regions import RegionCopy, copy_regions
from tests.library.kv.kv_reference import KvPartition, RankPools, make_reference, token_ranges, whole_and_split

MODEL = KvLayout("model", 8, block_tokens=16, kv_head_count=4, head_dim=8, dtype="float16")
PROPERTY = settings(max_examples=60)


@PROPERTY
@given(whole_and_split(), token_ranges(), st.integers(0, 2**32 - 1))
def test_every_byte_gets_from_blocks_to_blocks_of_another_layout(
    pair: tuple[KvPartition, KvPartition], tokens: range, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    reference = make_reference(pair[0].layout, tokens.stop, chance)
    source, destination = (RankPools.of(partition, tokens.stop, chance) for partition in pair)
    source.write(reference)
    for pool, block_ids in zip(destination.pools, destination.block_ids, strict=True):
        mapped = map_blocks(source.pools[0].layout, pool.layout)
        copies = mapped.copies(tokens, source.block_ids[0], 0, block_ids, 0)
        heads = len(pool.layout.kv_heads)
        assert sum(copy.run_bytes * math.prod(copy.counts) for copy in copies) == len(tokens) * 2 * heads * (
            pool.layout.block_bytes // (2 * pool.layout.block_tokens * heads)
        )
        for layer in range(pool.layout.layer_count):
            from_layer = source.pools[0].memory[mapped.source_layer(layer)].reshape(1, -1)
            copy_regions(copies, from_layer, pool.memory[layer].reshape(1, -1))
    destination.assert_holds(reference, tokens)


def one_rank(block_tokens: int, order: str = "2NHD") -> KvLayout:
    return replace(MODEL, block_tokens=block_tokens, order=order)


def copies_of(
    source: KvLayout, destination: KvLayout, tokens: range, source_ids: range, destination_ids: range
) -> tuple[RegionCopy, ...]:
    return map_blocks(source, destination).copies(tokens, tuple(source_ids), 0, tuple(destination_ids), 0)


def test_neighbouring_blocks_of_equal_layouts_are_one_run() -> None:
    copies = copies_of(one_rank(16), one_rank(16), range(160), range(10), range(5, 15))
    assert [(copy.run_bytes, copy.counts) for copy in copies] == [(10 * MODEL.block_bytes, ())]


def test_neighbouring_blocks_of_unequal_size_are_one_strided_copy() -> None:
    # K and V of 16 tokens each, for all of the five pairs of blocks.
    copies = copies_of(one_rank(32), one_rank(16), range(160), range(5), range(10))
    assert sum(math.prod(copy.counts) for copy in copies) == 20
    assert {copy.run_bytes for copy in copies} == {MODEL.block_bytes // 2}


def test_the_number_of_copies_does_not_grow_with_the_context_where_blocks_are_neighbours() -> None:
    assert len(copies_of(one_rank(16, "2HND"), one_rank(16), range(160), range(10), range(10))) == 1
    assert len(copies_of(one_rank(16, "2HND"), one_rank(16), range(1600), range(100), range(100))) == 1


def test_a_map_is_computed_once_per_pair() -> None:
    assert map_blocks(one_rank(16), one_rank(32)) is map_blocks(one_rank(16), one_rank(32))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model_fingerprint", "another", "model_fingerprint"),
        ("layer_count", 9, "layers"),
        ("kv_head_count", 8, "kv_heads"),
        ("head_dim", 16, "head_dim"),
        ("dtype", "bfloat16", "dtype"),
        ("order", "vllm-opaque-7", "order"),
    ],
)
def test_models_that_differ_are_refused_by_the_field(field: str, value: object, named: str) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        map_blocks(MODEL, replace(MODEL, **{field: value}))  # type: ignore[arg-type]
    assert caught.value.field == named


def test_too_few_blocks_for_the_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_ids"):
        copies_of(one_rank(16), one_rank(32), range(161), range(10), range(10))


def test_copies_beyond_the_memory_are_refused() -> None:
    copies = copies_of(one_rank(16), one_rank(16), range(16), range(1), range(9, 10))
    with pytest.raises((ValueError, TypeError)):
        copy_regions(copies, np.zeros((1, MODEL.block_bytes), np.uint8), np.zeros((1, MODEL.block_bytes), np.uint8))
