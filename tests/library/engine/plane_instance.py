"""Test double of an instance: the KV transfers of one engine's ranks, and the events they report."""

import queue
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from kaveri.engine.kv_plane import Granted
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.rank import PromptChunk, Rank, RankSetup
from kaveri.engine.vllm.rank_plane import RankPlane
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, ticket_parts
from kaveri.kv.transports import make_transports
from kaveri.wire.messages import ticket_from_proto, ticket_to_proto

BLOCKS = 8
TOKENS = 10
"""Length of a prompt: two and a half blocks."""
SOON_S = 60.0


class PlaneInstance:
    def __init__(
        self,
        ranks: Sequence[Rank],
        listen: Sequence[KvEndpoint] = (),
        epoch: int = 1,
        transports: tuple[str, ...] = ("shm", "tcp"),
    ) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.epoch = epoch
        setup = RankSetup(tuple(listen), partial(make_transports, transports), epoch)
        self.layout = ranks[0].layout
        self.plane = DataPlane(ranks, setup, self.events.put, self.lost.put)

    def next(self) -> Any:
        return self.events.get(timeout=SOON_S)

    def ticket(
        self,
        source: KvLayout,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        token_count: int = TOKENS,
        expires_in_s: float = 10 * SOON_S,
    ) -> Ticket:
        """Return a ticket for KV of the source, after a round trip through its wire format."""
        parts = ticket_parts(source, self.layout, self.plane.endpoints)
        ticket = Ticket(
            transfer_id=secrets.token_bytes(16),
            secret=b"s" * 16,
            epoch=self.epoch,
            endpoints=() if parts else self.plane.endpoints[0],
            block_ids=tuple(block_ids),
            token_count=token_count,
            expires_in_s=expires_in_s,
            layout=self.layout,
            first_block=first_block,
            parts=parts,
        )
        return ticket_from_proto(ticket_to_proto(ticket))

    def grant(self, source: KvLayout, block_ids: Sequence[int], **fields: Any) -> Ticket:
        """Make a ticket and grant it. fields: further arguments of ticket()."""
        ticket = self.ticket(source, block_ids, **fields)
        self.plane.grant(ticket)
        assert self.next() == Granted(ticket.transfer_id)
        return ticket

    def leased_blocks(self) -> int:
        return self.plane.flow().receiving.leased_block_count


def compute_prompt(rank: RankPlane, layout: KvLayout, name: str, block_ids: Sequence[int]) -> None:
    """Run one step of a rank that computes a whole prompt."""
    rank.begin_step([PromptChunk(name, TOKENS, tuple(block_ids), 0, TOKENS)])
    for layer in range(layout.layer_count):
        rank.layer_done(layer)
    rank.end_step()
