"""Has the KV of this instance's requests copied to other instances, which can resume them. The engine copies in the
background, so no token waits for its copy."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpc import StatusCode, aio
from structlog.typing import FilteringBoundLogger

from kaveri.cluster.store import ClusterStore
from kaveri.domain.owner import Ownership
from kaveri.domain.replica import ReplicaOffer
from kaveri.domain.view import (
    ClusterView,
    DrainWay,
    InstanceRecord,
    Phase,
    ReplicaCounts,
    ViewedInstance,
    accepts,
    is_late,
)
from kaveri.engine.contract import (
    DecodeEngine,
    EngineEvent,
    EngineKey,
    Landed,
    LetGo,
    ReleaseFailed,
    ReplicaEnded,
    Replicated,
    StepTokens,
)
from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.lives import copy_owner, decoding
from kaveri.lives.copy_owner import Alone, Copied, Holder, Leaving, Moving, Opening
from kaveri.lives.decoding import Ended, Outcome, Running
from kaveri.policy.balance import Batch, Moves, RunningRequest, most_to_partner, plan_moves, plan_within_pair
from kaveri.policy.replication import (
    CopyRules,
    ReplicationMode,
    choose_holder,
    copy_bytes,
    has_room_to_run,
)
from kaveri.policy.retry import bounded_retry_s
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.policy.waits import COPY_LOOK_S, COPY_REQUESTS_MAX, HOLDER_REST_S, NO_HOLDER_S
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import decode_pb2, feed_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.attempts import ownership_fields, ownership_to_proto
from kaveri.wire.messages import ticket_from_proto
from kaveri.wire.replicas import offer_to_proto
from kaveri.wire.status import error_of
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.replica_metrics import ReplicaMetrics
from services.decode.requests import DecodeRequest

_GIVEN_UP = (Outcome.ABORTED, Outcome.DEADLINE, Outcome.ROUTER_GONE)
"""Outcomes after which no router resumes a request."""
_UNANSWERED = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.CANCELLED)
_RELEASE_TIMEOUT_S = 2.0
"""Limit on copying the rest of a stopped request; afterwards the request continues here."""
_MOST_MOVING = 2
"""Max requests stopped at the same time: moves share the links to the holders and the holders' engines."""
_RESUME_TIMEOUT_S = 2.0
"""Limit on the wait for a moved request's resumption at its holder; afterwards the next one is moved."""
_MOST_LACKING_BLOCKS = 2
"""Max blocks that a copy may lack when its request is moved; other requests run until their copies have caught up."""
_SETTLED_S = 1.0
"""Min time, in seconds, that a request stays here before levelling may move it to another instance."""
_LEAST_REST_TOKENS = 4
"""Min remaining tokens of a moved request; with fewer, the request ends before it could be moved."""


@dataclass(eq=False, slots=True)
class _Owned:
    request: DecodeRequest
    copy: copy_owner.State
    told: Ownership
    """Session and attempt last reported to the holder."""


class Replicator:
    """Keeps KV copies of one decode instance's requests at other instances (the holders). Not thread-safe."""

    def __init__(
        self,
        engine: DecodeEngine,
        instance: DecodeInstance,
        store: ClusterStore,
        own: InstanceRecord,
        rules: CopyRules,
        rng: random.Random,
        metrics: ReplicaMetrics,
        holder: ReplicaHolder | None = None,
    ) -> None:
        """own: this instance; its address is not read. rules: which requests to copy, and where. holder: keeps the KV
        of requests that move, if these rules say so."""
        self._engine = engine
        self._instance = instance
        self._store = store
        self._own = own
        self._holder = holder
        self._rules = rules
        self._rng = rng
        self._metrics = metrics
        self._owned: dict[EngineKey, _Owned] = {}
        self._unconfirmed: UnconfirmedWork[EngineKey] = UnconfirmedWork()
        self._resting_until_s: dict[str, float] = {}
        self._none_until_s = 0.0
        """Earliest time of the next holder search."""
        self._channels = Channels()
        self._tasks = asyncio.TaskGroup()
        self._asked_count = 0
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._drain_way: DrainWay | None = None
        """Way of the drain; None: this instance does not drain."""
        self._plan: Moves[EngineKey] | None = None
        """Requests to move although this instance does not drain; None: none."""
        self._let_go_count = 0
        """Number of moved requests not yet resumed by their holders."""
        self.counts = ReplicaCounts()
        """Counts at the last update, without resumptions here."""
        self._moved: UnconfirmedWork[EngineKey] = UnconfirmedWork()
        """Blocks of moved requests that no heartbeat reports yet."""

    async def run(self) -> None:
        try:
            async with self._tasks:
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    self._look()
                    if self._owned:
                        self._changed.set()
                    await asyncio.sleep(COPY_LOOK_S)
        finally:
            await self._channels.close()

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Handle a batch of engine events, after the DecodeInstance has handled them."""
        for event in events:
            match event:
                case Landed() | StepTokens():
                    # Adopted requests do not land.
                    self._changed.set()
                case Replicated(key, token_count):
                    self._grown(key, token_count)
                case ReplicaEnded(key, reason):
                    self._lost(key, reason)
                case ReleaseFailed(key, reason):
                    get_logger().info("release_failed", request_id=key.request_id, reason=reason)
                    self._forget(key)
                    self._take(key, copy_owner.BareEvent.MOVE_FAILED)
                case LetGo(key, token_count):
                    # An aborted request was not moved: _look() closes its copy.
                    if key in self._owned and not isinstance(self._owned[key].request.state, Ended):
                        self._take(key, copy_owner.MoveDone(token_count))
                    self._move_some()

    def drain(self, way: DrainWay) -> None:
        """Stop levelling. With MIGRATE, begin to move running requests to the instances that hold their KV copies, a
        few at a time, as far as those have room; requests without a copy get one first."""
        self._drain_way, self._plan = way, None
        self._changed.set()

    def undrain(self) -> None:
        """Stop moving requests to other instances; moves under way continue."""
        self._drain_way = None

    def _look(self) -> None:
        """Request a copy at another instance for each request without one, and drop the state of ended requests."""
        now_s = time.monotonic()
        here = {request.engine_request.key: request for request in self._instance.landed()}
        for key in [key for key in self._owned if key not in here]:
            state = self._owned[key].request.state
            # The router resumes a failed request from its copy.
            if state != Ended(Outcome.FAILED):
                self._take(key, copy_owner.RequestEnded(isinstance(state, Ended) and state.outcome in _GIVEN_UP))
            del self._owned[key]
            self._forget(key)
        for key, request in here.items():
            self._owned.setdefault(key, _Owned(request, Alone(), request.ownership))
        self._level(now_s)
        for key, request in here.items():
            owned = self._owned[key]
            match owned.copy:
                case Copied(holder) | Moving(holder) if owned.told != request.ownership:
                    self._tasks.create_task(self._update(owned, holder))
                case Copied(holder) if not self._is_wanted(request, holder):
                    self._take(key, copy_owner.BareEvent.HOLDER_UNWANTED)
                case Leaving(_, until_s) if until_s <= now_s:
                    self._take(key, copy_owner.BareEvent.HOLDER_UNWANTED)
                case Alone(until_s) if until_s <= now_s and (self._is_worth_a_copy(request) or self._moves(request)):
                    self._choose(owned, now_s)
        self._move_some()
        self._count()
        view = self._store.view()
        self._unconfirmed.retain(view)
        self._moved.retain(view)
        self._resting_until_s = {name: until_s for name, until_s in self._resting_until_s.items() if until_s > now_s}
        self._channels.retain(view.incarnations())

    def _forget(self, key: EngineKey) -> None:
        if self._holder is not None:
            self._holder.forget(key)

    def _is_worth_a_copy(self, request: DecodeRequest) -> bool:
        return self._rules.is_worth_a_copy(request.context_tokens, request.rest_tokens)

    def _level(self, now_s: float) -> None:
        """Plan which requests to move to an instance with a shorter batch."""
        former, self._plan = self._plan.target if self._plan is not None else None, None
        if self._drain_way is not None:
            return
        # Not looked at unless there is an instance to level with.
        movable = (
            RunningRequest(key, owned.request.context_tokens, _holder_id(owned.copy))
            for key, owned in self._owned.items()
            if self._can_move(owned.request) and self._stays_long(owned.request, now_s)
        )
        view = self._store.view()
        pair = self._pair(view)
        limits = {} if pair is None else {pair[0].record.instance_id: most_to_partner(*pair[1:])}
        plan = plan_moves(view, self._own, movable, self._unconfirmed_tokens, self._takes, former, limits)
        if plan is None:
            self._plan = self._plan_within_pair(*pair, now_s) if pair is not None else None
            return
        self._plan = plan
        if plan.target != former:
            get_logger().info("batch_levelled", target_id=plan.target.instance_id, requests=len(plan.keys))

    def _pair(self, view: ClusterView) -> tuple[ViewedInstance, Batch, Batch] | None:
        """Return the partner, and the batches of this instance and of the partner; None if there is no partner that
        decodes, or copies are in host memory, so that a move would copy all KV."""
        partner, here = view.instances.get(self._partner_id(view)), view.instances.get(self._own.instance_id)
        if not self._rules.keeps or here is None or partner is None:
            return None
        if not accepts(partner, Phase.DECODE) or is_late(partner):
            return None
        # Both from heartbeats of about one age, which may not show the latest moves yet.
        sent, sent_tokens = self._moved.at(partner).count, self._unconfirmed_tokens(partner)
        return (
            partner,
            Batch(_request_count(here) - sent, here.load.context_tokens - sent_tokens),
            Batch(_request_count(partner) + sent, partner.load.context_tokens + sent_tokens),
        )

    def _plan_within_pair(
        self, partner: ViewedInstance, own_batch: Batch, partner_batch: Batch, now_s: float
    ) -> Moves[EngineKey] | None:
        """Plan which request to hand to the partner."""
        able = (
            RunningRequest(owned.request.engine_request.key, owned.request.context_tokens, partner.record.instance_id)
            for owned in self._owned.values()
            if isinstance(owned.copy, Copied)
            and _is_life(owned.copy.holder, partner.record)
            and self._can_move(owned.request)
            and self._stays_long(owned.request, now_s)
        )
        key = plan_within_pair(own_batch, partner_batch, (one for one in able if self._takes(partner, one)))
        return Moves(partner.record, (key,)) if key is not None else None

    def _partner_id(self, view: ClusterView) -> str:
        """Return the id of the other instance of the pair; empty if there is none."""
        here = view.instances.get(self._own.instance_id)
        return (here.load.partner_id or "") if here is not None else ""

    def _stays_long(self, request: DecodeRequest, now_s: float) -> bool:
        is_ending = request.rest_tokens is not None and request.rest_tokens < self._rules.min_rest_tokens
        return not is_ending and now_s - request.came_s >= _SETTLED_S

    def _takes(self, instance: ViewedInstance, running: RunningRequest[EngineKey]) -> bool:
        """Return True if the instance has room for a request, and for a copy of it unless it has one."""
        instance_id, layout = instance.record.instance_id, self._engine.info.layout
        free_bytes = instance.load.replica_free_bytes - self._unconfirmed.at(instance).amount
        holds_copy = running.holder_id == instance_id or free_bytes >= copy_bytes(layout, running.context_tokens)
        needed_blocks = layout.block_count(running.context_tokens + 1)
        is_resting = instance_id in self._resting_until_s
        return holds_copy and not is_resting and has_room_to_run(instance, needed_blocks, self._moved)

    def _unconfirmed_tokens(self, instance: ViewedInstance) -> int:
        return self._moved.at(instance).amount * self._engine.info.layout.block_tokens

    def _is_wanted(self, request: DecodeRequest, holder: Holder) -> bool:
        """Return False if the request should move to another instance than the holder of its copy: to the target of the
        levelling, or in a drain because the holder does not decode."""
        target = self._target_of(request.engine_request.key)
        if target is not None:
            return _is_life(holder, target)
        status = self._store.view().instances.get(holder.instance_id)
        if not self._moves(request) or status is None or accepts(status, Phase.DECODE):
            return True
        # A copy that no instance would replace stays.
        return time.monotonic() < self._none_until_s or self._holder_for(request) is None

    def _target_of(self, key: EngineKey) -> InstanceRecord | None:
        """Instance to which the request is planned to move; None: it stays, or moves wherever a drain finds room."""
        return self._plan.target if self._plan is not None and key in self._plan.keys else None

    def _moves(self, request: DecodeRequest) -> bool:
        """Return True if the request should leave now, in a drain or to level the batches."""
        leaves = self._migrates or self._target_of(request.engine_request.key) is not None
        return leaves and self._can_move(request)

    @property
    def _migrates(self) -> bool:
        return self._drain_way is DrainWay.MIGRATE

    def _can_move(self, request: DecodeRequest) -> bool:
        """Return True if the request can leave now. Requests whose router has no stream stay."""
        rest_tokens, state = request.rest_tokens, request.state
        is_ending = rest_tokens is not None and rest_tokens < _LEAST_REST_TOKENS
        # Before the first token here, prefill is involved as well. A preempted request has no KV to release.
        has_begun = isinstance(state, Running) and state.drawn > 0 and state.holds_blocks
        has_router = self._instance.owners.feeds.has(request.ownership.router_id)
        return has_begun and not is_ending and has_router

    def _move_some(self) -> None:
        if not self._migrates and self._plan is None:
            return
        moving_count = self._let_go_count + sum(isinstance(owned.copy, Moving) for owned in self._owned.values())
        view, most_lacking = self._store.view(), _MOST_LACKING_BLOCKS * self._engine.info.layout.block_tokens
        for owned in tuple(self._owned.values()):
            if moving_count >= _MOST_MOVING:
                return
            request, copy = owned.request, owned.copy
            if not isinstance(copy, Copied) or request.context_tokens - copy.token_count > most_lacking:
                continue
            target = self._target_of(request.engine_request.key)
            if target is not None and not _is_life(copy.holder, target):
                continue
            holder = view.instances.get(copy.holder.instance_id)
            if holder is None or holder.record.incarnation != copy.holder.incarnation:
                continue
            if self._moves(request) and self._has_room(holder, request):
                moving_count += 1
                self._moved.add(request.engine_request.key, holder, self._needed_blocks(request))
                self._take(request.engine_request.key, copy_owner.BareEvent.MOVE_REQUESTED)

    def _needed_blocks(self, request: DecodeRequest) -> int:
        return self._engine.info.layout.block_count(request.context_tokens + 1)

    def _has_room(self, instance: ViewedInstance, request: DecodeRequest) -> bool:
        return has_room_to_run(instance, self._needed_blocks(request), self._moved)

    def _choose(self, owned: _Owned, now_s: float) -> None:
        if self._asked_count >= COPY_REQUESTS_MAX or now_s < self._none_until_s:
            return
        request = owned.request
        key, found = request.engine_request.key, self._holder_for(request)
        if found is None and self._target_of(key) is not None:
            return
        if found is None:
            # Other requests would most likely find none either, and a failed search scans the whole cluster.
            self._none_until_s = now_s + NO_HOLDER_S
            return
        needed_bytes = copy_bytes(self._engine.info.layout, request.context_tokens)
        self._unconfirmed.add(key, found, needed_bytes)
        record = found.record
        holder = Holder(record.instance_id, record.incarnation, record.address, next(self._numbers))
        self._take(key, copy_owner.HolderChosen(holder))

    def _holder_for(self, request: DecodeRequest) -> ViewedInstance | None:
        """Choose an instance to hold the request's copy, with room for the request itself if that should move."""
        target = self._target_of(request.engine_request.key)

        def is_fit(instance: ViewedInstance) -> bool:
            is_there = target is None or instance.record.instance_id == target.instance_id
            stays = target is None and not self._migrates
            return is_there and (stays or self._has_room(instance, request))

        view = self._store.view()
        # The instance that has kept the KV may not decode.
        is_free = target is not None or (self._migrates and self._rules.keeps)
        return choose_holder(
            ReplicationMode.SPREAD if is_free else self._rules.mode,
            view,
            self._own,
            copy_bytes(self._engine.info.layout, request.context_tokens),
            self._unconfirmed,
            self._rng,
            self._resting_until_s,
            is_fit,
            request.came_from if self._rules.keeps else None,
            self._partner_id(view),
        )

    def _take(self, key: EngineKey, event: copy_owner.Event) -> None:
        owned = self._owned.get(key)
        if owned is None:
            return
        owned.copy, actions = copy_owner.step(owned.copy, event, time.monotonic())
        for action in actions:
            self._act(owned, action)

    def _act(self, owned: _Owned, action: copy_owner.Action) -> None:
        match action:
            case copy_owner.AskHolder(holder):
                self._asked_count += 1
                self._tasks.create_task(self._ask(owned, holder))
            case copy_owner.BeginCopy(ticket):
                try:
                    self._engine.replicate(owned.request.engine_request.key, ticket)
                except KaveriError as error:
                    self._lost(owned.request.engine_request.key, str(error))
            case copy_owner.CloseCopy(holder):
                self._tasks.create_task(self._close(owned.request, holder))
            case copy_owner.SendLocation(replica):
                self._instance.owners.announce_replica(owned.request, replica)
            case copy_owner.ReleaseInEngine():
                assert isinstance(owned.copy, Moving)
                key = owned.request.engine_request.key
                try:
                    if self._holder is not None and self._rules.keeps:
                        self._holder.keep(key, self._offer(owned.request, owned.copy.holder))
                    self._engine.release(key, _RELEASE_TIMEOUT_S)
                except EngineError:
                    return  # it stopped; EngineStopped follows and ends every request
            case copy_owner.EndAsMoved(replica):
                self._metrics.moves.inc()
                self.counts = replace(self.counts, moved=self.counts.moved + 1)
                log = _log(owned.request, replica.holder_id)
                log.info("request_let_go", tokens=replica.token_count)
                self._instance.move(owned.request, replica)
            case copy_owner.AwaitResumed(holder):
                self._let_go_count += 1
                self._tasks.create_task(self._await_resumed(owned, holder))

    async def _await_resumed(self, owned: _Owned, holder: Holder) -> None:
        owner = ownership_to_proto(owned.request.request_id, owned.told)
        owner.replica = holder.number
        try:
            with self._channels.calling(DecodeServiceStub, holder.address) as stub:
                await stub.AwaitResumed(decode_pb2.AwaitResumedRequest(owner=owner), timeout=_RESUME_TIMEOUT_S)
        except aio.AioRpcError as error:
            # The holder is unreachable, does not implement the call, or no router resumes the request.
            get_logger().debug("resume_not_awaited", holder_id=holder.instance_id, error=error.details())
        finally:
            self._let_go_count -= 1
        self._move_some()

    async def _ask(self, owned: _Owned, holder: Holder) -> None:
        request, key = owned.request, owned.request.engine_request.key
        offered = request.ownership
        try:
            try:
                response = await self._open(owned, holder)
            finally:
                self._asked_count -= 1
            ticket = ticket_from_proto(response.ticket)
            if key in self._owned and isinstance(request.state, decoding.Landed | Running):
                self._metrics.opens.labels("granted").inc()
                self._take(key, copy_owner.RoomGranted(ticket, response.incarnation))
            else:
                # The request has ended, so no push will inform the holder.
                await self._close(request, holder)
        except Exception as raised:  # Isolate failures per request.
            error = raised if isinstance(raised, KaveriError) else Unavailable(repr(raised))
            if error is not raised:
                get_logger().exception("replication_failed_unexpectedly", request_id=request.request_id)
            # Reserved room counts as used until the holder's heartbeats include it.
            self._unconfirmed.remove(key, holder.instance_id)
            self._refused(request, offered, holder, error)

    def _offer(self, request: DecodeRequest, owner: Holder) -> ReplicaOffer:
        """Return the request for a copy that `owner`, the instance that runs the request, makes at a holder."""
        return ReplicaOffer(
            request.request_id,
            request.ownership,
            owner.instance_id,
            owner.incarnation,
            self._engine.info.layout,
            request.context_tokens,
            max(0.001, request.expires_s - time.monotonic()),
            owner.number,
        )

    async def _open(self, owned: _Owned, holder: Holder) -> decode_pb2.OpenReplicaResponse:
        request = owned.request
        offer = self._offer(request, Holder(self._own.instance_id, self._own.incarnation, "", holder.number))
        owned.told = request.ownership
        try:
            with self._channels.calling(DecodeServiceStub, holder.address) as stub:
                return await stub.OpenReplica(offer_to_proto(offer), timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            raise error_of(error, peer=holder.address, request_id=request.request_id) from error

    def _refused(self, request: DecodeRequest, offered: Ownership, holder: Holder, error: KaveriError) -> None:
        """Handle a holder's refusal of a KV copy. offered: session and attempt of the request when it was asked."""
        self._metrics.opens.labels("refused" if isinstance(error, NoCapacity) else "failed").inc()
        rest_s = bounded_retry_s(error.retry_after_s) if isinstance(error, NoCapacity) else HOLDER_REST_S
        self._rest(holder, rest_s)
        log = _log(request, holder.instance_id)
        log.info("replica_refused", error=str(error))
        if isinstance(error, DeadlineExceeded | Unavailable):
            # The room may have been reserved nevertheless.
            self._tasks.create_task(self._close(request, holder))
        if isinstance(error, StaleAttempt | RequestAlreadyExists) and request.ownership == offered:
            # The holder has seen a newer owner: this instance was frozen or partitioned, and has lost the request.
            self._instance.lose(request, error)
        self._take(request.engine_request.key, copy_owner.CopyLost(self._rng.random()))

    def _grown(self, key: EngineKey, token_count: int) -> None:
        owned = self._owned.get(key)
        if owned is not None and isinstance(owned.copy, Copied):
            self._metrics.copied_tokens.inc(max(0, token_count - owned.copy.token_count))
        self._take(key, copy_owner.CopyGrew(token_count))

    def _lost(self, key: EngineKey, reason: str) -> None:
        owned = self._owned.get(key)
        if owned is not None and isinstance(owned.copy, Leaving):
            self._take(key, copy_owner.CopyLost(0.0))
            self._changed.set()
        if owned is None or not isinstance(owned.copy, Copied | Moving):
            return
        request, holder = owned.request, owned.copy.holder
        self._metrics.losses.inc()
        self._rest(holder, HOLDER_REST_S)
        log = _log(request, holder.instance_id)
        log.info("replica_lost", tokens=owned.copy.token_count, reason=reason)
        self._take(key, copy_owner.CopyLost(self._rng.random()))

    async def _update(self, owned: _Owned, holder: Holder) -> None:
        """Send the request's new attempt or session to the holder, so that older ones cannot close the copy."""
        former, owned.told = owned.told, owned.request.ownership
        fields = ownership_fields(owned.request.request_id, owned.told)
        message = decode_pb2.OpenReplicaRequest(**fields, replica=holder.number)
        try:
            with self._channels.calling(DecodeServiceStub, holder.address) as stub:
                await stub.OpenReplica(message, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            # A holder that refuses or does not implement the call is not asked again.
            if error.code() in _UNANSWERED:
                owned.told = former

    async def _close(self, request: DecodeRequest, holder: Holder) -> None:
        name = ownership_to_proto(request.request_id, request.ownership)
        # Close up to this copy only: the message may arrive late.
        name.replica = holder.number
        message = feed_pb2.AbortRequest(attempts=[name])
        try:
            with self._channels.calling(FeedServiceStub, holder.address) as stub:
                await stub.Abort(message, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError as error:
            # The holder is unreachable, or the copy expires.
            get_logger().debug("replica_not_closed", holder_id=holder.instance_id, error=error.details())

    def _rest(self, holder: Holder, rest_s: float) -> None:
        self._resting_until_s[holder.instance_id] = time.monotonic() + rest_s

    def _count(self) -> None:
        lags: list[int] = []
        unprotected_count = 0
        for owned in self._owned.values():
            match owned.copy:
                case Copied(token_count=token_count) | Moving(token_count=token_count) if token_count:
                    lags.append(owned.request.context_tokens - token_count)
                case _ if self._is_worth_a_copy(owned.request):
                    unprotected_count += 1
        counts = self.counts = ReplicaCounts(
            len(lags), unprotected_count, max(lags, default=0), moved=self.counts.moved
        )
        self._metrics.copies.owned.set(counts.owned)
        self._metrics.copies.unprotected.set(counts.unprotected)
        self._metrics.copies.lag_tokens.set(counts.lag_tokens)


def _request_count(instance: ViewedInstance) -> int:
    return instance.load.running_requests + instance.load.waiting_requests


def _holder_id(copy: copy_owner.State) -> str | None:
    return copy.holder.instance_id if isinstance(copy, Opening | Copied | Moving) else None


def _is_life(holder: Holder, instance: InstanceRecord) -> bool:
    return (holder.instance_id, holder.incarnation) == (instance.instance_id, instance.incarnation)


def _log(request: DecodeRequest, holder_id: str) -> FilteringBoundLogger:
    term = request.ownership.term
    return get_logger().bind(
        request_id=request.request_id, attempt=term.attempt, session=term.session, holder_id=holder_id
    )
