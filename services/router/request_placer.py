"""Places requests on instances, follows each attempt to its end, and places requests again after a loss."""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import replace

from kaveri.cluster.store import ClusterStore
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, phases_now
from kaveri.errors import InternalError, KaveriError, StaleAttempt, Unavailable
from kaveri.feeds.expiring import ExpiringMap
from kaveri.lives import request_values as lives
from kaveri.lives.request_values import InstanceLife, holder_of
from kaveri.policy.placement import choose_prefill, missing_phases
from kaveri.policy.retry import RetryLimits, RetryState, Setback
from kaveri.policy.waits import PREFILL_LOOK_S as _LONGEST_WAIT_S
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import ATTEMPT_REMEMBERED_S
from kaveri.wire.attempts import MAX_ATTEMPT
from services.router import metrics
from services.router.config import RouterConfig
from services.router.prefill_attempts import PrefillAttempts
from services.router.recovery.holders import Holders
from services.router.recovery.losses import NON_RETRYABLE, after_loss
from services.router.recovery.take_over import Found, Missing, TakeOver, note_search
from services.router.requests import RequestEntry
from services.router.token_feeds import TokenFeeds

_ATTEMPTS_COUNT = 65_536


class RequestPlacer:
    """Runs the attempts (placements on instances) of all requests of a router."""

    def __init__(
        self,
        config: RouterConfig,
        stream_id: str,
        store: ClusterStore,
        channels: Channels,
        feeds: TokenFeeds,
        holders: Holders,
        rng: random.Random,
    ) -> None:
        """stream_id: this router's id in the prefill and decode protocols; unique across restarts, and secret."""
        self._model = config.model_name
        self._stream_id = stream_id
        self._policy = config.placement_policy
        self._limits = RetryLimits(config.max_attempts, config.unavailable_after_s)
        self._store = store
        self._feeds = feeds
        self._holders = holders
        self._rng = rng
        self._turn = 0
        self._numbers: ExpiringMap[str, int] = ExpiringMap(ATTEMPT_REMEMBERED_S, max_count=_ATTEMPTS_COUNT)
        """Last attempt number of each request id. Numbers go on when a client reuses an id, so that late tokens and
        aborts of the former request cannot match the new one."""
        self._takeover = TakeOver(store, feeds, stream_id)
        self._view_changed = asyncio.Event()
        self._line = PlacementLine()
        self._instances: Mapping[str, ViewedInstance] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._prefills = PrefillAttempts(self._model, stream_id, channels, feeds, self._line.wake_first)

    def update(self, view: ClusterView) -> None:
        """Apply a cluster view: wake requests that wait for an instance."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        self._prefills.update(view)
        if view.instances is not self._instances:
            self._instances = view.instances
            self._line.wake_all()
        else:
            self._line.wake_first()

    async def wait_for_instances(self, deadline_s: float) -> ClusterView:
        """Wait until instances serve both prefill and decode. Raises Unavailable at `deadline_s`, a time.monotonic(),
        or after the setting unavailable_after_s."""
        until_s = min(deadline_s, time.monotonic() + self._limits.unavailable_after_s)
        while True:
            view = self._store.view()
            missing = missing_phases(view, self._model)
            if not missing:
                return view
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._view_changed.wait()
            except TimeoutError as error:
                raise Unavailable(f"no {missing[0]} instance serves {self._model!r}", retry_after_s=1.0) from error

    def start(self, entry: RequestEntry) -> asyncio.Task[None]:
        """Start run() as a task of this placer. The caller cancels it when the client's RPC is over."""
        task = asyncio.create_task(self.run(entry), name=f"request {entry.request_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def run(self, entry: RequestEntry) -> None:
        """Place a request, again after losses, until it has ended; errors end its entry. If cancelled, only prefill is
        aborted: the caller ends the entry, which aborts decode."""
        try:
            await self._serve(entry)
        except KaveriError as error:
            entry.stop(error)
        except Exception:
            get_logger().exception(
                "request_failed_unexpectedly", request_id=entry.request_id, attempt=entry.attempt_number
            )
            entry.stop(InternalError(f"the router failed while it served request {entry.request_id!r}"))
        finally:
            if number := max(entry.attempt_number, self._numbers.get(entry.request_id, time.monotonic()) or 0):
                # Kept after the end, so that late messages of a long answer cannot match a request that reuses its id.
                self._numbers.put(entry.request_id, number, time.monotonic())

    async def close(self) -> None:
        """Wait until the tasks of ended requests are done."""
        if self._running:
            await asyncio.wait(self._running)
        await self._prefills.close()

    def check_integrity(self) -> None:
        """Assert, while no request is in flight, that no task, attempt or waiting request is left."""
        assert not self._running, self._running
        self._prefills.check_integrity()
        assert not len(self._line), len(self._line)

    def act(self, entry: RequestEntry, action: lives.Action) -> None:
        """Carry out an action of the request's state machine that concerns instances, such as Follow or Abort."""
        match action:
            case lives.Follow(_, decode, is_there):
                assert isinstance(entry.state, lives.Placed | lives.Resuming | lives.Decoding), entry.state
                self._feeds.follow(entry, entry.state.attempt, decode, is_there)
            case lives.Unfollow() | lives.LeaveAttempt():
                self._feeds.unfollow(entry)
            case lives.Abort(attempt, decode):
                self._feeds.abort(entry.request_id, entry.ownership(attempt, self._stream_id), decode)
            case lives.Disown(attempt, source):
                term = Term(entry.accepted.session, attempt)
                self._feeds.disown(entry.request_id, term, source.instance_id)
            case _:
                raise AssertionError(f"{action} concerns no instance")

    def address_of(self, decode: InstanceLife) -> str:
        """Address where clients can read this decode instance's tokens directly; empty: not available now."""
        return self._feeds.address_of(decode)

    def abandon(self, request_id: str, session: int, secret: bytes) -> None:
        """Abort at all instances what earlier sessions have left of a request, without looking for it."""
        ownership = Ownership(Term(session, 1), self._stream_id, secret)
        self._feeds.abort(request_id, ownership, None)

    async def _serve(self, entry: RequestEntry) -> None:
        number = self._numbers.get(entry.request_id, time.monotonic()) or 0
        retry, others_unasked, hint_is_old = RetryState(), False, False
        if isinstance(entry.state, lives.Ended):
            return  # It was sent away, or its deadline has passed, before this task began.
        if entry.accepted.session and entry.answer.lacks_prompt:
            # Decode instances do not have them: it is placed again, from the beginning.
            self.abandon(entry.request_id, entry.accepted.session, entry.accepted.secret)
            number = max(number, 1)
        elif entry.accepted.session:
            can_resume = self._usable_replica(entry) is not None
            number += 1
            others_unasked = await self._take_over(entry, number, can_resume) is Missing.OWNER_LOST
            if isinstance(entry.state, lives.Ended):
                return
        while True:
            prefill: InstanceRecord | None = None
            replica = None
            if not isinstance(entry.state, lives.Unplaced) or (entry.accepted.session and not hint_is_old):
                replica = self._usable_replica(entry)
            if replica is not None:
                number += 1
                self._numbers.put(entry.request_id, number, time.monotonic())
                await self._holders.resume(entry, number, replica)
            else:
                if isinstance(entry.state, lives.Lost):
                    entry.handle(lives.ReplicaForgone(), time.monotonic())
                if (pause_s := retry.pause_until_s - time.monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                target = await self._choose(entry, retry)
                if isinstance(entry.state, lives.Ended):
                    return  # While it waited; the end of the client's RPC has not reached this task yet.
                number += 1
                self._numbers.put(entry.request_id, number, time.monotonic())
                metrics.ATTEMPTS.inc()
                prefill = target.record
                await self._follow(entry, number, target)
            match entry.state:
                case lives.Lost() as lost:
                    retry = after_loss(entry, lost, prefill, retry, self._limits, self._rng.random())
                case state:
                    assert isinstance(state, lives.Ended), state
                    return
            if isinstance(lost.error, StaleAttempt):
                number = max(number, lost.error.newest_attempt)
                if number >= MAX_ATTEMPT:
                    raise lost.error
            if others_unasked and lost.setback is Setback.REFUSED and lost.replica is None:
                # The hint was old: another instance may have the request.
                others_unasked, hint_is_old = False, True
                number += 1
                await self._take_over(entry, number, can_resume=False)
                if isinstance(entry.state, lives.Ended):
                    return

    def _usable_replica(self, entry: RequestEntry) -> ReplicaLocation | None:
        replica = None if entry.answer.lacks_prompt else self._holders.replica_of(entry)
        if replica is None or not self._feeds.is_connected(holder_of(replica)):
            return None
        return replica

    async def _choose(self, entry: RequestEntry, retry: RetryState) -> ViewedInstance:
        """Wait until a prefill instance has room for the request. Before its next await, the caller must register the
        result as unconfirmed work (load that no heartbeat shows yet), or two requests could take the same room."""
        has_waited = False
        try:
            while True:
                view = await self.wait_for_instances(entry.accepted.deadline_s)
                now_s = time.monotonic()
                resting = retry.resting(view, now_s)
                # A request that has not waited must not look for room before those in line.
                if has_waited or not self._line.in_line:
                    self._turn += 1
                    target = choose_prefill(
                        view,
                        self._model,
                        self._prefills.unconfirmed,
                        self._policy,
                        self._rng,
                        turn=self._turn,
                        avoid=retry.failed(view) | self._feeds.silent_ids,
                        exclude=resting,
                    )
                    if target is not None:
                        return target
                has_waited = True
                entry.note_delay("every prefill instance is full, or has just failed the request")
                rest_s = min(resting.values(), default=now_s + _LONGEST_WAIT_S) - now_s
                await self._line.wait(entry, min(rest_s, _LONGEST_WAIT_S), rests=bool(resting))
        finally:
            if has_waited:
                self._line.leave(entry)

    async def _follow(self, entry: RequestEntry, number: int, target: ViewedInstance) -> None:
        prefill = InstanceLife(target.record.instance_id, target.record.incarnation)
        attempt = entry.attempt_at(number, prefill)
        if entry.account.owner_change is not None:
            entry.account.note_new_owner("recomputed", prefill, entry.attempt_number, 0, entry.context_tokens)
        # An instance of both phases decodes the request too, so an abort or a broken stream concerns it from now on.
        over = entry.begin(lives.Sent(attempt, prefill if Phase.DECODE in phases_now(target) else None))
        await self._prefills.send(entry, attempt, target, over)
        await over

    async def _take_over(self, entry: RequestEntry, number: int, can_resume: bool) -> Found | Missing:
        """Find the instances that have the request from an earlier session, and run the attempt there until it is over.

        The request has then ended or must be placed again. Raises refusals that no other instance would reverse."""
        self._numbers.put(entry.request_id, number, time.monotonic())
        over = entry.begin(lives.Sought(entry.attempt_at(number)))
        try:
            found = await self._takeover.find(entry, number, can_resume)
        finally:
            if isinstance(entry.state, lives.Ended) and not entry.is_superseded:
                # An instance may have given it to this router just before it ended.
                self._feeds.abort(entry.request_id, entry.ownership(number, self._stream_id), None)
        if isinstance(entry.state, lives.Ended):
            if isinstance(found, Found) and found.tie is not None:
                self._feeds.drop(found.tie)
            return found
        note_search(entry, found)
        if isinstance(found, Missing):
            entry.account.timing.attempts -= 1
            now_s = time.monotonic()
            entry.account.steps.append((now_s, "not found there"))
            entry.account.end_span(now_s, "not found")
            entry.handle(lives.NotFound(), now_s)
        else:
            # The owner has not changed, even if the holder of a replica was asked before.
            entry.account.owner_change = None
            entry.adopt(found.attached.params)
            entry.note_owner(found.prefill, found.decode)
            attempt = replace(
                entry.attempt_at(number, found.prefill),
                first_index=found.attached.first_index,
                taken_over=found.decode is None,
            )
            entry.handle(lives.TookOver(attempt, found.attached.token_ids, found.decode), time.monotonic())
            entry.note_holder()
            if found.tie is not None:
                await self._prefills.read(entry, attempt, found.tie, over)
            await over
        if isinstance(entry.state, lives.Lost):
            if isinstance(entry.state.error, NON_RETRYABLE):
                raise entry.state.error
            if entry.state.setback in (Setback.LOST, Setback.BROKEN):
                metrics.LOST_ATTEMPTS.inc()
                entry.note_loss(str(entry.state.error), entry.state.decode or entry.state.attempt.prefill)
        return found


class PlacementLine:
    """Requests that wait because no prefill instance accepts them. Not thread-safe; bounded by `max_requests`.

    Requests that wait for room form a queue: the first is woken when there is room, and wakes the next once it is
    placed, so that not all of them check at every heartbeat. Requests that an instance has just failed rest outside the
    queue, until their pause is over or an instance comes or goes."""

    def __init__(self) -> None:
        self.in_line: dict[RequestEntry, asyncio.Future[None] | None] = {}
        self._resting: dict[RequestEntry, asyncio.Future[None] | None] = {}

    def __len__(self) -> int:
        return len(self.in_line) + len(self._resting)

    async def wait(self, request: RequestEntry, timeout_s: float, *, rests: bool) -> None:
        """Wait until the request is woken, at most `timeout_s` seconds. It keeps its position in the queue; a new one
        is last. rests: True: wait outside the queue, after an instance has failed the request."""
        if rests and request in self.in_line:
            # An instance that failed the request has left the view and come back.
            self.leave(request)
        elif not rests:
            self._resting.pop(request, None)
        places = self._resting if rests else self.in_line
        woken = places[request] = asyncio.get_running_loop().create_future()
        metrics.WAITING.set(len(self))
        try:
            await asyncio.wait((woken,), timeout=timeout_s)
        finally:
            places[request] = None

    def wake_first(self) -> None:
        """Wake the first request in the queue; no-op if it is awake."""
        _wake(next(iter(self.in_line.values()), None))

    def wake_all(self) -> None:
        """Wake the first request in the queue, and all outside it, because an instance came or went."""
        self.wake_first()
        for waiter in self._resting.values():
            _wake(waiter)

    def leave(self, request: RequestEntry) -> None:
        """Remove a request that was placed or has ended, and wake the next in the queue. Idempotent."""
        self.in_line.pop(request, None)
        self._resting.pop(request, None)
        metrics.WAITING.set(len(self))
        self.wake_first()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
