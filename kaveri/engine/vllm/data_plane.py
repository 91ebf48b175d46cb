"""Combines the KV transfers of all tensor-parallel ranks: a push is accepted, and a transfer lands, once every rank has
it. A transfer has the same id in all ranks. A failure in one rank cancels it in the others; it ends when no rank can
touch its blocks any more."""

import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kaveri.addresses import join_address, split_address
from kaveri.config.settings import MAX_PORT
from kaveri.engine.kv_plane import Granted, PlaneEvent, PlaneListener
from kaveri.engine.vllm.rank import BlockStaged, LostListener, Rank, RankCall, RankEvent, RankSetup
from kaveri.errors import ConfigError, EngineError
from kaveri.kv.transfer.flow import KvFlow, ReceiverFlow, SenderFlow
from kaveri.kv.transfer.gathering import Gathering, TransferStep
from kaveri.kv.transfer.push import IsIntact, PushListener, PushSender
from kaveri.kv.transfer.sender import PushEvent
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import PATH_NAMES

_SERIALS = itertools.count()
_STAGED_TIMEOUT_S = 10.0
"""Timeout of a rank that copies a block to its staging slot, normally about a millisecond."""


class DataPlane:
    """Pushes and receives KV on all tensor-parallel ranks (a KvPlane). Only close() waits for a rank in another
    process.

    setup: for all ranks; each listens at its own address (rank_endpoint()). listener: called on any thread, also within
    grant() or open_push(). on_lost: called when a rank, and with it every transfer, is lost. Raises ConfigError, with
    the ranks detached, if a rank cannot listen.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        setup: RankSetup,
        listener: PlaneListener,
        on_lost: LostListener,
    ) -> None:
        layout = ranks[0].layout
        assert len(ranks) == layout.tensor_ranks, f"{len(ranks)} ranks of {layout}"
        assert all(rank.layout == layout for rank in ranks), "the ranks are of unlike engines"
        self._ranks = tuple(ranks)
        self._listener = listener
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._pushes: dict[bytes, _Spread] = {}
        self._landings: dict[bytes, _Spread] = {}
        self._copies: dict[bytes, _Spread] = {}
        self._copy_listener: PushListener = lambda _: None
        # By serial: ranks that have yet to stage the block, and an event that is set once all have.
        self._staging: dict[int, tuple[set[int], threading.Event]] = {}
        endpoints = []
        try:
            for index, rank in enumerate(self._ranks):
                listen = tuple(rank_endpoint(endpoint, index) for endpoint in setup.listen)
                own = replace(setup, listen=listen, rank=index)
                endpoints.append(rank.attach(own, partial(self._on_rank, index), on_lost))
        except BaseException:
            self.close()
            raise
        self.endpoints = tuple(endpoints) if setup.listen else ()

    def grant(self, ticket: Ticket) -> None:
        self._open(self._landings, ticket, RankCall("grant", (ticket,)))

    def revoke(self, transfer_id: bytes) -> None:
        self.do(RankCall("revoke", (transfer_id,)))

    def open_push(self, source: str, ticket: Ticket) -> None:
        self._open(self._pushes, ticket, RankCall("open_push", (source, ticket)))

    def abort_push(self, transfer_id: bytes) -> None:
        self.do(RankCall("abort_push", (transfer_id,)))

    def flow(self) -> KvFlow:
        flows = [rank.flow() for rank in self._ranks]
        return KvFlow(
            SenderFlow.total(flow.sending for flow in flows), ReceiverFlow.total(flow.receiving for flow in flows)
        )

    def close(self) -> None:
        for rank in self._ranks:
            rank.detach()

    # Copies to replicas: a CopyPlane (copier_thread.py).

    def start(self, listener: PushListener, is_intact: IsIntact) -> PushSender:
        self._copy_listener = listener
        return RankCopies(self)

    def stage(self, block_id: int, slot: int) -> int:
        """Copy a block to a staging slot in every rank, and wait. Raises EngineError after a timeout."""
        serial, staged = next(_SERIALS), threading.Event()
        with self._lock:
            self._staging[serial] = set(range(len(self._ranks))), staged
        self.do(RankCall("stage", (serial, block_id, slot)))
        is_staged = staged.wait(_STAGED_TIMEOUT_S)
        with self._lock:
            del self._staging[serial]
        if not is_staged:
            raise EngineError(f"a rank has not copied a block within {_STAGED_TIMEOUT_S:g} s")
        return slot

    def open_copy(self, ticket: Ticket) -> None:
        self._open(self._copies, ticket, RankCall("open", (ticket,)))

    def do(self, call: RankCall) -> None:
        for rank in self._ranks:
            rank.do(call)

    def _open(self, table: "dict[bytes, _Spread]", ticket: Ticket, call: RankCall) -> None:
        indexes = range(len(self._ranks))
        with self._lock:
            spread = table[ticket.transfer_id] = _Spread(Gathering(ticket.transfer_id, set(indexes)), set(indexes))
        self.do(call)
        with self._lock:
            failed = spread.gathering.failure is not None
        # Ranks that had not received the call when another rank failed.
        if failed:
            self._give_up(table, ticket.transfer_id)

    def _on_rank(self, index: int, event: RankEvent) -> None:
        if isinstance(event, BlockStaged):
            self._on_staged(index, event)
            return
        table = self._pushes if isinstance(event, PushEvent) else self._landings
        told: PlaneEvent | None = None
        failed = False
        with self._lock:
            if event.transfer_id in self._copies:
                table = self._copies
            spread = table.get(event.transfer_id)
            if spread is None:
                return
            if isinstance(event, Granted):
                spread.ungranted.discard(index)
                if not spread.ungranted and spread.gathering.failure is None:
                    told = event
            elif isinstance(event, TransferStep):
                told = spread.gathering.step(event)
            else:
                failed = spread.gathering.end(index, event, f"rank {index}: " if len(self._ranks) > 1 else "")
                if not spread.gathering.left:
                    del table[event.transfer_id]
                    told = spread.gathering.outcome(event)
        if told is not None and len(spread.gathering.notes) > 1:
            # The sender counts the push as accepted although none of its tokens can be trusted.
            self._on_lost("the ranks were handed over to differently")
        elif table is self._copies and told is not None:
            assert isinstance(told, PushEvent)
            self._copy_listener(told)
        elif told is not None:
            self._listener(told)
        elif failed:
            self._give_up(table, event.transfer_id)

    def _on_staged(self, index: int, event: BlockStaged) -> None:
        with self._lock:
            left, staged = self._staging.get(event.serial, (set[int](), None))
            left.discard(index)
        if staged is not None and not left:
            staged.set()

    def _give_up(self, table: "dict[bytes, _Spread]", transfer_id: bytes) -> None:
        if table is self._pushes:
            self.abort_push(transfer_id)
        elif table is self._copies:
            self.do(RankCall("abort", (transfer_id,), {"keep_marked": True}))
        else:
            self.revoke(transfer_id)


class RankCopies:
    """Pushes KV copies to other instances (replicas) from all tensor-parallel ranks; a PushSender."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def open(self, ticket: Ticket, parts: Sequence[Ticket] = ()) -> None:
        """Begin a push in every rank. Each rank finds its own parts of the ticket."""
        self._plane.open_copy(ticket)

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        self._plane.do(RankCall("write_layers", (transfer_id, layers, first_index, source_blocks)))

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        self._plane.do(RankCall("mark", (transfer_id, block_count, note)))

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        self._plane.do(RankCall("finish", (transfer_id, note)))

    def abort(self, transfer_id: bytes, *, keep_marked: bool = False) -> None:
        self._plane.do(RankCall("abort", (transfer_id,), {"keep_marked": keep_marked}))

    def flow(self) -> SenderFlow:
        """Return an empty snapshot: copies to replicas are not counted."""
        return SenderFlow()

    def close(self) -> None:
        """Do nothing: the data plane ends the ranks' pushes."""


@dataclass(eq=False, slots=True)
class _Spread:
    """One transfer across all ranks. Guarded by the data plane's lock."""

    gathering: Gathering
    """Combines the events of the ranks."""
    ungranted: set[int]


def rank_endpoint(endpoint: KvEndpoint, rank: int) -> KvEndpoint:
    """Return the listening address of a rank: `endpoint` for rank 0, the next port or path for the others.

    >>> rank_endpoint(KvEndpoint("tcp", "127.0.0.1:7000"), 2).address
    '127.0.0.1:7002'
    >>> rank_endpoint(KvEndpoint("shm", "/tmp/kv.sock"), 1).address
    '/tmp/kv-1.sock'

    Port 0 stays 0: any free port. Raises ConfigError for a port above 65535.
    """
    if rank == 0:
        return endpoint
    if endpoint.transport in PATH_NAMES or endpoint.address.startswith("/"):
        stem, suffix = os.path.splitext(endpoint.address)
        return replace(endpoint, address=f"{stem}-{rank}{suffix}")
    host, port = split_address(endpoint.address)
    if port == 0:
        return endpoint
    if port + rank > MAX_PORT:
        raise ConfigError("kv_port", f"is {port}, and rank {rank} needs a port so far behind it")
    return replace(endpoint, address=join_address(host, port + rank))
