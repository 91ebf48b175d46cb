"""Bookkeeping of a replica store: blocks, watermarks, transfers. Its receiver and sender move the bytes.

The blocks are host memory of their own (host.py), or those of an engine: its spare ones, which the engine takes back
with evict(), and in which it decodes a request after give_blocks(), without a copy of its KV.
"""

import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from kaveri.errors import InvalidArgument, KaveriError, LayoutMismatch, NoCapacity, TransferFailed
from kaveri.kv.layout.layout import HEADS_FIRST, KvLayout
from kaveri.kv.replicas.notes import noted_tokens
from kaveri.kv.replicas.replica import Dropped, Kept, Receiving, Replica, Sealed
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaEvent,
    ReplicaGivenUp,
    ReplicaGrew,
    ReplicaKey,
    ReplicaListener,
    ReplicaOrphaned,
    ReplicaUsage,
)
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.landing import TicketReceiver
from kaveri.kv.transfer.push import PushAccepted, PushEvent, PushFailed, PushListener, PushSender
from kaveri.kv.transfer.receiver import LandingListener, TransferEvent, TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.ticket import (
    KvEndpoint,
    Ticket,
    first_source_block,
    pushed_tickets,
    require_pushable,
    taken_tickets,
    ticket_parts,
)
from kaveri.seconds import require_seconds
from kaveri.telemetry.logs import get_logger

OWNER_ENDED = "the owner has ended its push"
"""Reason in the ReplicaOrphaned of a replica whose owner has finished its push."""
EVICTED = "its blocks are needed"
"""Reason in the ReplicaDropped of an evicted replica."""
_RETRY_AFTER_S = 0.5
_BLOCKS_AHEAD = 1
"""Blocks granted beyond the last mark. An owner fills one in block_tokens steps; the next grant comes long before."""


class Replicas:
    """Implements ReplicaStore (copies of other instances' KV caches) over a pool of blocks of all heads.

    allocator: of the pool's blocks; owners other than replicas may hold some. make_receiver, make_sender: for that
    pool; their errors propagate. min_free: blocks that replicas leave free. on_freed: called, without a lock, when
    replicas have returned blocks. token_bytes: source of random bytes, replaced in simulations.
    """

    def __init__(
        self,
        layout: KvLayout,
        allocator: BlockAllocator,
        make_receiver: Callable[[LandingListener], TicketReceiver],
        make_sender: Callable[[PushListener], PushSender],
        *,
        min_free: int = 0,
        on_freed: Callable[[], None] = lambda: None,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._layout = replace(layout, tensor_ranks=1)
        self._listener: ReplicaListener | None = None
        self._token_bytes = token_bytes
        # Guards all below. Neither the listener nor a future is called with it held.
        self._lock = threading.Lock()
        self._allocator = allocator
        self._min_free = min_free
        self._on_freed = on_freed
        self._replicas: dict[ReplicaKey, Replica] = {}
        """In the order in which they last grew: the first one has not grown for longest."""
        # By transfer id of the owner's push, until that has ended.
        self._landings: dict[bytes, Replica] = {}
        self._pushes: dict[bytes, tuple[Replica, Future[None]]] = {}
        # Receiving, with no block granted ahead.
        self._starved: dict[Replica, None] = {}
        self._evicting: set[Replica] = set()
        """Replicas that the last evict() has deleted, whose blocks their owners may still write."""
        self._closed = False
        self._sender = make_sender(self._hear_push)
        try:
            self._receiver = make_receiver(self._hear_owner)
        except BaseException:
            self._sender.close()
            raise

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        return self._receiver.endpoints

    def start(self, listener: ReplicaListener) -> None:
        self._listener = listener

    def open(
        self,
        key: ReplicaKey,
        layout: KvLayout,
        token_count: int,
        expires_in_s: float,
        *,
        stays: bool = False,
        extends: ReplicaKey | None = None,
    ) -> Ticket:
        self._layout.require_same(replace(layout, tensor_ranks=1))
        parts = ticket_parts(layout, self._layout, (self._receiver.endpoints,))
        if parts and not layout.order.startswith(HEADS_FIRST):
            # Heads of several ranks would have to be put in order with each mark.
            raise LayoutMismatch("tensor_ranks", self._layout.tensor_ranks, layout.tensor_ranks)
        if token_count < 1:
            raise InvalidArgument("token_count", token_count, "at least 1")
        require_seconds("expires_in_s", expires_in_s)
        block_count = token_count // layout.block_tokens + _BLOCKS_AHEAD
        if extends is not None and (parts or not self._can_grow(extends, block_count)):
            self.drop(extends)
        if key != extends:
            self.drop(key)
        with self._lock:
            if self._closed:
                raise TransferFailed("the replica store is closed")
            former = self._replicas.get(extends) if extends is not None else None
            replica = former or Replica(key, Kept())
            first_block = len(replica.block_ids)
            # Earlier ones wait for the next free block.
            if self._starved:
                raise NoCapacity("replica", _RETRY_AFTER_S, "replicas wait for blocks")
            try:
                block_ids = self._allocate(replica, block_count - first_block)
            except NoCapacity as error:
                raise NoCapacity("replica", _RETRY_AFTER_S, error.reason) from error
            ticket = Ticket(
                transfer_id=self._token_bytes(16),
                secret=self._token_bytes(16),
                epoch=self._receiver.epoch,
                endpoints=() if parts else self._receiver.endpoints,
                block_ids=tuple(block_ids),
                token_count=block_count * layout.block_tokens,
                expires_in_s=expires_in_s,
                layout=self._layout,
                first_block=first_block,
                parts=parts,
                is_open=True,
            )
            try:
                self._receiver.lease(ticket, taken_tickets(0, ticket) if parts else ())
            except KaveriError:
                self._allocator.release_last(replica, len(block_ids))
                raise
            self._replicas.pop(replica.key, None)
            replica.key = key
            replica.block_ids += block_ids
            replica.first_block, replica.stays, replica.is_given_up = first_block, stays, False
            replica.state = Receiving(ticket.transfer_id)
            self._replicas[key] = self._landings[ticket.transfer_id] = replica
            return ticket

    def take_blocks(self, key: ReplicaKey, owner: Hashable, token_ids: Sequence[int]) -> bool:
        """Make a replica of the first blocks of another owner in the allocator; open() can extend it. token_ids: of
        these blocks, all full. Returns False, with nothing changed, if fewer than min_free blocks are free or there is
        a replica of this key."""
        with self._lock:
            if self._closed or key in self._replicas or self._allocator.free_count < self._min_free:
                return False
            replica = Replica(key, Kept(), is_given_up=True, token_ids=list(token_ids))
            block_count = len(token_ids) // self._layout.block_tokens
            replica.block_ids += self._allocator.move_first(owner, replica, block_count)
            self._replicas[key] = replica
            return True

    def token_ids(self, key: ReplicaKey) -> tuple[int, ...]:
        with self._lock:
            replica = self._replicas.get(key)
            return tuple(replica.token_ids) if replica is not None else ()

    def watermark(self, key: ReplicaKey) -> int:
        with self._lock:
            replica = self._replicas.get(key)
            return len(replica.token_ids) if replica is not None else 0

    def is_starved(self, key: ReplicaKey) -> bool:
        with self._lock:
            # Other users of the pool may have freed blocks.
            self._feed_starved()
            return self._replicas.get(key) in self._starved

    def seal(self, key: ReplicaKey) -> None:
        with self._lock:
            replica = self._replicas.get(key)
            if replica is not None:
                # A request is about to be resumed from it, so evict() must not delete it.
                replica.is_given_up = False
            revoked = self._seal(replica) if replica is not None else None
        if revoked is not None:
            self._receiver.revoke(revoked)

    def push(self, key: ReplicaKey, ticket: Ticket) -> "Future[None]":
        accepted: Future[None] = Future()
        accepted.set_running_or_notify_cancel()
        try:
            require_pushable(self._layout, ticket)
            with self._lock:
                replica = self._replicas.get(key)
                if replica is None:
                    raise TransferFailed("the replica is gone")
                _check_fit(ticket, len(replica.token_ids))
                if ticket.transfer_id in self._pushes:
                    raise InvalidArgument("ticket", ticket.transfer_id.hex(), "used once")
                replica.reading.add(ticket.transfer_id)
                self._pushes[ticket.transfer_id] = replica, accepted
                first = first_source_block(ticket, self._layout)
                pushed = replica.block_ids[first : self._layout.block_count(ticket.token_count)]
        except KaveriError as error:
            accepted.set_exception(error)
            return accepted
        try:
            self._sender.open(ticket, pushed_tickets(self._layout, 0, ticket) if ticket.parts else ())
        except KaveriError as error:
            self._end_push(ticket.transfer_id, error)
            return accepted
        if pushed:
            self._sender.write_layers(ticket.transfer_id, range(self._layout.layer_count), 0, pushed)
        self._sender.finish(ticket.transfer_id, b"")
        with self._lock:
            is_dropped = isinstance(replica.state, Dropped)
        # The drop came before the sender knew of the push, and was ignored there.
        if is_dropped:
            self._sender.abort(ticket.transfer_id)
        return accepted

    def drop(self, key: ReplicaKey) -> None:
        with self._lock:
            replica = self._replicas.get(key)
            if replica is None:
                return
            state, pushes = replica.state, tuple(replica.reading)
            self._drop(replica)
        for transfer_id in pushes:
            self._sender.abort(transfer_id)
        if isinstance(state, Receiving):
            self._receiver.revoke(state.transfer_id)
        self._on_freed()

    def give_blocks(self, key: ReplicaKey, new_owner: Hashable, token_count: int, more_blocks: int) -> list[int]:
        """Move the blocks of a replica's first `token_count` tokens to another owner in the allocator, allocate it
        `more_blocks` free ones, and delete the replica. Return all these blocks, in order.

        Raises TransferFailed if the replica has fewer tokens or is pushed elsewhere, and NoCapacity. The replica then
        remains.
        """
        with self._lock:
            replica = self._replicas.get(key)
            if replica is None or replica.reading or isinstance(replica.state, Receiving):
                raise TransferFailed("the replica is gone, still received, or being pushed elsewhere")
            if not 1 <= token_count <= len(replica.token_ids):
                raise TransferFailed(f"the replica has {len(replica.token_ids)} tokens, not {token_count}")
            # A write that is still under way goes to blocks behind these.
            taken_count = self._layout.block_count(token_count)
            blocks = self._allocator.move_first(replica, new_owner, taken_count, more_blocks)
            del replica.block_ids[:taken_count], replica.token_ids[:]
            self._drop(replica)
            return blocks

    def evict(self, block_count: int) -> None:
        """Delete replicas until `block_count` more blocks are free, or will be once their owners' writes have ended:
        first those that no owner extends, then those that grow, the least recently extended first. Those whose owner
        was lost stay. ReplicaDropped follows."""
        with self._lock:
            # Subtracted in one call only, since a frozen owner may never end its writes.
            wanted = block_count - sum(len(replica.block_ids) for replica in self._evicting)
            evicted: dict[Replica, Receiving | Sealed | Kept | Dropped] = {}
            evictable = sorted(filter(_is_evictable, self._replicas.values()), key=lambda one: not one.is_given_up)
            for replica in evictable:
                if wanted <= 0:
                    break
                wanted -= len(replica.block_ids)
                evicted[replica] = replica.state
                self._drop(replica)
            self._evicting = {replica for replica in evicted if replica.is_touched}
        for replica, state in evicted.items():
            if isinstance(state, Receiving):
                self._receiver.revoke(state.transfer_id)
            if self._listener is not None:
                self._listener(ReplicaDropped(replica.key, EVICTED))
        # An engine that is woken asks again.
        if evicted:
            self._on_freed()

    def usage(self) -> ReplicaUsage:
        with self._lock:
            total = self._allocator.total - self._min_free
            used = min(total, self._allocator.total - self._allocator.free_count)
            block_bytes = self._layout.layer_count * self._layout.block_bytes
            return ReplicaUsage(used * block_bytes, total * block_bytes, len(self._replicas))

    @property
    def evictable_blocks(self) -> int:
        """Number of blocks that evict() can free."""
        with self._lock:
            return sum(len(replica.block_ids) for replica in self._replicas.values() if _is_evictable(replica))

    def flow(self) -> KvFlow:
        return KvFlow(self._sender.flow(), self._receiver.flow())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._sender.close()
        self._receiver.close()
        with self._lock:
            pushes = [accepted for _, accepted in self._pushes.values()]
            for replica in self._held():
                self._allocator.release(replica)
            for table in (self._replicas, self._landings, self._pushes, self._starved, self._evicting):
                table.clear()
        for accepted in pushes:
            accepted.set_exception(TransferFailed("the replica store is closed"))
        self._on_freed()

    def check_integrity(self) -> None:
        with self._lock:
            live, held = set(self._replicas.values()), self._held()
            self._allocator.check_integrity()
            strangers = {one for one in self._allocator.owners() if isinstance(one, Replica)} - held
            assert not strangers, f"blocks are held by {strangers}"
            for replica in held:
                assert self._allocator.blocks_of(replica) == tuple(replica.block_ids), f"{replica.key}: other blocks"
                whole = len(replica.block_ids) * self._layout.block_tokens
                assert len(replica.token_ids) <= whole, f"{replica.key}: more tokens than blocks"
                assert replica in live or replica.is_touched, f"{replica.key}: dropped, and its blocks are held"
                assert (replica in live) != isinstance(replica.state, Dropped), f"{replica.key}: {replica.state}"

    # Events of the transfers.

    def _hear_owner(self, event: TransferEvent) -> None:
        # Calls are serialized, so events go out in order.
        with self._lock:
            replica = self._landings.get(event.transfer_id)
            if replica is None or self._closed:
                return
            news, revoked = self._take(replica, event)
        if revoked is not None:
            self._receiver.revoke(revoked)
        if news is not None and self._listener is not None:
            self._listener(news)
        if not isinstance(event, TransferMarked):
            self._on_freed()

    def _take(self, replica: Replica, event: TransferEvent) -> tuple[ReplicaEvent | None, bytes | None]:
        # The caller holds the lock. Returns the event to report, and the id of the transfer to revoke.
        match event, replica.state:
            case TransferMarked(), Receiving():
                return self._grow(replica, event)
            case TransferMarked(), _:
                return None, None
            case ((TransferLanded() | TransferReleased()), _):
                del self._landings[event.transfer_id]
                return self._end_owner(replica, event), None

    def _grow(self, replica: Replica, mark: TransferMarked) -> tuple[ReplicaEvent | None, bytes | None]:
        token_ids = noted_tokens(mark.note)
        due = (replica.first_block + mark.block_count) * self._layout.block_tokens - len(replica.token_ids)
        if len(token_ids) != due:
            # Unnamed tokens cannot be recorded; the earlier ones are right.
            get_logger().warning(
                "replica_mark_refused", request_id=replica.key.request_id, named=len(token_ids), due=due
            )
            return None, self._seal(replica)
        replica.token_ids += token_ids
        self._replicas[replica.key] = self._replicas.pop(replica.key)
        self._grant_ahead(replica)
        return ReplicaGrew(replica.key, len(replica.token_ids)), None

    def _end_owner(self, replica: Replica, event: TransferLanded | TransferReleased) -> ReplicaEvent | None:
        self._starved.pop(replica, None)
        if isinstance(event, TransferLanded):
            reason = OWNER_ENDED
            if isinstance(replica.state, Receiving):
                self._add_tail(replica, event)
        else:
            reason = event.reason
        match replica.state:
            case Dropped():
                replica.state = Dropped(None)
                self._free_dropped(replica)
                return None
            case Receiving() | Sealed() | Kept():
                # An owner may have ended by itself before it is sealed off.
                is_sealed = isinstance(replica.state, Sealed)
                replica.state = Kept()
                is_given_up = isinstance(event, TransferReleased) and event.given_up
                if not is_sealed and (not replica.token_ids or (is_given_up and not replica.stays)):
                    self._drop(replica)
                    return ReplicaDropped(replica.key, reason)
                self._free_ahead(replica)
                if is_given_up and not is_sealed:
                    replica.is_given_up = True
                    return ReplicaGivenUp(replica.key, reason)
                return ReplicaOrphaned(replica.key, reason)

    def _add_tail(self, replica: Replica, landed: TransferLanded) -> None:
        # The tokens after the last mark, less than a block: the owner names them at the end of its push.
        token_ids = noted_tokens(landed.note)
        whole = len(replica.token_ids) // self._layout.block_tokens - replica.first_block
        block_bytes = self._layout.layer_count * self._layout.block_bytes
        due_count = whole + bool(token_ids)
        if landed.kv_bytes == due_count * block_bytes and len(token_ids) < self._layout.block_tokens:
            replica.token_ids += token_ids
        else:
            # Unnamed tokens cannot be recorded; the earlier ones are right.
            get_logger().warning("replica_tail_refused", request_id=replica.key.request_id, named=len(token_ids))

    def _hear_push(self, event: PushEvent) -> None:
        match event:
            case PushAccepted():
                self._end_push(event.transfer_id, None)
            case PushFailed():
                self._end_push(event.transfer_id, TransferFailed(event.reason))

    def _end_push(self, transfer_id: bytes, error: KaveriError | None) -> None:
        with self._lock:
            replica, accepted = self._pushes.pop(transfer_id, (None, None))
            if replica is None or accepted is None:
                return
            replica.reading.discard(transfer_id)
            self._free_dropped(replica)
        self._on_freed()
        if error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def _can_grow(self, key: ReplicaKey, block_count: int) -> bool:
        """Return True if a new push can append blocks to a replica, up to `block_count`: no owner pushes to it, nobody
        reads it, and its last block is full."""
        with self._lock:
            replica = self._replicas.get(key)
            if replica is None or not replica.is_given_up or replica.reading:
                return False
            is_full = len(replica.token_ids) == len(replica.block_ids) * self._layout.block_tokens
            return is_full and len(replica.block_ids) < block_count

    # The caller holds the lock.

    def _held(self) -> set[Replica]:
        """Return the replicas that have blocks: those not dropped, and dropped ones that a transfer may still touch."""
        return {*self._replicas.values(), *self._landings.values(), *(replica for replica, _ in self._pushes.values())}

    def _allocate(self, replica: Replica, block_count: int) -> list[int]:
        if self._min_free and self._allocator.free_count < block_count + self._min_free:
            raise NoCapacity("replica", _RETRY_AFTER_S, f"{self._min_free} blocks are left free for requests")
        return self._allocator.allocate(replica, block_count)

    def _seal(self, replica: Replica) -> bytes | None:
        # Returns the id of the owner's push, to be revoked, if it is open.
        if not isinstance(replica.state, Receiving):
            return None
        transfer_id = replica.state.transfer_id
        replica.state = Sealed(transfer_id)
        self._starved.pop(replica, None)
        return transfer_id

    def _drop(self, replica: Replica) -> None:
        del self._replicas[replica.key]
        self._starved.pop(replica, None)
        replica.state = Dropped(None if isinstance(replica.state, Kept) else replica.state.transfer_id)
        self._free_dropped(replica)

    def _free_dropped(self, replica: Replica) -> None:
        if isinstance(replica.state, Dropped) and not replica.is_touched:
            self._allocator.release(replica)
            self._feed_starved()

    def _free_ahead(self, replica: Replica) -> None:
        used = self._layout.block_count(len(replica.token_ids))
        if used < len(replica.block_ids):
            self._allocator.release_last(replica, len(replica.block_ids) - used)
            del replica.block_ids[used:]
            self._feed_starved()

    def _feed_starved(self) -> None:
        for replica in tuple(self._starved):
            if not self._grant_ahead(replica):
                return

    def _grant_ahead(self, replica: Replica) -> bool:
        # False if no block is free: the owner gets it once there is one.
        assert isinstance(replica.state, Receiving), "the owner takes no blocks any more"
        wanted = len(replica.token_ids) // self._layout.block_tokens + _BLOCKS_AHEAD - len(replica.block_ids)
        if wanted > 0:
            try:
                block_ids = self._allocate(replica, wanted)
            except NoCapacity:
                self._starved[replica] = None
                return False
            if self._receiver.extend(replica.state.transfer_id, block_ids):
                replica.block_ids += block_ids
            else:
                # The push has ended; its event is about to arrive.
                self._allocator.release_last(replica, wanted)
        self._starved.pop(replica, None)
        return True


def _is_evictable(replica: Replica) -> bool:
    return not replica.reading and (replica.is_given_up or isinstance(replica.state, Receiving))


def _check_fit(ticket: Ticket, held_tokens: int) -> None:
    if not 1 <= ticket.token_count <= held_tokens:
        raise InvalidArgument("ticket.token_count", ticket.token_count, f"1 to the {held_tokens} held here")
    pushed_count = ticket.layout.block_count(ticket.token_count) - ticket.first_block
    if len(ticket.block_ids) != pushed_count:
        raise InvalidArgument("ticket.block_ids", len(ticket.block_ids), f"{pushed_count} blocks")
