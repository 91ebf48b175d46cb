"""Layouts, pools and the block allocator."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from kaveri.errors import LayoutMismatch, NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import BlockAllocator, KvPool
from kaveri.kv.transfer.ticket import Ticket
from kaveri.wire.messages import layout_from_proto, layout_to_proto

LAYOUT = KvLayout("m", 3, block_tokens=4, kv_head_count=2, head_dim=5, dtype="bfloat16")


def test_a_layout_knows_its_sizes() -> None:
    assert LAYOUT.block_bytes == 2 * 4 * 2 * 5 * 2
    assert LAYOUT.token_bytes == 3 * 2 * 2 * 5 * 2
    assert [LAYOUT.block_count(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "n"),
        ("layer_count", 4),
        ("block_tokens", 8),
        ("kv_head_count", 1),
        ("head_dim", 6),
        ("dtype", "float16"),
        ("order", "NHD2"),
        ("first_layer", 3),
        ("first_kv_head", 2),
    ],
)
def test_layouts_that_differ_name_the_field(field: str, value: object) -> None:
    LAYOUT.require_same(dataclasses.replace(LAYOUT))
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.require_same(dataclasses.replace(LAYOUT, **{field: value}))
    assert (caught.value.field, caught.value.theirs) == (field, value)


def test_layouts_are_mappable_when_only_blocks_and_known_orders_differ() -> None:
    for other in (LAYOUT, dataclasses.replace(LAYOUT, block_tokens=128), dataclasses.replace(LAYOUT, order="2HND")):
        LAYOUT.require_mappable(other)
        assert LAYOUT.is_mappable(other)
    opaque = dataclasses.replace(LAYOUT, order="engine-1")
    opaque.require_mappable(dataclasses.replace(opaque))
    for other in (dataclasses.replace(opaque, block_tokens=8), LAYOUT, None):
        assert not opaque.is_mappable(other)


def test_ranks_of_one_instance_are_never_taken_for_one_another() -> None:
    model = dataclasses.replace(LAYOUT, layer_count=6, kv_head_count=4)
    ranks = [
        dataclasses.replace(LAYOUT, first_layer=first_layer, first_kv_head=first_head)
        for first_layer in (0, 3)
        for first_head in (0, 2)
    ]
    for one, other in itertools.permutations(ranks, 2):
        assert not one.is_mappable(other)
        with pytest.raises(LayoutMismatch):
            one.require_part(other)
    for rank in ranks:
        assert not model.is_mappable(rank)
        model.require_part(rank)


def test_layouts_travel_whole() -> None:
    layout = dataclasses.replace(LAYOUT, order="2HND", first_layer=3, first_kv_head=2)
    assert layout_from_proto(layout_to_proto(layout)) == layout


def test_a_pool_is_aligned_contiguous_and_zero() -> None:
    memory = KvPool(LAYOUT, 7).memory
    assert memory.shape == (3, 7, LAYOUT.block_bytes)
    assert memory.flags.c_contiguous
    assert memory.ctypes.data % 4096 == 0
    assert not memory.any()


@pytest.mark.parametrize("blocks", [[], [0], [6, 5, 4], [1, 2, 3], [0, 1, 5, 6, 3], [2, 2], list(range(7))])
def test_regions_are_the_blocks_in_order_with_neighbours_joined(blocks: list[int]) -> None:
    pool = KvPool(LAYOUT, 7)
    pool.memory[:] = np.random.default_rng(0).integers(0, 256, pool.memory.shape, dtype=np.uint8)
    for layer in range(3):
        regions = pool.regions(layer, blocks)
        assert b"".join(regions) == pool.memory[layer, blocks].tobytes()
        breaks = sum(after != before + 1 for before, after in itertools.pairwise(blocks))
        assert len(regions) == (breaks + 1 if blocks else 0)


def test_regions_are_the_pool_itself() -> None:
    pool = KvPool(LAYOUT, 2)
    pool.regions(1, [1])[0][:3] = b"abc"
    assert pool.memory[1, 1, :3].tobytes() == b"abc"


def test_too_large_a_wish_takes_nothing() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate("a", 3)
    with pytest.raises(NoCapacity):
        allocator.allocate("b", 2)
    assert allocator.free_count == 1
    allocator.check_integrity(["a"])


def test_strangers_among_the_owners_are_found() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate("a", 1)
    with pytest.raises(AssertionError, match="held by"):
        allocator.check_integrity([])


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_never_lost_and_never_held_twice(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    allocator = BlockAllocator(30)
    held: dict[int, list[int]] = {}
    for _ in range(300):
        owner, other, count = chance.randrange(5), chance.randrange(5), chance.randrange(12)
        action = chance.choice(("allocate", "allocate", "release", "move"))
        if action == "allocate" and count <= allocator.free_count:
            held.setdefault(owner, []).extend(allocator.allocate(owner, count))
        elif action == "release":
            assert allocator.release(owner) == len(held.pop(owner, []))
        elif action == "move" and owner != other:
            allocator.move(owner, other)
            held.setdefault(other, []).extend(held.pop(owner, []))
        taken = [block for blocks in held.values() for block in blocks]
        assert len(taken) == len(set(taken)) == 30 - allocator.free_count
        for name, blocks in held.items():
            assert allocator.blocks_of(name) == tuple(blocks)
        allocator.check_integrity(held)


def test_a_ticket_in_a_log_or_a_traceback_does_not_show_its_secret() -> None:
    ticket = Ticket(b"n" * 16, b"hidden-from-logs", 1, (), (0,), 4, 30.0, LAYOUT)
    assert "hidden" not in f"{ticket} {ticket!r}"
