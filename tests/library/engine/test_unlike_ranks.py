"""KV between instances with different numbers of tensor-parallel ranks: parts by heads, over real connections."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kaveri.engine.kv_plane import first_token_of
from kaveri.engine.vllm.rank import PromptChunk, RankCall
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.errors import LayoutMismatch
from kaveri.kv.layout.layout import KvLayout, part_places, source_rank
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.part_transfers import PartedPush
from kaveri.kv.transfer.receiver import TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, pushed_tickets, require_pushable, taken_tickets
from kaveri.kv.transports import make_transports
from tests.library.engine.plane_instance import BLOCKS, TOKENS, PlaneInstance, compute_prompt

MODEL = KvLayout("model", 2, block_tokens=4, kv_head_count=4, head_dim=8, dtype="float32")
OPAQUE = "H-engine-7"

Values = np.ndarray[Any, np.dtype[np.uint8]]
"""[layer, token, KV head, K or V, byte]; with an opaque order [layer, block, KV head, byte]."""


class UnlikeInstance(PlaneInstance):
    def __init__(
        self, layout: KvLayout, transport: str, listen: Sequence[KvEndpoint] = (), block_count: int = BLOCKS
    ) -> None:
        self.layout = layout
        self.pools = [KvPool(layout.rank(rank), block_count) for rank in range(layout.tensor_ranks)]
        self.ranks = [RankPlane(layout, pool) for pool in self.pools]
        super().__init__(self.ranks, listen, transports=(transport,))

    def compute(self, name: str, block_ids: Sequence[int], values: Values, first_token_id: int = 7) -> None:
        """Run one step that computes a whole prompt, whose KV is `values`."""
        self.fill(block_ids, values)
        for rank in self.ranks:
            compute_prompt(rank, self.layout, name, block_ids)
        self.plane.do(RankCall("hand_over", (name, first_token_id)))

    def fill(self, block_ids: Sequence[int], values: Values) -> None:
        for place, part in self._places(block_ids, values.shape[1]):
            place.write(values[part])

    def require(self, block_ids: Sequence[int], values: Values) -> None:
        """Assert that the blocks hold the values: on every rank, those of its heads."""
        seen = np.zeros(values.shape[2], bool)
        for place, part in self._places(block_ids, values.shape[1]):
            np.testing.assert_array_equal(place.read(), values[part])
            seen[part[2]] = True
        assert seen.all(), "a head is on no rank"

    def _places(self, block_ids: Sequence[int], count: int) -> Iterator[tuple["_Places", tuple[slice, slice, slice]]]:
        """Yield each rank's blocks and the part of the values that belongs to its heads."""
        for pool in self.pools:
            heads = pool.layout.kv_heads
            part = slice(None), slice(None), slice(heads.start, heads.stop)
            yield _Places(pool, block_ids, count), part


class _Places:
    """Reads and writes values in some blocks of a pool; the plain reference: one loop."""

    def __init__(self, pool: KvPool, block_ids: Sequence[int], count: int) -> None:
        self._pool, self._block_ids, self._count = pool, block_ids, count

    def write(self, values: Values) -> None:
        for index in range(self._count):
            self._at(index)[:] = values[:, index]

    def read(self) -> Values:
        return np.stack([self._at(index) for index in range(self._count)], axis=1)

    def _at(self, index: int) -> Values:
        layout, memory = self._pool.layout, self._pool.memory
        heads, tokens = layout.kv_head_count, layout.block_tokens
        if not layout.has_known_order:
            return memory[:, self._block_ids[index]].reshape(len(memory), heads, -1)
        block = memory[:, self._block_ids[index // tokens]]
        if layout.order == "2NHD":
            return block.reshape(len(memory), 2, tokens, heads, -1)[:, :, index % tokens].swapaxes(1, 2)
        return block.reshape(len(memory), 2, heads, tokens, -1)[:, :, :, index % tokens].swapaxes(1, 2)


def values_of(layout: KvLayout, seed: int) -> Values:
    """Return random KV of a prompt."""
    chance, head_bytes = np.random.default_rng(seed), layout.head_dim * 4
    shape: tuple[int, ...] = (layout.layer_count, TOKENS, layout.kv_head_count, 2, head_bytes)
    if not layout.has_known_order:
        blocks, bytes_ = layout.block_count(TOKENS), 2 * layout.block_tokens * head_bytes
        shape = (layout.layer_count, blocks, layout.kv_head_count, bytes_)
    return chance.integers(0, 256, shape, np.uint8)


class UnlikePair:
    def __init__(self, folder: Path, transport: str, source: KvLayout, target: KvLayout) -> None:
        address = "127.0.0.1:0" if transport == "tcp" else str(folder / "kv.sock")
        self.sending = UnlikeInstance(source, transport)
        self.receiving = UnlikeInstance(target, transport, [KvEndpoint(transport, address)])

    def push(self, ticket: Ticket, name: str = "r") -> None:
        require_pushable(self.sending.layout, ticket)
        self.sending.plane.open_push(name, ticket)


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(transport: str, source: KvLayout, target: KvLayout) -> UnlikePair:
            pair = UnlikePair(tmp_path, transport, source, target)
            stack.callback(pair.receiving.plane.close)
            stack.callback(pair.sending.plane.close)
            return pair

        yield make


over_each_transport = pytest.mark.parametrize("transport", ["unix", "shm", "tcp"])


@over_each_transport
@pytest.mark.parametrize(
    ("here", "there"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4), (8, 1), (1, 8), (8, 4), (2, 8)]
)
@pytest.mark.parametrize(
    ("order", "target_order", "block_tokens"),
    [("2NHD", "2NHD", 4), ("2HND", "2HND", 4), ("2NHD", "2HND", 8), ("2HND", "2NHD", 2), (OPAQUE, OPAQUE, 4)],
)
def test_every_head_lands_in_its_place(
    make_pair: Any, transport: str, here: int, there: int, order: str, target_order: str, block_tokens: int
) -> None:
    source = replace(MODEL, tensor_ranks=here, order=order)
    target = replace(MODEL, tensor_ranks=there, order=target_order, block_tokens=block_tokens)
    pair = make_pair(transport, source, target)
    values = values_of(source, seed=here)
    target_blocks = [5, 1, 6, 2, 7][: target.block_count(TOKENS)]
    ticket = pair.receiving.grant(source, target_blocks)
    assert pair.receiving.leased_blocks() == len(target_blocks)
    pair.push(ticket)
    pair.sending.compute("r", [0, 3, 2], values)
    landed, accepted = pair.receiving.next(), pair.sending.next()
    copies = max(1, there // MODEL.kv_head_count)
    kv_bytes = copies * len(target_blocks) * target.layer_count * target.block_bytes
    assert isinstance(landed, TransferLanded), landed
    assert isinstance(accepted, PushAccepted), accepted
    assert (landed.transfer_id, landed.kv_bytes) == (ticket.transfer_id, kv_bytes)
    assert (accepted.transfer_id, accepted.kv_bytes) == (ticket.transfer_id, kv_bytes)
    pair.receiving.require(target_blocks, values)
    assert pair.receiving.leased_blocks() == 0
    assert pair.sending.events.empty()
    assert pair.receiving.events.empty()


@over_each_transport
@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 2)])
def test_blocks_that_the_receiver_has_already_are_left_as_they_are(
    make_pair: Any, transport: str, here: int, there: int
) -> None:
    source, target = replace(MODEL, tensor_ranks=here), replace(MODEL, tensor_ranks=there)
    pair = make_pair(transport, source, target)
    cached, values = values_of(MODEL, seed=1), values_of(MODEL, seed=2)
    pair.receiving.fill([4, 5, 1], cached)
    pair.sending.compute("r", [0, 3, 2], values)
    pair.push(pair.receiving.grant(source, [5, 1], first_block=1))
    assert isinstance(pair.receiving.next(), TransferLanded)
    expected = values.copy()
    expected[:, : MODEL.block_tokens] = cached[:, : MODEL.block_tokens]
    pair.receiving.require([4, 5, 1], expected)


@over_each_transport
@pytest.mark.parametrize(("here", "there"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_what_one_rank_refuses_fails_as_a_whole_and_may_be_pushed_again(
    make_pair: Any, transport: str, here: int, there: int
) -> None:
    source, target = replace(MODEL, tensor_ranks=here), replace(MODEL, tensor_ranks=there)
    pair = make_pair(transport, source, target)
    values = values_of(MODEL, seed=3)
    ticket = pair.receiving.grant(source, [5, 1, 6])
    pair.receiving.ranks[-1].do(RankCall("revoke", (ticket.transfer_id,)))
    released = pair.receiving.next()
    assert isinstance(released, TransferReleased)
    assert released.reason == ("revoked" if there == 1 else f"rank {there - 1}: revoked")
    assert pair.receiving.leased_blocks() == 0
    pair.push(ticket)
    pair.sending.compute("r", [0, 3, 2], values)
    failed = pair.sending.next()
    assert (type(failed), failed.transfer_id) == (PushFailed, ticket.transfer_id)
    assert failed.reason.startswith("rank ") == (here > 1)
    pair.push(pair.receiving.grant(source, [2, 3, 4]))
    assert isinstance(pair.receiving.next(), TransferLanded)
    assert isinstance(pair.sending.next(), PushAccepted)
    pair.receiving.require([2, 3, 4], values)


def test_a_sending_rank_that_gives_up_its_part_fails_the_whole_on_both_sides(make_pair: Any) -> None:
    source = replace(MODEL, tensor_ranks=2)
    pair = make_pair("unix", source, MODEL)
    ticket = pair.receiving.grant(source, [5, 1, 6])
    pair.push(ticket)
    pair.sending.ranks[1].detach()
    pair.sending.compute("r", [0, 3, 2], values_of(MODEL, seed=4))
    failed, released = pair.sending.next(), pair.receiving.next()
    assert (type(failed), failed.transfer_id) == (PushFailed, ticket.transfer_id)
    assert (type(released), released.transfer_id) == (TransferReleased, ticket.transfer_id)
    assert pair.receiving.leased_blocks() == 0


def test_a_part_that_fails_frees_what_was_leased_to_a_silent_one(make_pair: Any) -> None:
    source = replace(MODEL, tensor_ranks=2)
    pair = make_pair("unix", source, MODEL)
    ticket = pair.receiving.grant(source, [5, 1, 6])
    told: queue.Queue[Any] = queue.Queue()
    with ExitStack() as stack:
        for rank, part in enumerate(taken_tickets(0, ticket)):
            sender = KvSender(KvPool(source.rank(rank), BLOCKS), told.put, transports=make_transports(("unix",)))
            stack.callback(sender.close)
            sender.open(part)
            if rank == 1:
                sender.abort(part.transfer_id)
        released = pair.receiving.next()
        assert (type(released), released.transfer_id) == (TransferReleased, ticket.transfer_id)
        assert pair.receiving.leased_blocks() == 0
    assert pair.receiving.events.empty()


def test_a_part_that_begins_when_another_has_failed_is_given_up(make_pair: Any) -> None:
    target = replace(MODEL, tensor_ranks=2)
    pair = make_pair("unix", MODEL, target)
    ticket = pair.receiving.grant(MODEL, [5, 1, 6])
    told: list[Any] = []
    opened: list[bytes] = []
    pushes: dict[bytes, Any] = {}

    def fail(part: Ticket, listener: Any, reason: str) -> None:
        del pushes[part.transfer_id]
        listener(PushFailed(part.transfer_id, reason))

    def start(part: Ticket, listener: Any) -> None:
        if opened:
            pushes[opened[0]].fail("the link is lost")
        opened.append(part.transfer_id)
        give_up = partial(fail, part, listener)
        pushes[part.transfer_id] = Mock(fail=give_up, abort=lambda *, keep_marked: give_up("aborted"))

    parts = pushed_tickets(MODEL, 0, ticket)
    PartedPush(ticket, parts, pushes, {}).open(told.append, start)
    assert opened == [part.transfer_id for part in parts]
    assert told == [PushFailed(ticket.transfer_id, "the link is lost")]
    assert not pushes


def test_parts_that_were_handed_over_with_unlike_tokens_name_none(make_pair: Any) -> None:
    source = replace(MODEL, tensor_ranks=2)
    pair = make_pair("unix", source, MODEL)
    pair.push(pair.receiving.grant(source, [5, 1, 6]))
    for number, rank in enumerate(pair.sending.ranks):
        rank.begin_step([PromptChunk("r", TOKENS, (0, 3, 2), 0, TOKENS)])
        rank.end_step()
        rank.do(RankCall("hand_over", ("r", number)))
    landed = pair.receiving.next()
    assert isinstance(landed, TransferLanded)
    assert first_token_of(landed.note) is None


@pytest.mark.parametrize(
    ("heads", "here", "there", "order", "field"),
    [
        (6, 2, 3, "2NHD", "tensor_ranks"),
        (4, 3, 1, "2NHD", "tensor_ranks"),
        (4, 2, 1, "engine-7", "tensor_ranks"),
        (4, 1, 0, "2NHD", "tensor_ranks"),
    ],
)
def test_heads_that_do_not_divide_and_bytes_that_are_not_known_are_refused_by_name(
    heads: int, here: int, there: int, order: str, field: str
) -> None:
    source = replace(MODEL, kv_head_count=heads, tensor_ranks=here, order=order)
    target = replace(source, tensor_ranks=there)
    for one, other in ((source, target), (target, source)):
        assert not one.is_mappable(other)
        with pytest.raises(LayoutMismatch) as refused:
            part_places(one, other)
        assert refused.value.field == field


def test_opaque_heads_are_not_mapped_to_blocks_of_another_size() -> None:
    source = replace(MODEL, order=OPAQUE, tensor_ranks=2)
    for block_tokens in (2, 8):
        with pytest.raises(LayoutMismatch) as refused:
            part_places(source, replace(source, tensor_ranks=1, block_tokens=block_tokens))
        assert refused.value.field == "block_tokens"


@pytest.mark.parametrize("here", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("there", [1, 2, 4, 8, 16])
def test_each_rank_gets_each_of_its_heads_once_and_like_ranks_meet(here: int, there: int) -> None:
    source, target = replace(MODEL, tensor_ranks=here), replace(MODEL, tensor_ranks=there)
    places = part_places(source, target)
    for rank in range(there):
        heads = [head for place in places if place.rank == rank for head in place.layout.kv_heads]
        assert heads == list(target.rank(rank).kv_heads)
    for place in places:
        held = source.rank(source_rank(source, place)).kv_heads
        assert set(place.layout.kv_heads) <= set(held)
        if here == there:
            assert source_rank(source, place) == place.rank
