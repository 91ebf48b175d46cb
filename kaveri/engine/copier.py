"""Copies the KV of running requests to replicas (copies at other instances), in the background.

A block is copied when its last token is computed, by an open push to the replica's holder: from the engine's pool, or
from a staging slot. The request never waits: as in a seqlock, blocks that it loses before they are staged or marked are
not marked. DéjàVu (arXiv 2403.01876, section 4.2.3) streams each token's KV to the next worker; whole blocks are a
fraction of the messages, fit opaque layouts, and what a holder lacks is computed in one chunk.

    block computed ── pushed ── still the request's: marked ── the holder keeps it: Replicated, and its slot is free

A silent holder is given up, so that another one replaces it. A request that is released stops between two steps; its
last block is sent part full, and the push is finished with the tokens of that block.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from kaveri.engine.contract import EngineKey, LetGo, ReleaseFailed, ReplicaEnded, Replicated
from kaveri.engine.shared import Shared
from kaveri.errors import InvalidArgument, KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.notes import NOTE_TOKENS_MAX, token_note
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.transfer.push import (
    IsIntact,
    PushAccepted,
    PushEvent,
    PushExtended,
    PushFailed,
    PushListener,
    PushMarked,
    PushSender,
)
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, require_pushable
from kaveri.telemetry.logs import get_logger

_SILENT_S = 10.0
"""Seconds without an answer to a mark after which a holder is presumed dead: a live one answers at once."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Memory and rate limits for copying requests' KV to other instances (replicas)."""

    staging_bytes: int = 16 << 20
    """Most bytes of blocks in flight; at least four blocks, of any size. vLLM's ranks allocate as much."""
    bytes_per_s: int = 0
    """Rate limit of copies, so that they leave room on the network; at least one block per second. 0: no limit."""


class BlockPlace(NamedTuple):
    """Location of a request's KV block in the engine's pool."""

    block_id: int
    generation: int
    """Changes when the request loses its blocks."""


class Owner(Protocol):
    """A request that owns KV blocks. Hashed by identity."""

    @property
    def key(self) -> EngineKey: ...

    @property
    def done(self) -> bool:
        """True once the request has ended and has no more events."""


class CopyOwner(Owner, Protocol):
    """A request whose KV can be copied to another instance (a replica)."""

    is_copied: bool
    """The request's blocks are or were copied; set by the copier."""

    @property
    def kept_as(self) -> ReplicaKey | None:
        """Key of the replica to make of the request's full blocks once it is let go; None: free them."""


OwnerT = TypeVar("OwnerT", bound=CopyOwner)


class CopyAccount(Protocol[OwnerT]):
    """Interface by which the Copier reads and stops an engine's requests. The caller holds the engine's lock."""

    decodes: dict[EngineKey, OwnerT]
    """Live requests of the decode side."""

    def whole_blocks(self, owner: OwnerT) -> int:
        """Return the number of the request's full blocks whose last token is computed; 0 after a preemption."""

    def place_of(self, owner: OwnerT, index: int) -> BlockPlace:
        """Return the location of a request's block `index`: a full one or, if it is stopped, the part-full last."""

    def tokens_of(self, owner: OwnerT, start: int, stop: int) -> Sequence[int]:
        """Return the ids of the request's tokens [start, stop)."""

    def stop(self, owner: OwnerT) -> str | None:
        """Exclude a request from further steps, to move it elsewhere. Returns why that is impossible, else None."""

    def stopped_tokens(self, owner: OwnerT) -> int | None:
        """Return how many tokens of a stopped request have KV to copy; None while a step runs it; 0 if preempted."""

    def go_on(self, owner: OwnerT) -> None:
        """Let a stopped request take part in steps again."""

    def keep(self, owner: OwnerT) -> int:
        """Make the replica `owner.kept_as` of a request's full blocks. Returns its tokens; 0 if there is no room."""

    def end(self, owner: OwnerT) -> None:
        """End a request and free its blocks."""


class _InFlight(NamedTuple):
    """A block sent, or being sent, whose receipt the holder has not confirmed. number: its index in the request."""

    number: int
    slot: int
    place: BlockPlace


@dataclass(eq=False, slots=True)
class _Release:
    """State of moving a request to the holder of its replica: it stops, and its last KV follows. until_s: deadline."""

    until_s: float
    token_count: int = 0
    """Tokens whose KV the holder will have; 0 until the request has stopped."""
    is_finished: bool = False
    """Everything is queued; only the holder's answer is missing."""


@dataclass(eq=False, slots=True)
class _Copy(Generic[OwnerT]):
    """State of copying one request's KV to another instance. Guarded by the engine's lock.

    # blocks: [0, marked) announced as complete   [marked, written) queued   [written, granted) may be written
    """

    owner: OwnerT
    ticket: Ticket
    granted: int = 0
    """Blocks that the holder accepts so far; 0 until the push is open."""
    written: int = field(init=False)
    marked: int = field(init=False)
    checked: int = field(init=False)
    """Blocks [0, checked) were still the request's after the sender had read them."""
    in_flight: deque[_InFlight] = field(default_factory=deque)
    """In order of number."""
    given_up: str | None = None
    """Reason for which the push was aborted."""
    silent_since_s: float | None = None
    """Time from which an answer of the holder is due; None if it has answered everything."""
    release: _Release | None = None

    def __post_init__(self) -> None:
        # The holder already has the blocks before first_block.
        self.written = self.marked = self.checked = self.ticket.first_block

    @property
    def holder(self) -> tuple[tuple[tuple[KvEndpoint, ...], ...], int]:
        """Endpoints, by rank, and epoch of the instance that holds the replica."""
        return tuple(part.endpoints for part in self.ticket.parts) or (self.ticket.endpoints,), self.ticket.epoch


class Copier(Generic[OwnerT]):
    """Copies the KV of an engine's requests to other instances. Any thread calls replicate(), one at a time advance().

    slot_count: most blocks in flight. staging: called with a block of the engine's pool, its slot, and True if its
    request waits for the copy; returns the block to push. make_sender: returns the sender that pushes the blocks and,
    unless they are staged, calls the IsIntact. on_work: called when advance() may have new work; like staging without a
    lock. now_s: a monotonic clock.
    """

    def __init__(
        self,
        layout: KvLayout,
        slot_count: int,
        shared: Shared,
        account: CopyAccount[OwnerT],
        staging: Callable[[int, int, bool], int],
        make_sender: Callable[[PushListener, IsIntact], PushSender],
        on_work: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._now_s = now_s
        self._shared = shared
        self._account = account
        self._staging = staging
        self._on_work = on_work
        # In round-robin order.
        self._copies: OrderedDict[bytes, _Copy[OwnerT]] = OrderedDict()
        self._free_slots = list(range(slot_count))
        # Number of slots in use, by holder.
        self._held_slots: Counter[object] = Counter()
        self._sender = make_sender(self._hear, self._is_intact)

    @property
    def has_copies(self) -> bool:
        """True if any request is being copied. Cheap enough for every step."""
        return bool(self._copies)

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        self._require_copyable(ticket)
        with self._shared.lock:
            self._shared.require_alive()
            owner = self._account.decodes.get(key)
            copy = self._open(owner, ticket) if owner is not None else None
        try:
            self._sender.open(ticket)
        except KaveriError as error:
            self._end(ticket.transfer_id, str(error))
        else:
            if copy is None:
                # It has ended meanwhile. Its holder must not keep blocks for it.
                self._sender.abort(ticket.transfer_id)
                return
            with self._shared.lock:
                # Nothing is written before the sender knows of the push.
                copy.granted = max(copy.granted, ticket.first_block + len(ticket.block_ids))
                if ticket.first_block and not copy.owner.done:
                    self._shared.put(Replicated(key, ticket.first_block * self._layout.block_tokens))
            self._on_work()
        self._shared.publish()

    def release(self, key: EngineKey, timeout_s: float) -> None:
        with self._shared.lock:
            self._shared.require_alive()
            owner = self._account.decodes.get(key)
            if owner is None:
                return
            copy = next((copy for copy in self._copies.values() if copy.owner is owner and copy.given_up is None), None)
            if copy is not None and copy.release is not None:
                return
            problem = "it has no replica" if copy is None else self._account.stop(owner)
            if copy is None or problem is not None:
                self._shared.put(ReleaseFailed(key, problem or ""))
            else:
                copy.release = _Release(self._now_s() + timeout_s)
        self._on_work()
        self._shared.publish()

    def advance(self) -> bool:
        """Run the next due action, at most the copy of one block. Returns False if nothing is due."""
        with self._shared.lock:
            due = self._next()
        if due is None:
            return False
        due()
        return True

    def fail(self, reason: str) -> None:
        """End all copies with ReplicaEnded. Their requests continue."""
        with self._shared.lock:
            transfer_ids = tuple(self._copies)
        for transfer_id in transfer_ids:
            self._end(transfer_id, reason)
            self._sender.abort(transfer_id)
        self._shared.publish()

    def close(self) -> None:
        """End all copies. Idempotent."""
        self._sender.close()

    def check_integrity(self) -> None:
        """Assert that no slot is used by two blocks, or free while it is used. The caller holds the engine's lock."""
        used = [block.slot for copy in self._copies.values() for block in copy.in_flight]
        slots = self._free_slots + used
        assert len(set(slots)) == len(slots), "a slot is used twice"
        assert self._held_slots.total() >= len(used), "the holders' slots are counted wrong"

    def _require_copyable(self, ticket: Ticket) -> None:
        # Blocks that differ in more than the number of ranks could not be marked one by one.
        self._layout.require_same(replace(ticket.layout, tensor_ranks=self._layout.tensor_ranks))
        require_pushable(self._layout, ticket)
        if not ticket.is_open:
            raise InvalidArgument("ticket.is_open", ticket.is_open, "true: a copy grows with its request")
        if self._layout.block_tokens > NOTE_TOKENS_MAX:
            limit = f"at most {NOTE_TOKENS_MAX}: a mark names the tokens of a block"
            raise InvalidArgument("block_tokens", self._layout.block_tokens, limit)

    def _open(self, owner: OwnerT, ticket: Ticket) -> _Copy[OwnerT]:
        """Register a new copy. The caller holds the lock."""
        if ticket.transfer_id in self._copies or any(copy.owner is owner for copy in self._copies.values()):
            raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the copy before it has ended")
        owner.is_copied = True
        copy = self._copies[ticket.transfer_id] = _Copy(owner, ticket)
        return copy

    def _next(self) -> Callable[[], None] | None:
        """Return the next due action, to be called without the lock. Copies take turns: a long one delays no other."""
        for transfer_id in tuple(self._copies):
            copy = self._copies[transfer_id]
            self._copies.move_to_end(transfer_id)
            if copy.granted and copy.given_up is None and (due := self._due(copy)) is not None:
                return due
        return None

    def _due(self, copy: _Copy[OwnerT]) -> Callable[[], None] | None:
        transfer_id = copy.ticket.transfer_id
        late = self._lateness(copy)
        if copy.owner.done or late is not None:
            copy.given_up = late or "its request has ended"
            return partial(self._sender.abort, transfer_id)
        if copy.release is not None and not copy.release.token_count:
            stopped_tokens = self._account.stopped_tokens(copy.owner)
            copy.release.token_count = stopped_tokens or 0
            if stopped_tokens == 0:
                copy.release = None
                self._shared.put(ReleaseFailed(copy.owner.key, "it was preempted"))
        block_tokens = self._layout.block_tokens
        ready = min(self._readable_blocks(copy), copy.granted)
        is_note_full = (copy.written - copy.marked + 1) * block_tokens > NOTE_TOKENS_MAX
        if copy.written < ready and not is_note_full and self._may_stage(copy):
            place = self._account.place_of(copy.owner, copy.written)
            self._held_slots[copy.holder] += 1
            return partial(self._stage, copy, _InFlight(copy.written, self._free_slots.pop(), place))
        whole = min(copy.written, copy.release.token_count // block_tokens) if copy.release else copy.written
        if copy.marked < whole:
            start, copy.marked = copy.marked * block_tokens, whole
            if copy.silent_since_s is None:
                copy.silent_since_s = self._now_s()
            note = token_note(self._account.tokens_of(copy.owner, start, whole * block_tokens))
            return partial(self._sender.mark, transfer_id, whole - copy.ticket.first_block, note)
        if copy.release is not None and copy.release.token_count and not copy.release.is_finished:
            if copy.written < self._layout.block_count(copy.release.token_count):
                return None
            copy.release.is_finished = True
            tail = self._account.tokens_of(copy.owner, copy.marked * block_tokens, copy.release.token_count)
            return partial(self._sender.finish, transfer_id, token_note(tail))
        return None

    def _readable_blocks(self, copy: _Copy[OwnerT]) -> int:
        if copy.release is not None and copy.release.token_count:
            return self._layout.block_count(copy.release.token_count)
        return self._account.whole_blocks(copy.owner)

    def _lateness(self, copy: _Copy[OwnerT]) -> str | None:
        """Return why to give the copy up: the holder is silent, or a release is past its deadline. None if on time."""
        now_s = self._now_s()
        if copy.release is not None and now_s >= copy.release.until_s:
            return "the holder has not taken all in time"
        if copy.silent_since_s is not None and now_s - copy.silent_since_s >= _SILENT_S:
            return f"the holder has answered nothing for {_SILENT_S:g} s"
        return None

    def _may_stage(self, copy: _Copy[OwnerT]) -> bool:
        """Return True if the copy's holder may use another slot. Limit: as many as are free, so that a stuck holder
        never takes all (dynamic thresholds, Choudhury and Hahne, IEEE/ACM Trans. Networking 6(2), 1998)."""
        return self._held_slots[copy.holder] < len(self._free_slots)

    def _stage(self, copy: _Copy[OwnerT], block: _InFlight) -> None:
        transfer_id, index = copy.ticket.transfer_id, block.number - copy.ticket.first_block
        try:
            source = self._staging(block.place.block_id, block.slot, copy.release is not None)
        except Exception as error:  # A copy must never end the engine, and with it its requests.
            get_logger().warning("copy_failed", request_id=copy.owner.key.request_id, error=repr(error))
            # Calls to a rank are carried out in order: whatever it still writes to the slot, the next use overwrites.
            with self._shared.lock:
                self._free_slot(copy, block)
            self._end(transfer_id, str(error))
            self._sender.abort(transfer_id)
            self._shared.publish()
            return
        with self._shared.lock:
            if self._copies.get(transfer_id) is not copy or not self._is_in_place(copy, block):
                # Others may have written what was staged.
                self._free_slot(copy, block)
                return
            copy.in_flight.append(block)
            copy.written = block.number + 1
        self._sender.write_layers(transfer_id, range(self._layout.layer_count), index, (source,))

    def _is_in_place(self, copy: _Copy[OwnerT], block: _InFlight) -> bool:
        is_readable = not copy.owner.done and block.number < self._readable_blocks(copy)
        return is_readable and self._account.place_of(copy.owner, block.number) == block.place

    def _free_slot(self, copy: _Copy[OwnerT], block: _InFlight) -> None:
        self._free_slots.append(block.slot)
        self._held_slots[copy.holder] -= 1

    # Callbacks of the sender.

    def _is_intact(self, transfer_id: bytes, block_count: int | None) -> bool:
        with self._shared.lock:
            copy = self._copies.get(transfer_id)
            if copy is None or copy.owner.done:
                return False  # its push is given up elsewhere
            stop = copy.written if block_count is None else copy.ticket.first_block + block_count
            if all(self._is_in_place(copy, one) for one in copy.in_flight if copy.checked <= one.number < stop):
                copy.checked = stop
                return True
            copy.given_up = "its request was preempted while blocks were copied"
        self._sender.abort(transfer_id, keep_marked=True)
        return False

    def _hear(self, event: PushEvent) -> None:
        match event:
            case PushMarked(transfer_id, block_count):
                self._grown(transfer_id, block_count)
            case PushExtended(transfer_id, block_count):
                with self._shared.lock:
                    copy = self._copies.get(transfer_id)
                    if copy is not None:
                        copy.granted = max(copy.granted, copy.ticket.first_block + block_count)
            case PushFailed(transfer_id, reason):
                self._end(transfer_id, reason)
            case PushAccepted(transfer_id):
                self._end(transfer_id, "the holder has taken it", is_accepted=True)
        self._on_work()
        self._shared.publish()

    def _grown(self, transfer_id: bytes, block_count: int) -> None:
        with self._shared.lock:
            copy = self._copies.get(transfer_id)
            if copy is None:
                return
            block_count += copy.ticket.first_block
            while copy.in_flight and copy.in_flight[0].number < block_count:
                self._free_slot(copy, copy.in_flight.popleft())
            copy.silent_since_s = self._now_s() if block_count < copy.marked else None
            if not copy.owner.done:
                self._shared.put(Replicated(copy.owner.key, block_count * self._layout.block_tokens))

    def _end(self, transfer_id: bytes, reason: str, *, is_accepted: bool = False) -> None:
        with self._shared.lock:
            copy = self._copies.pop(transfer_id, None)
            if copy is None:
                return
            for block in copy.in_flight:
                self._free_slot(copy, block)
            self._held_slots = +self._held_slots  # without former holders
            if copy.owner.done:
                return
            key, release = copy.owner.key, copy.release
            if release is not None and is_accepted:
                kept_tokens = self._account.keep(copy.owner) if copy.owner.kept_as is not None else 0
                kept_as = copy.owner.kept_as if kept_tokens else None
                self._account.end(copy.owner)
                self._shared.put(LetGo(key, release.token_count, kept_as, kept_tokens))
                return
            reason = copy.given_up or reason
            self._shared.put(ReplicaEnded(key, reason))
            if release is not None:
                self._account.go_on(copy.owner)
                self._shared.put(ReleaseFailed(key, reason))
