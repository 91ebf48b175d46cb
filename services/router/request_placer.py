"""Places requests on instances, follows each attempt to its end, and places requests again that lost theirs."""

import asyncio
import random
import time
from collections.abc import Mapping

from kaveri.cluster.store import ClusterStore
from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, phases_now
from kaveri.errors import (
    DeadlineExceeded,
    EngineError,
    InternalError,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
    StaleAttempt,
    Unavailable,
)
from kaveri.feeds.expiring import ExpiringMap
from kaveri.policy.placement import AnyPrefillPlacement, choose_prefill, missing_phases
from kaveri.policy.retry import RetryLimits, RetryState, Setback, after_setback
from kaveri.policy.waits import PREFILL_LOOK_S as _LONGEST_WAIT_S
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import ATTEMPT_REMEMBERED_S
from kaveri.wire.attempts import MAX_ATTEMPT
from services.router import metrics
from services.router.holders import Holders
from services.router.lifecycle_values import (
    NO_LIFE,
    Abort,
    Action,
    Attempt,
    Decoding,
    Disown,
    Ended,
    Follow,
    InstanceLife,
    LeaveAttempt,
    Lost,
    Placed,
    ReplicaForgone,
    Resuming,
    Sent,
    Sought,
    TookOver,
    Unfollow,
    Unplaced,
)
from services.router.placement_line import PlacementLine
from services.router.prefill_attempts import PrefillAttempts
from services.router.requests import RequestEntry
from services.router.take_over import Found, Missing, TakeOver
from services.router.token_feeds import TokenFeeds

_ATTEMPTS_COUNT = 65_536
_NON_RETRYABLE = (InvalidArgument, LayoutMismatch, ModelNotFound, DeadlineExceeded, RequestAlreadyExists, EngineError)
"""Errors that the request would have anywhere else."""


class RequestPlacer:
    """Runs the attempts of every request of one router."""

    def __init__(
        self,
        *,
        model: str,
        stream_id: str,
        policy: AnyPrefillPlacement,
        max_attempts: int,
        unavailable_after_s: float,
        store: ClusterStore,
        channels: Channels,
        feeds: TokenFeeds,
        holders: Holders,
        rng: random.Random,
    ) -> None:
        """stream_id: the router_id of the prefill and decode protocols: unique over the router's lives, and secret."""
        self._model = model
        self._stream_id = stream_id
        self._policy = policy
        self._limits = RetryLimits(max_attempts, unavailable_after_s)
        self._store = store
        self._feeds = feeds
        self._holders = holders
        self._rng = rng
        self._turn = 0
        self._numbers: ExpiringMap[str, int] = ExpiringMap(ATTEMPT_REMEMBERED_S, max_count=_ATTEMPTS_COUNT)
        """The last attempt of each request id. A client may use an id again at once: its attempts go on counting, so
        that a late token, or a late Abort, of the former request does not touch the new one."""
        self._takeover = TakeOver(store, feeds, stream_id)
        self._view_changed = asyncio.Event()
        self._line: PlacementLine[RequestEntry] = PlacementLine()
        self._instances: Mapping[str, ViewedInstance] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._prefills = PrefillAttempts(
            model=model,
            stream_id=stream_id,
            channels=channels,
            feeds=feeds,
            has_begun=self._line.wake_first,
        )

    def update(self, view: ClusterView) -> None:
        """Wakes requests that wait for an instance."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        self._prefills.update(view)
        if view.instances is not self._instances:
            self._instances = view.instances
            self._line.wake_all()
        else:
            self._line.wake_first()

    async def wait_for_instances(self, deadline_s: float) -> ClusterView:
        """The view, once its ready instances do both phases. Raises Unavailable after a while.

        deadline_s: time.monotonic() of the request's deadline.
        """
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
        """run() as a task that this placer owns. Cancel it when the client's RPC is over."""
        task = asyncio.create_task(self.run(entry), name=f"request {entry.request_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def run(self, entry: RequestEntry) -> None:
        """Follows a request until it has ended; what goes wrong ends the entry with an error. Cancelled, it ends the
        prefill stream; releasing the entry then aborts the request at decode."""
        try:
            await self._serve(entry)
        except KaveriError as error:
            entry.fail(error)
        except Exception:
            get_logger().exception(
                "request_failed_unexpectedly",
                request_id=entry.request_id,
                attempt=entry.attempt_number,
            )
            entry.fail(InternalError(f"the router failed while it served request {entry.request_id!r}"))
        finally:
            if number := max(entry.attempt_number, self._numbers.get(entry.request_id, time.monotonic()) or 0):
                # From the end on: late messages of a long answer must not touch a request that uses its id again.
                self._numbers.put(entry.request_id, number, time.monotonic())

    async def close(self) -> None:
        """Waits for the tasks of requests that have ended."""
        if self._running:
            await asyncio.wait(self._running)
        await self._prefills.close()

    def check_integrity(self) -> None:
        """Asserts, while no request is in flight, that nothing of ended ones is left."""
        assert not self._running, self._running
        self._prefills.check_integrity()
        assert not len(self._line), len(self._line)

    def act(self, entry: RequestEntry, action: Action) -> None:
        """Carries out what a request's life asks of instances."""
        match action:
            case Follow(_, decode, is_there):
                assert isinstance(entry.state, Placed | Resuming | Decoding), entry.state
                self._feeds.follow(entry, entry.state.attempt, decode, is_there)
            case Unfollow() | LeaveAttempt():
                self._feeds.unfollow(entry)
            case Abort(attempt, decode):
                self._feeds.abort(entry.request_id, entry.ownership(attempt, self._stream_id), decode)
            case Disown(attempt, source):
                owner = Owner(entry.accepted.session, attempt)
                self._feeds.disown(entry.request_id, owner, source.instance_id)
            case _:
                raise AssertionError(f"{action} concerns no instance")

    def address_of(self, decode: InstanceLife) -> str:
        """Where clients can read what this decode instance draws; empty: not now."""
        return self._feeds.address_of(decode)

    def abandon(self, request_id: str, session: int, secret: bytes) -> None:
        """Ends what earlier sessions have at instances of a request that was cancelled before it was looked for."""
        ownership = Ownership(Owner(session, 1), self._stream_id, secret)
        self._feeds.abort(request_id, ownership, None)

    async def _serve(self, entry: RequestEntry) -> None:
        number = self._numbers.get(entry.request_id, time.monotonic()) or 0
        retry, others_unasked, hint_is_old = RetryState(), False, False
        if entry.ended:
            return  # It was sent away, or its deadline has passed, before this task began.
        if entry.accepted.session and entry.lacks_prompt_logprobs:
            # Decode instances do not have them: it is placed again, from the beginning.
            self.abandon(entry.request_id, entry.accepted.session, entry.accepted.secret)
            number = max(number, 1)
        elif entry.accepted.session:
            can_resume = self._usable_replica(entry) is not None
            number += 1
            others_unasked = await self._take_over(entry, number, can_resume) is Missing.OWNER_LOST
            if isinstance(entry.state, Ended):
                return
        while True:
            prefill: InstanceRecord | None = None
            replica = None if hint_is_old and isinstance(entry.state, Unplaced) else self._usable_replica(entry)
            if replica is not None:
                number += 1
                self._numbers.put(entry.request_id, number, time.monotonic())
                await self._holders.resume(entry, number, replica)
            else:
                if isinstance(entry.state, Lost):
                    entry.handle(ReplicaForgone(), time.monotonic())
                if (pause_s := retry.pause_until_s - time.monotonic()) > 0:
                    await asyncio.sleep(pause_s)
                target = await self._choose(entry, retry)
                if entry.ended:
                    return  # While it waited; the end of the client's RPC has not reached this task yet.
                number += 1
                self._numbers.put(entry.request_id, number, time.monotonic())
                metrics.ATTEMPTS.inc()
                prefill = target.record
                await self._follow(entry, number, target)
            match entry.state:
                case Lost() as lost:
                    retry = self._after_loss(entry, lost, prefill, retry)
                case state:
                    assert isinstance(state, Ended), state
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
                if isinstance(entry.state, Ended):
                    return

    def _usable_replica(self, entry: RequestEntry) -> ReplicaLocation | None:
        """The replica from which the request is to go on, if there is one and its holder can be heard."""
        replica = None if entry.lacks_prompt_logprobs else self._holders.replica_of(entry)
        if replica is None or not self._feeds.is_connected(InstanceLife(replica.holder_id, replica.holder_incarnation)):
            return None
        return replica

    def _after_loss(
        self, entry: RequestEntry, lost: Lost, prefill: InstanceRecord | None, retry: RetryState
    ) -> RetryState:
        """What holds for the next attempt. Raises the error that has ended this one when there is to be none.

        prefill: the instance that it was sent to; None: it was resumed."""
        if lost.setback is Setback.REFUSED:
            entry.timing.attempts -= 1
            if isinstance(lost.error, RequestAlreadyExists):
                raise lost.error
            return retry
        if lost.setback in (Setback.LOST, Setback.BROKEN):
            entry.note_loss(str(lost.error), lost.decode or lost.attempt.prefill)
            metrics.LOST_ATTEMPTS.inc()
            get_logger().warning(
                "attempt_lost",
                request_id=entry.request_id,
                attempt=lost.attempt.number,
                prefill_instance_id=lost.attempt.prefill.instance_id,
                decode_instance_id=lost.decode.instance_id if lost.decode is not None else "",
                generated_tokens=lost.next_index,
                error=str(lost.error),
            )
        else:
            entry.timing.attempts -= 1
            if lost.replica is None:
                # Otherwise it leaves an instance that drains.
                self._note_delay(entry, str(lost.error))
        if isinstance(lost.error, _NON_RETRYABLE):
            raise lost.error
        after = after_setback(
            retry,
            self._limits,
            lost.setback,
            prefill if lost.is_prefills_fault else None,
            time.monotonic(),
            self._rng.random(),
            lost.error.retry_after_s if isinstance(lost.error, NoCapacity) else 0.0,
        )
        if after is None:
            raise lost.error
        return after

    def _note_delay(self, entry: RequestEntry, reason: str) -> None:
        """Logs why a request is not placed at once: one line a request, whatever else delays it."""
        if not entry.delay_noted:
            entry.delay_noted = True
            get_logger().info("placement_delayed", request_id=entry.request_id, attempt=0, reason=reason)

    async def _choose(self, entry: RequestEntry, retry: RetryState) -> ViewedInstance:
        """Waits until an instance takes the request: until a rest ends, room appears or the view changes.

        Nothing may be awaited before the choice is entered as unconfirmed work, so that no two count on one place.
        """
        try:
            while True:
                view = await self.wait_for_instances(entry.accepted.deadline_s)
                now_s = time.monotonic()
                resting = retry.resting(view, now_s)
                if not self._line.must_join(entry):
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
                if resting:
                    self._line.rest(entry)
                else:
                    self._line.join(entry)
                metrics.WAITING.set(len(self._line))
                self._note_delay(entry, "every prefill instance is full, or has just failed the request")
                rest_s = min(resting.values(), default=now_s + _LONGEST_WAIT_S) - now_s
                await self._line.wait(entry, min(rest_s, _LONGEST_WAIT_S))
        finally:
            self._line.leave(entry)
            metrics.WAITING.set(len(self._line))

    async def _follow(self, entry: RequestEntry, number: int, target: ViewedInstance) -> None:
        """Runs one attempt until it is over."""
        record = target.record
        prefill = InstanceLife(record.instance_id, record.incarnation)
        first_index, most_tokens = len(entry.answer.token_ids), entry.accepted.most_tokens
        attempt = Attempt(number, prefill, first_index, most_tokens, suspect_until=entry.suspect_until)
        entry.note_recomputed(prefill)
        # One that does both phases will decode the request too: an abort or a broken stream misses no moment.
        over = entry.begin(Sent(attempt, prefill if Phase.DECODE in phases_now(target) else None))
        await self._prefills.send(entry, attempt, target, over)
        await over

    async def _take_over(self, entry: RequestEntry, number: int, can_resume: bool) -> Found | Missing:
        """Finds the instances that have the request from an earlier session, and follows it there to the attempt's end.

        Returns what it has found, with a request that has ended, or that is to be placed again. Raises what an instance
        refuses for good.
        """
        most_tokens = entry.accepted.most_tokens
        self._numbers.put(entry.request_id, number, time.monotonic())
        first_index, suspect_until = len(entry.answer.token_ids), entry.suspect_until
        over = entry.begin(Sought(Attempt(number, NO_LIFE, first_index, most_tokens, suspect_until=suspect_until)))
        try:
            found = await self._takeover.find(entry, number, can_resume)
        finally:
            if entry.ended and not entry.is_superseded:
                # It was cancelled. Whether an instance has just given it to this router is not known.
                self._feeds.abort(entry.request_id, entry.ownership(number, self._stream_id), None)
        if isinstance(entry.state, Ended):
            if isinstance(found, Found) and found.tie is not None:
                self._feeds.drop(found.tie)
            return found
        _note_search(entry, found)
        if isinstance(found, Missing):
            entry.timing.attempts -= 1
            entry.note_not_found()
        else:
            # It has no new owner after all, where the holder of a replica was asked before.
            entry.owner_change = None
            entry.adopt(found.attached.params)
            entry.note_owner(found.prefill, found.decode)
            first_index, most_tokens = found.attached.first_index, entry.accepted.most_tokens
            is_at_prefill = found.decode is None
            attempt = Attempt(number, found.prefill, first_index, most_tokens, is_at_prefill, suspect_until)
            entry.handle(TookOver(attempt, found.attached.token_ids, found.decode), time.monotonic())
            entry.note_holder()
            if found.tie is not None:
                await self._prefills.read(entry, attempt, found.tie, over)
            await over
        if isinstance(entry.state, Lost):
            if isinstance(entry.state.error, _NON_RETRYABLE):
                raise entry.state.error
            if entry.state.setback in (Setback.LOST, Setback.BROKEN):
                metrics.LOST_ATTEMPTS.inc()
                entry.note_loss(str(entry.state.error), entry.state.decode or entry.state.attempt.prefill)
        return found


def _note_search(entry: RequestEntry, found: Found | Missing) -> None:
    """Logs and counts how the search for a request of an earlier session has ended."""
    match found:
        case Found(_, prefill, decode):
            outcome = "taken_over"
        case Missing.OWNER_LOST:
            outcome, prefill, decode = "owner_lost", NO_LIFE, None
        case Missing.NOWHERE:
            outcome, prefill, decode = "placed_again", NO_LIFE, None
    metrics.REATTACHES.labels(outcome=outcome).inc()
    get_logger().info(
        "request_reattached",
        request_id=entry.request_id,
        session=entry.accepted.session,
        received_tokens=len(entry.answer.token_ids),
        outcome=outcome,
        prefill_instance_id=prefill.instance_id,
        decode_instance_id="" if decode is None else decode.instance_id,
    )
