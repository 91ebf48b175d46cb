"""Planted bugs of copies: see planted.py."""

from collections.abc import Iterator
from typing import Any

from kaveri.domain.view import ViewedInstance
from kaveri.engine.copier import Copier
from kaveri.engine.stepwise.lifecycle import Lifecycle
from kaveri.kv.replicas.replicas import Replicas
from kaveri.policy import pairs
from kaveri.policy.pairs import PartnerOrder
from services.decode import holder as decode_holder
from services.decode.holder import ReplicaHolder
from services.decode.replicator import Replicator
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.planting import nothing, nothing_async, planted, replaced


@planted
def replica_not_sealed_at_resume() -> Iterator[None]:
    """A holder takes more of the former owner while a request goes on from the copy."""
    with replaced(Replicas, "seal", lambda _: nothing):
        yield


@planted
def old_holder_not_closed() -> Iterator[None]:
    """An owner that has found another holder leaves its copy with the former one."""
    with replaced(Replicator, "_close", lambda _: nothing_async):
        yield


@planted
def orphaned_replicas_kept() -> Iterator[None]:
    """A holder keeps the copies of lost owners that no router resumes."""
    with replaced(ReplicaHolder, "_drop_expired", lambda _: nothing):
        yield


@planted
def watermark_one_block_too_far() -> Iterator[None]:
    """An owner copies and marks the block under way as if its last token were computed."""

    def make(original: Any) -> Any:
        def whole_blocks(self: Any, owner: Any) -> int:
            count: int = original(self, owner)
            is_begun = owner.computed > count * self._info.layout.block_tokens
            return count + 1 if count and is_begun else count

        return whole_blocks

    with replaced(Lifecycle, "whole_blocks", make):
        yield


@planted
def mark_answered_before_its_digest() -> Iterator[None]:
    """A receiver keeps what is marked before it has verified it."""

    def make(original: Any) -> Any:
        def problem(self: Any, landing: Any, block_ids: Any, token_count: int | None) -> str | None:
            is_mark = landing.ticket.is_open and token_count is not None
            found: str | None = original(self, landing, block_ids, token_count)
            return None if is_mark else found

        return problem

    with replaced(SimulatedReceiver, "_problem", make):
        yield


@planted
def torn_copies_marked() -> Iterator[None]:
    """An owner marks blocks as copied although their request lost them, and another may have overwritten them."""
    with replaced(Copier, "_is_intact", lambda _: lambda *_: True):
        yield


@planted
def tail_sent_unfinished() -> Iterator[None]:
    """An owner that lets a request go names a token of its last block whose KV is not computed."""

    def make(original: Any) -> Any:
        def stopped_tokens(self: Any, sequence: Any) -> int | None:
            count: int | None = original(self, sequence)
            return count + 1 if count and count % self._info.layout.block_tokens else count

        return stopped_tokens

    with replaced(Lifecycle, "stopped_tokens", make):
        yield


@planted
def tail_not_sent() -> Iterator[None]:
    """A request that is let go leaves its holder without the tokens behind the last whole block."""
    with replaced(Replicas, "_add_tail", lambda _: nothing):
        yield


@planted
def copy_of_other_tokens_used() -> Iterator[None]:
    """A holder goes on with a request from a copy of other tokens than its router has."""

    def make(original: Any) -> Any:
        def usable_tokens(held: tuple[int, ...], resumption: Any, block_tokens: int) -> int:
            named = (*resumption.token_ids[: len(held)], *held[len(resumption.token_ids) :])
            return int(original(named, resumption, block_tokens))

        return usable_tokens

    with replaced(decode_holder, "usable_tokens", make):
        yield


@planted
def blocks_of_dropped_replicas_free_at_once() -> Iterator[None]:
    """Blocks of a copy that is dropped serve a request while the former owner may still write into them."""

    def make(original: Any) -> Any:
        def drop(self: Any, replica: Any) -> None:
            original(self, replica)
            if not replica.reading:
                self._allocator.release(replica)
                replica.block_ids.clear()

        return drop

    with replaced(Replicas, "_drop", make):
        yield


@planted
def promoted_with_one_block_too_many() -> Iterator[None]:
    """A request takes a block of its copy that has not arrived whole."""

    def make(original: Any) -> Any:
        def promote(self: Any, request: Any, replica: Any, held_tokens: int) -> None:
            more = min(held_tokens + self._info.layout.block_tokens, len(request.token_ids) - 1)
            copy = self.replicas._replicas.get(replica)
            if copy is not None and more > len(copy.token_ids) and len(copy.block_ids) * 16 >= more:
                copy.token_ids += request.token_ids[len(copy.token_ids) : more]
                held_tokens = more
            original(self, request, replica, held_tokens)

        return promote

    with replaced(Lifecycle, "promote", make):
        yield


@planted
def partners_of_former_lives_count() -> Iterator[None]:
    """The leading router takes a new life of an instance to have the partner of the former one."""

    def make(original: Any) -> Any:
        def partner(one: ViewedInstance, newest: PartnerOrder | None) -> Any:
            return newest.partner_id if newest is not None else original(one, newest)

        return partner

    with replaced(pairs, "_partner", make):
        yield
