"""Holds copies of the KV of requests that other instances decode, and resumes a request from its copy when its instance
is lost. A ReplicaStore owns the bytes, the DecodeInstance owns resumed requests."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaOffer, Resumed, Resumption
from kaveri.domain.view import InstanceLoad
from kaveri.engine.contract import EngineEvent, EngineKey, KeepingEngine, KvPushed, LetGo
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestNotFound, Unavailable
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaEvent,
    ReplicaGivenUp,
    ReplicaGrew,
    ReplicaKey,
    ReplicaOrphaned,
    ReplicaStore,
)
from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives import copy_holder
from kaveri.lives.copy_holder import Complete, Growing, Resuming, usable_tokens
from kaveri.policy.replication import HeldCopy, copy_bytes, drop_first
from kaveri.policy.waits import COPY_MADE_ROOM_RETRY_S, COPY_STARVED_S
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import COMPLETE_COPY_S
from kaveri.wire.attempts import wrong_secret
from services.decode.instance import DecodeInstance
from services.decode.replica_metrics import ReplicaMetrics
from services.decode.requests import DecodeRequest

_QUIET_S = 120.0
"""A copy's owner instance is presumed dead after this long without a mark; waiting requests do not grow."""
_UNUSED_S = 5.0
"""A copy to which its owner has added nothing is dropped after this long: the owner may have missed the ticket."""
_ARRIVAL_LOOKS = 50
_ARRIVAL_LOOK_S = 0.002
_LEAVING_S = 1.0
"""Time that a draining holder keeps copies, for other holders to be found and lost requests to be resumed."""
_LOOK_EVERY_S = 0.25
_SCARCE = 1 / 8
"""Copies of complete answers are dropped while less than this share of the memory is free."""
_RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class HeldReplica:
    """KV copy, held here, of a request that another instance decodes."""

    key: ReplicaKey
    offer: ReplicaOffer
    opened_s: float
    token_count: int
    """Number of tokens for which blocks are reserved."""
    watermark: int = 0
    first_watermark: int = 0
    """`watermark` when the copy was opened: above 0 if it extends a kept prompt."""
    starved_since_s: float | None = None
    """Start of the current wait for a block; None: not waiting."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the copy can no longer be resumed from: it was used, or dropped."""
    outcome: asyncio.Future[Resumed] | None = None
    """Result of the current or the last resumption."""
    state: copy_holder.State = field(default_factory=Growing)
    was_kept: bool = False
    """True if this instance computed the KV itself and kept it when the request left; no owner pushes to it."""

    def can_become(self, offer: ReplicaOffer) -> bool:
        """Return True if the copy that is offered begins with the KV of this one."""
        is_same_request = offer.ownership.is_same_request(self.offer.ownership)
        return self.was_kept and isinstance(self.state, Complete) and is_same_request

    @property
    def newest(self) -> Term:
        term = self.offer.ownership.term
        return max(term, self.state.ownership.term) if isinstance(self.state, Resuming) else term


class ReplicaHolder:
    """KV copies that one decode instance holds for other instances' requests, one per request id. Not thread-safe."""

    def __init__(
        self,
        instance: DecodeInstance,
        store: ReplicaStore,
        incarnation: int,
        orphan_grace_s: float,
        is_there: Callable[[str, int], bool],
        metrics: ReplicaMetrics,
        keeper: KeepingEngine | None = None,
    ) -> None:
        """store: memory of the copies; closed by run(). orphan_grace_s: seconds to keep a copy whose decode instance is
        lost. is_there: returns True if an instance with this id and incarnation is in the cluster. keeper: the engine
        whose KV pool the store uses; None: the store has memory of its own."""
        self._instance = instance
        self._incarnation = incarnation
        self._orphan_grace_s = orphan_grace_s
        self._is_there = is_there
        self._metrics = metrics
        self.resumed_count = 0
        self._held: dict[str, HeldReplica] = {}
        self._tasks = asyncio.TaskGroup()
        self._drained: asyncio.Event | None = None
        """Set once a drain has no copy left; None: not draining."""
        self._store = store
        self._keeper = keeper
        self._leaving: dict[EngineKey, ReplicaOffer] = {}
        """Requests whose KV is kept once they have left, each with the offer expected from its next instance."""
        metrics.watch(store)

    async def run(self) -> None:
        """Drop expired copies until cancelled; then close the store."""
        loop = asyncio.get_running_loop()

        def forward(event: ReplicaEvent) -> None:
            # The store calls from its own thread.
            loop.call_soon_threadsafe(self._hear, event)

        self._store.start(forward)
        try:
            async with self._tasks:
                while True:
                    await asyncio.sleep(_LOOK_EVERY_S)
                    self._drop_expired(time.monotonic())
        finally:
            self._held.clear()
            await asyncio.to_thread(self._store.close)

    def open(self, offer: ReplicaOffer) -> Ticket:
        """Reserve memory for a copy of another instance's request; return the ticket with which that instance pushes
        KV. Drops an older copy of the request first. When the memory is full, copies that are far cheaper to recompute
        are dropped, and the caller has to ask again. Raises Unavailable (draining, or the id has another request's
        copy), LayoutMismatch, NoCapacity, StaleAttempt and RequestAlreadyExists (a newer attempt or session is
        known)."""
        if self._drained is not None:
            raise Unavailable("the holder is draining", retry_after_s=_RETRY_AFTER_S)
        request_id, term = offer.request_id, offer.ownership.term
        former = self._held.get(request_id)
        if former is not None:
            held = offer.ownership.comparable(former.offer.ownership)
            # A client may reuse a request id.
            if held is None and not isinstance(former.state, Complete):
                raise Unavailable("a copy of another request with this id is here", retry_after_s=_RETRY_AFTER_S)
            if held is not None and held < former.newest:
                raise held.stale(request_id, former.newest)
            if held == former.offer.ownership.term and offer.comes_before(former.offer):
                raise Unavailable("the owner has asked for a later copy", retry_after_s=_RETRY_AFTER_S)
        self._instance.owners.note_owner(request_id, offer.ownership)
        key = _key_of(offer)
        if former is not None and not former.can_become(offer):
            self._take(former, copy_holder.EndRequested("replaced"))
            former = None
        ticket = self._open(key, offer, former.key if former is not None else None)
        if former is not None:
            former.left.set()
        watermark = self._store.watermark(key) if former is not None else 0
        self._held[request_id] = HeldReplica(key, offer, time.monotonic(), offer.token_count, watermark, watermark)
        get_logger().info(
            "replica_held",
            request_id=request_id,
            attempt=term.attempt,
            session=term.session,
            owner_id=offer.owner_id,
            tokens=offer.token_count,
        )
        return ticket

    def keep(self, key: EngineKey, offer: ReplicaOffer) -> None:
        """Keep the KV of a request once it has left for another instance: a prompt that is pushed there, or a running
        request that moves.

        What is kept is held as the copy of a complete answer, for COMPLETE_COPY_S. When the other instance asks for a
        copy of the request meanwhile, open() grants it a ticket for the missing blocks only.

        offer: the other instance's request for a copy, as expected. Ignored if the engine keeps no copies. Raises
        EngineError."""
        if self._keeper is not None and self._drained is None:
            self._leaving[key] = offer
            self._keeper.keep(key, _key_of(offer))

    def forget(self, key: EngineKey) -> None:
        """Undo keep(): the request has not left."""
        self._leaving.pop(key, None)

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Handle a batch of engine events, after the prefill side."""
        for event in events:
            if isinstance(event, KvPushed | LetGo):
                offer = self._leaving.pop(event.key, None)
                if event.kept_as is not None:
                    self._keep(offer, event.kept_as, event.kept_tokens)

    def _keep(self, offer: ReplicaOffer | None, key: ReplicaKey, token_count: int) -> None:
        former = self._held.get(key.request_id)
        if former is not None and former.key == key:
            # The next instance has asked for its copy before this event came.
            return
        is_free = former is None or isinstance(former.state, Complete)
        if offer is None or not is_free or self._drained is not None:
            self._store.drop(key)
            return
        if former is not None:
            self._take(former, copy_holder.EndRequested("replaced"))
        now_s = time.monotonic()
        state = Complete(now_s + COMPLETE_COPY_S)
        held = HeldReplica(key, offer, now_s, token_count, token_count, state=state, was_kept=True)
        self._held[key.request_id] = held
        get_logger().bind(**_name_of(held)).info("kv_kept", owner_id=offer.owner_id, tokens=token_count)

    async def resume(self, resumption: Resumption) -> Resumed:
        """Resume a request from its KV copy; return once the KV is in the engine. Repeated calls of one attempt share
        the result. Cancellation does not end the request; its router ends it by an abort. Raises RequestNotFound,
        InvalidArgument (another secret, other tokens, an attempt that is not newer), StaleAttempt and
        RequestAlreadyExists (a newer attempt or session is known), NoCapacity. The copy is kept on errors."""
        try:
            return await asyncio.shield(self._resuming(resumption))
        except KaveriError as error:
            self._metrics.count_resume(error)
            get_logger().info(
                "replica_not_resumed",
                request_id=resumption.request_id,
                attempt=resumption.ownership.term.attempt,
                session=resumption.ownership.term.session,
                error=str(error),
            )
            raise

    def update(self, request_id: str, ownership: Ownership, number: int) -> None:
        """Record a newer attempt or session of a request that stays on its instance and has its KV copy `number` here.
        Ignored if that copy is unknown or has a newer one. Raises InvalidArgument (wrong secret), StaleAttempt and
        RequestAlreadyExists (a newer one ran here)."""
        held = self._copy(request_id, ownership, number)
        if held is not None and ownership.term > held.newest:
            self._instance.owners.note_owner(request_id, ownership)
            held.offer = replace(held.offer, ownership=ownership)

    async def await_resumed(self, request_id: str, ownership: Ownership, number: int) -> None:
        """Wait until a request was resumed from its KV copy `number`, or that copy was dropped. Raises InvalidArgument
        (wrong secret)."""
        held = self._copy(request_id, ownership, number)
        if held is not None:
            await held.left.wait()

    def close(self, request_id: str, ownership: Ownership, number: int = 0) -> None:
        """Drop the KV copy of a request, unless a newer attempt or session of the request is known. number: serial
        number that the copy's sender gave to it; later copies are kept. 0: drop any."""
        held = self._held.get(request_id)
        if held is None or 0 < number < held.offer.number:
            return
        term = ownership.comparable(held.offer.ownership)
        if term is not None and term >= held.newest:
            self._take(held, copy_holder.EndRequested("given_up" if isinstance(held.state, Complete) else "closed"))

    def drain(self) -> None:
        """Refuse new copies, and further KV for present ones, so that decode instances choose other holders. Requests
        can be resumed from the copies until wait_idle() has returned."""
        self._drained = self._drained or asyncio.Event()
        for held in list(self._held.values()):
            self._take(held, copy_holder.DrainBegun(self._store.watermark(held.key)))
        if not self._held:
            self._drained.set()

    def undrain(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    @property
    def is_idle(self) -> bool:
        """True unless a drain still waits for copies to be dropped or resumed."""
        return self._drained is None or self._drained.is_set()

    async def wait_idle(self) -> None:
        if self._drained is not None:
            await self._drained.wait()

    def with_room(self, load: InstanceLoad) -> InstanceLoad:
        """Return the load with the free and total memory for KV copies filled in."""
        usage = self._store.usage()
        complete = (held for held in self._held.values() if isinstance(held.state, Complete))
        unneeded_bytes = sum(copy_bytes(held.offer.layout, held.watermark, ahead=0) for held in complete)
        if self._drained is not None:
            return replace(load, replica_free_bytes=0, replica_total_bytes=0)
        free_bytes = min(usage.total_bytes, usage.total_bytes - usage.used_bytes + unneeded_bytes)
        return replace(load, replica_free_bytes=free_bytes, replica_total_bytes=usage.total_bytes)

    def check_integrity(self) -> None:
        """Assert that the holder's table of copies and its store agree."""
        self._store.check_integrity()
        usage = self._store.usage()
        assert usage.replica_count == len(self._held), (usage, self._held)

    def _copy(self, request_id: str, ownership: Ownership, number: int) -> HeldReplica | None:
        held = self._held.get(request_id)
        if held is None or held.offer.number != number:
            return None
        if not ownership.is_same_request(held.offer.ownership):
            raise wrong_secret()
        return held

    def _open(self, key: ReplicaKey, offer: ReplicaOffer, extends: ReplicaKey | None) -> Ticket:
        expires_in_s = min(offer.timeout_s, _QUIET_S)
        while True:
            try:
                return self._store.open(key, offer.layout, offer.token_count, expires_in_s, stays=True, extends=extends)
            except NoCapacity as error:
                if self._drop_complete(extends):
                    continue
                if not self._make_room(offer):
                    raise
                # Freed blocks become available once no owner can write into them.
                reason = "shorter copies were dropped to make room"
                raise NoCapacity("replica", COPY_MADE_ROOM_RETRY_S, reason) from error

    def _drop_complete(self, spared: ReplicaKey | None) -> bool:
        others = (held for held in self._held.values() if held.key != spared)
        complete = next((held for held in others if isinstance(held.state, Complete)), None)
        if complete is not None:
            self._take(complete, copy_holder.EndRequested("given_up"))
        return complete is not None

    def _make_room(self, offer: ReplicaOffer) -> bool:
        usage, layout = self._store.usage(), offer.layout
        growing = (held for held in self._held.values() if isinstance(held.state, Growing))
        copies = (HeldCopy(held, held.token_count, copy_bytes(layout, held.token_count)) for held in growing)
        free_bytes = usage.total_bytes - usage.used_bytes
        dropped = drop_first(copies, offer.token_count, free_bytes, copy_bytes(layout, offer.token_count))
        for held in dropped or ():
            self._take(held, copy_holder.EndRequested("full"))
        return bool(dropped)

    def _resuming(self, resumption: Resumption) -> asyncio.Future[Resumed]:
        request_id, ownership = resumption.request_id, resumption.ownership
        held = self._held.get(request_id)
        if held is not None and held.outcome is not None and held.state == Resuming(ownership):
            return held.outcome
        outcome: asyncio.Future[Resumed] = asyncio.get_running_loop().create_future()
        running = self._instance.owners.resumed(request_id, ownership)
        if running is not None and running.resumed is not None:
            outcome.set_result(Resumed(self._incarnation, running.resumed.held_tokens))
            return outcome
        held = self._resumable(resumption)
        held.outcome = outcome
        self._take(held, copy_holder.ResumeBegun(ownership))
        self._tasks.create_task(self._conclude(outcome, held, resumption))
        return outcome

    def _resumable(self, resumption: Resumption) -> HeldReplica:
        request_id, ownership = resumption.request_id, resumption.ownership
        if resumption.holder_incarnation != self._incarnation:
            raise RequestNotFound(request_id, "its copy was in a former life of this instance")
        held = self._held.get(request_id)
        if held is None:
            raise RequestNotFound(request_id, "no copy of it is held here")
        former = held.offer.ownership
        if not ownership.is_same_request(former):
            raise wrong_secret()
        if ownership.term < held.newest:
            raise ownership.term.stale(request_id, held.newest)
        if ownership.term == held.newest:
            limit = f"above {held.newest.attempt}, the present one"
            raise InvalidArgument("attempt", ownership.term.attempt, limit)
        self._instance.owners.note_owner(request_id, ownership)
        return held

    async def _conclude(self, outcome: asyncio.Future[Resumed], held: HeldReplica, resumption: Resumption) -> None:
        try:
            outcome.set_result(await self._resume(held, resumption))
        except KaveriError as error:
            outcome.set_exception(error)
        except Exception as error:  # Isolate failures per request.
            get_logger().exception("resume_failed_unexpectedly", request_id=resumption.request_id)
            outcome.set_exception(Unavailable(f"the resume failed: {error!r}"))
        finally:
            if not outcome.cancel():
                # Mark the exception as retrieved: no call may wait for it.
                outcome.exception()

    async def _resume(self, held: HeldReplica, resumption: Resumption) -> Resumed:
        began_s, request_id = time.monotonic(), resumption.request_id
        try:
            await self._seal(held, resumption)
            held_tokens = usable_tokens(self._store.token_ids(held.key), resumption, held.offer.layout.block_tokens)
            if self._keeper is not None:
                promote = partial(self._keeper.promote, replica=held.key, held_tokens=held_tokens)
                # After a move its former instance has the same tokens, and may have kept their KV.
                is_whole = held_tokens == len(resumption.token_ids) - 1
                self._instance.promote(resumption, held_tokens, promote, held.offer.owner_id if is_whole else "")
            else:
                request, ticket = await self._instance.reserve_resumed(resumption, held_tokens)
                await self._land(held, request, ticket)
        except BaseException:
            self._take(held, copy_holder.ResumeFailed(resumption.ownership))
            raise
        self._take(held, copy_holder.ResumeDone(resumption.ownership))
        recomputed_tokens = len(resumption.token_ids) - held_tokens
        self._metrics.count_resumed(held_tokens, recomputed_tokens)
        self.resumed_count += 1
        term, former = resumption.ownership.term, held.offer
        get_logger().info(
            "request_resumed",
            request_id=request_id,
            attempt=term.attempt,
            session=term.session,
            owner_id=former.owner_id,
            held_tokens=held_tokens,
            recomputed_tokens=recomputed_tokens,
            seconds=round(time.monotonic() - began_s, 6),
        )
        return Resumed(self._incarnation, held_tokens)

    async def _seal(self, held: HeldReplica, resumption: Resumption) -> None:
        """Refuse further KV for a copy, after blocks that its decode instance counts as received have arrived."""
        expected = min(resumption.replica_tokens, len(resumption.token_ids) - 1)
        for _ in range(_ARRIVAL_LOOKS):
            if self._store.watermark(held.key) >= expected:
                break
            await asyncio.sleep(_ARRIVAL_LOOK_S)
        self._store.seal(held.key)

    async def _land(self, held: HeldReplica, request: DecodeRequest, ticket: Ticket) -> None:
        assert request.resumed is not None
        try:
            await asyncio.wrap_future(self._store.push(held.key, ticket))
        except BaseException:
            self._instance.abort(request.request_id, request.ownership, by_router=True)
            raise
        # The engine reports the landing. The reservation's expiry bounds the wait.
        if not await request.resumed.landed:
            raise Unavailable("the request has ended before its copy had landed")

    def _hear(self, event: ReplicaEvent) -> None:
        held = self._held.get(event.key.request_id)
        if held is None or held.key != event.key:
            return
        match event:
            case ReplicaGrew():
                held.watermark = event.token_count
                held.token_count = max(held.token_count, event.token_count)
            case ReplicaOrphaned():
                self._take(held, copy_holder.OwnerLost(event.reason))
            case ReplicaGivenUp():
                self._take(held, copy_holder.BareEvent.OWNER_GAVE_UP)
            case ReplicaDropped():
                self._take(held, copy_holder.EndRequested("given_up"))

    def _drop_expired(self, now_s: float) -> None:
        unused_s = max(_UNUSED_S, self._orphan_grace_s)
        for held in list(self._held.values()):
            is_old = held.opened_s + unused_s <= now_s
            check = copy_holder.Checked(
                is_unused=held.watermark <= held.first_watermark and is_old,
                is_expired=held.opened_s + held.offer.timeout_s <= now_s,
                is_memory_scarce=isinstance(held.state, Complete) and self._is_memory_scarce(),
            )
            self._take(held, check, now_s)
            if isinstance(held.state, Growing):
                # The view may lose an owner whose connection is still open (no packet closed it), and lack a young one.
                if is_old and not self._is_there(held.offer.owner_id, held.offer.owner_incarnation):
                    self._take(held, copy_holder.OwnerLost("its owner has left the cluster"), now_s)
                elif self._is_starved(held, now_s):
                    # An orphaned copy cannot be evicted, and in the pool its blocks are missing for requests.
                    in_pool = self._keeper is not None
                    missed = copy_holder.EndRequested("full") if in_pool else copy_holder.BareEvent.BLOCK_MISSED
                    self._take(held, missed, now_s)

    def _is_memory_scarce(self) -> bool:
        usage = self._store.usage()
        return usage.total_bytes - usage.used_bytes < _SCARCE * usage.total_bytes

    def _is_starved(self, held: HeldReplica, now_s: float) -> bool:
        if not self._store.is_starved(held.key):
            held.starved_since_s = None
            return False
        if held.starved_since_s is None:
            held.starved_since_s = now_s
        return now_s - held.starved_since_s >= COPY_STARVED_S

    @property
    def _grace_s(self) -> float:
        return self._orphan_grace_s if self._drained is None else min(_LEAVING_S, self._orphan_grace_s)

    def _take(self, held: HeldReplica, event: copy_holder.Event, now_s: float | None = None) -> None:
        now_s = time.monotonic() if now_s is None else now_s
        held.state, actions = copy_holder.step(held.state, event, now_s, self._grace_s)
        for action in actions:
            match action:
                case copy_holder.Seal():
                    self._store.seal(held.key)
                case copy_holder.RecordOrphan(reason):
                    get_logger().bind(**_name_of(held)).info("replica_orphaned", reason=reason)
                case copy_holder.Drop(cause):
                    self._drop(held, cause)

    def _drop(self, held: HeldReplica, cause: str) -> None:
        held.left.set()
        del self._held[held.key.request_id]
        if not self._held and self._drained is not None:
            self._drained.set()
        self._store.drop(held.key)
        self._metrics.drops.labels(cause).inc()
        get_logger().bind(**_name_of(held)).info("replica_dropped", cause=cause)


def _key_of(offer: ReplicaOffer) -> ReplicaKey:
    term = offer.ownership.term
    return ReplicaKey(offer.request_id, term.session, term.attempt)


def _name_of(held: HeldReplica) -> dict[str, str | int]:
    return {"request_id": held.key.request_id, "attempt": held.key.attempt, "session": held.key.session}
