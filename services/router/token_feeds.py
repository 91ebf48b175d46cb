"""Follows one gRPC stream per instance: delivers its tokens and its reports on prompts to requests.

A broken stream is reopened and continues where the requests are; only what the instance no longer has is lost."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

from grpc import aio

from kaveri.domain.attachment import Attached, Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason
from kaveri.domain.silence import SilenceWatch
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance
from kaveri.errors import (
    DeadlineExceeded,
    InternalError,
    KaveriError,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    Unavailable,
)
from kaveri.feeds.expiring import ExpiringMap
from kaveri.lives import request_values as lives
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S, REOPEN_GRACE_S, TICK_S
from kaveri.v1 import decode_pb2, feed_pb2, prefill_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.attempts import attached_from_proto, attachment_to_proto, ownership_to_proto
from kaveri.wire.messages import FINISH_FROM_PROTO, fault_from_proto
from kaveri.wire.replicas import replica_from_proto
from kaveri.wire.status import error_of
from services.router import metrics
from services.router.recovery.holders import Holders
from services.router.request_table import RequestTable
from services.router.requests import RequestEntry
from services.router.subscriptions import OpenStream, PromptTie, Subscription, Tie

_ABORTED_COUNT = 4096
"""Max remembered aborts; more than are in flight at once."""
_LIVES_COUNT = 4096
"""Max remembered process runs of instances that have left."""
_ABORTS_AT_ONCE = 4096
"""Max aborts in a message; with the longest ids they take less than half of the largest one."""
_RECONNECT_MIN_S = 0.01
_RECONNECT_MAX_S = 1.0


class TokenFeeds:
    """Streams to one router of tokens and prefill reports: one from each instance with an engine."""

    def __init__(
        self, stream_id: str, channels: Channels, table: RequestTable, suspect_after_s: float, holders: Holders
    ) -> None:
        """stream_id: this router's id in FeedService. suspect_after_s: seconds of silence, counted while this process
        runs, after which a stream is cancelled as broken."""
        self._stream_id = stream_id
        self._channels = channels
        self._table = table
        self._holders = holders
        self._silence: SilenceWatch[Subscription] = SilenceWatch(suspect_after_s, time.monotonic())
        self._reopening: SilenceWatch[Subscription] = SilenceWatch(REOPEN_GRACE_S, time.monotonic())
        """Suspected instances whose new stream has not been answered."""
        self._subscriptions: dict[str, Subscription] = {}
        self._tied = asyncio.Event()
        """Set when attempts need streams."""
        self.silent_ids: frozenset[str] = frozenset()
        """Ids of suspected instances, which went silent and have not answered since."""
        self._followed: dict[RequestEntry, Subscription] = {}
        self._instances: Mapping[str, ViewedInstance] = {}
        self._over: ExpiringMap[lives.InstanceLife, bool] = ExpiringMap(max_count=_LIVES_COUNT)
        """Process runs that have last left the view."""
        self._aborted: ExpiringMap[tuple[str, str, Term], float] = ExpiringMap(max_count=_ABORTED_COUNT)
        """Time of each of the last aborts, by (instance, request, owner)."""
        self._unsent: dict[str, list[decode_pb2.AttemptId]] = {}
        """Aborts to send in this turn of the loop, by address."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        """Aborts and attaches in flight."""

    def update(self, view: ClusterView) -> None:
        """Apply a cluster view: open streams to new instances, and end those of instances that left or restarted. The
        attempts that depend on them fail."""
        if view.instances is self._instances and all(known.record for known in self._subscriptions.values()):
            return
        self._instances = view.instances
        records = {instance_id: status.record for instance_id, status in view.instances.items() if status.record.phases}
        for instance_id, subscription in tuple(self._subscriptions.items()):
            record = records.get(instance_id)
            if record is None:
                # Without a record: named by a prefill instance so far. Its attempts fail after CONNECT_GRACE_S.
                if subscription.record is not None or not subscription.ties:
                    self._end_life(subscription.record)
                    subscription.stop("has left the cluster")
                    del self._subscriptions[instance_id]
            elif subscription.record is None:
                subscription.start(record, self._follow(subscription, record))
            elif (record.incarnation, record.address) != (subscription.record.incarnation, subscription.record.address):
                self._end_life(subscription.record)
                successor = self._subscriptions[instance_id] = Subscription(instance_id, self._over.get)
                subscription.hand_over(successor, record.incarnation)
                self._followed.update({tie.entry: successor for tie in successor.ties.values() if not tie.at_prefill})
                subscription.stop("has restarted")
                successor.start(record, self._follow(successor, record))
        for instance_id in [name for name in records if name not in self._subscriptions]:
            subscription, record = self._subscription(instance_id), records[instance_id]
            subscription.start(record, self._follow(subscription, record))
        self._find_silent()

    def _end_life(self, record: InstanceRecord | None) -> None:
        if record is not None:
            self._over.put(lives.InstanceLife(record.instance_id, record.incarnation), True)

    def _subscription(self, instance_id: str) -> Subscription:
        """Return the instance's subscription. A new one has no record if a prefill instance knew it before the view."""
        if instance_id not in self._subscriptions:
            self._subscriptions[instance_id] = Subscription(instance_id, self._over.get)
        return self._subscriptions[instance_id]

    def follow(self, entry: RequestEntry, attempt: lives.Attempt, life: lives.InstanceLife, is_there: bool) -> None:
        """Deliver the tokens of an attempt from a decode instance, in the process run `life`. The attempt fails if the
        instance restarts, lacks the request, or has no stream for CONNECT_GRACE_S. is_there: True if it is known to
        have the request.

        Calls Attach, after which the instance sends the tokens here from the next one on, if a former stream may have
        lost some or the attempt was taken over from another router."""
        subscription = self._subscription(life.instance_id)
        if self._followed.get(entry) is not subscription:
            self.unfollow(entry)
        self._followed[entry] = subscription
        tie = Tie(entry, attempt, life, is_there)
        subscription.tie(tie)
        self._tied.set()
        if tie.needs_attach and subscription.ties.get((entry, False)) is tie:
            self._attach_if_due(subscription, tie)

    def unfollow(self, entry: RequestEntry) -> None:
        """Stop delivering tokens of a request. Idempotent."""
        former = self._followed.pop(entry, None)
        if former is not None:
            former.ties.pop((entry, False), None)

    def expect_reports(self, entry: RequestEntry, number: int, record: InstanceRecord) -> PromptTie:
        """Collect a prefill instance's reports on attempt `number` in the returned object, until drop()."""
        tie = PromptTie(entry, number, record, lives.InstanceLife(record.instance_id, record.incarnation))
        self._subscription(record.instance_id).tie(tie)
        self._tied.set()
        return tie

    def drop(self, tie: PromptTie) -> None:
        """Stop collecting a prefill instance's reports on an attempt. Idempotent."""
        subscription = self._subscriptions.get(tie.record.instance_id)
        if subscription is not None:
            subscription.drop(tie)

    def may_lack_reports(self, tie: PromptTie, since_s: float) -> bool:
        """True if the stream has broken since `since_s`, a time.monotonic(): a new one repeats reports only on requests
        that were known to be there."""
        subscription = self._subscriptions.get(tie.record.instance_id)
        return subscription is not None and subscription.broken_s >= since_s

    def abort(self, request_id: str, ownership: Ownership, decode: lives.InstanceLife | None) -> None:
        """Abort an attempt at a decode instance; None: at every instance. Best effort: an unreachable one ends the
        attempt after its setting orphan_grace_s, or is sent another Abort when its tokens arrive here."""
        name = ownership_to_proto(request_id, ownership)
        for subscription in self._subscriptions.values():
            if subscription.record is not None and (decode is None or decode.instance_id == subscription.instance_id):
                self._abort_at(subscription.record, name)

    def disown(self, request_id: str, term: Term, instance_id: str, secret: bytes = b"") -> None:
        """Abort an attempt whose tokens or reports belong to no request here, unless an Abort was sent just now."""
        sent_s = self._aborted.get((instance_id, request_id, term))
        subscription = self._subscriptions.get(instance_id)
        if subscription is None or subscription.record is None:
            return
        # News this long after an Abort shows that it was lost, or overtook the request.
        if sent_s is None or time.monotonic() - sent_s > CALL_TIMEOUT_S:
            name = ownership_to_proto(request_id, Ownership(term, self._stream_id, secret))
            self._abort_at(subscription.record, name)

    def _abort_at(self, record: InstanceRecord, name: decode_pb2.AttemptId) -> None:
        """Send an Abort, together with the others of this iteration of the event loop."""
        noted = record.instance_id, name.request_id, Term(name.term.session, name.term.attempt)
        self._aborted.put(noted, time.monotonic())
        unsent = self._unsent.setdefault(record.address, [])
        unsent.append(name)
        if len(unsent) == 1:
            task = asyncio.create_task(self._send_aborts(record.address), name=f"aborts at {record.instance_id}")
            self._own(task)

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("background_task_failed", exc_info=task.exception())

    async def _send_aborts(self, address: str) -> None:
        names = self._unsent.pop(address)
        for first in range(0, len(names), _ABORTS_AT_ONCE):
            message = feed_pb2.AbortRequest(attempts=names[first : first + _ABORTS_AT_ONCE], by_router=True)
            with contextlib.suppress(aio.AioRpcError):
                await self._channels.stub(FeedServiceStub, address).Abort(message, timeout=CALL_TIMEOUT_S)

    async def watch(self) -> None:
        """Cancel streams that are silent although attempts need them. Runs until cancelled."""
        while True:
            if not (self.silent_ids or any(subscription.ties for subscription in self._subscriptions.values())):
                self._tied.clear()
                await self._tied.wait()
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for subscription in self._reopening.tick(now_s):
                subscription.lose_all()
            for subscription in self._silence.tick(now_s):
                metrics.SUSPICIONS.inc()
                self._reopening.heard(subscription)
                subscription.break_off(f"it sent nothing for {self._silence.after_s:g} s")
                self._find_silent()
            for one in self._subscriptions.values():
                if (stream := one.stream) and not stream.quiet and any(not tie.has_ended for tie in one.ties.values()):
                    self._silence.begin(one)
                else:
                    self._silence.forget(one)

    def _find_silent(self) -> None:
        self.silent_ids = frozenset(name for name, known in self._subscriptions.items() if known.fault)

    async def attach(
        self, record: InstanceRecord, attachment: Attachment, timeout_s: float = CALL_TIMEOUT_S
    ) -> Attached:
        """Make this router the receiver of a request's tokens or prefill reports, on the instance's stream.

        Raises the error with which the instance answers, or Unavailable."""
        name = f"{'prefill' if attachment.at_prefill else 'decode'} instance {record.instance_id}"
        stub = self._channels.stub(FeedServiceStub, record.address)
        message = attachment_to_proto(attachment, record.incarnation)
        try:
            response = await stub.Attach(message, timeout=timeout_s)
        except aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, DeadlineExceeded | RequestCancelled):
                error = Unavailable(f"{name} does not answer")
            raise error from rpc_error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the channel was closed.
            raise Unavailable(f"{name} has left the cluster") from None
        return attached_from_proto(response.attached)

    def is_connected(self, life: lives.InstanceLife) -> bool:
        """True if the stream from this process run of the instance is open."""
        subscription = self._subscriptions.get(life.instance_id)
        if subscription is None or subscription.record is None or subscription.stream is None:
            return False
        return subscription.record.incarnation == life.incarnation

    def address_of(self, life: lives.InstanceLife) -> str:
        """Address where clients can read this instance's tokens directly; empty while its stream is not open."""
        subscription = self._subscriptions.get(life.instance_id)
        if subscription is None or subscription.record is None or not self.is_connected(life):
            return ""
        return subscription.record.address

    def let_go_s(self, life: lives.InstanceLife) -> float:
        """time.monotonic() at which this instance last moved a request to another one; 0: never."""
        subscription = self._subscriptions.get(life.instance_id)
        return subscription.let_go_s if subscription is not None else 0.0

    def _attach_if_due(self, subscription: Subscription, tie: Tie) -> None:
        is_due = subscription.stream and tie.needs_attach and subscription.is_of_life(tie)
        if is_due and subscription.record is not None:
            tie.needs_attach = False
            self._own(asyncio.create_task(self._attach(subscription, subscription.record, tie)))

    async def _attach(self, subscription: Subscription, record: InstanceRecord, tie: Tie) -> None:
        # Names the prefill instance only where the request was found there: a hint may be old.
        placed_by = tie.attempt.prefill.instance_id if tie.attempt.taken_over else ""
        attachment = tie.entry.attachment(tie.attempt.number, self._stream_id, placed_by=placed_by)
        try:
            await self.attach(record, attachment)
        except KaveriError as error:
            if isinstance(error, Unavailable) and subscription.stream is None:
                # Tried again with the next stream.
                tie.needs_attach = True
                return
            life = lives.InstanceLife(record.instance_id, record.incarnation)
            if tie.entry.accepted.received.excuses(error, life, Phase.DECODE):
                error = Unavailable(f"decode instance {record.instance_id} had the request before its last owner")
            subscription.lose(tie, error)

    def check_integrity(self) -> None:
        """Assert, while no request is in flight, that no attempt is left."""
        for subscription in self._subscriptions.values():
            assert not subscription.ties, (subscription.instance_id, subscription.ties)
        assert not self._followed, self._followed

    async def close(self) -> None:
        """End all streams and fail their attempts."""
        tasks = [subscription.stop("is not followed any more") for subscription in self._subscriptions.values()]
        self._subscriptions.clear()
        await asyncio.gather(*(task for task in tasks if task is not None), *self._tasks, return_exceptions=True)

    async def _follow(self, subscription: Subscription, record: InstanceRecord) -> None:
        backoff_s = _RECONNECT_MIN_S
        log = get_logger().bind(instance_id=record.instance_id, incarnation=record.incarnation)
        while True:
            try:
                await self._read(subscription, record)
                error: KaveriError = Unavailable(f"{record.instance_id} ended its stream")
            except aio.AioRpcError as rpc_error:
                error = error_of(rpc_error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                error = Unavailable(subscription.fault or f"the channel to {record.instance_id} was closed")
            except Exception as unexpected:
                log.exception("stream_failed", requests=len(subscription.ties))
                error = Unavailable(f"the stream failed in the router: {unexpected!r}")
            if subscription.stream is None or subscription.fault:
                why = subscription.fault or f"it cannot be reached: {error}"
                self._lose_those_that_do_not_wait(subscription, why)
            if subscription.stream is not None:
                log.warning("stream_broken", error=str(error), requests=len(subscription.ties))
                subscription.disconnect()
                backoff_s = _RECONNECT_MIN_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _RECONNECT_MAX_S)

    def _lose_those_that_do_not_wait(self, subscription: Subscription, why: str) -> None:
        error = Unavailable(f"instance {subscription.instance_id}: {why}")
        for tie in tuple(subscription.ties.values()):
            # A prompt moves at once when the connection breaks, but not when its instance is only slow.
            waits = bool(subscription.fault) if tie.at_prefill else not self._holders.does_not_wait(tie.entry)
            if not waits:
                subscription.lose(tie, error)

    async def _read(self, subscription: Subscription, record: InstanceRecord) -> None:
        request = feed_pb2.FollowRequest(router_id=self._stream_id, requests=subscription.open())
        call = self._channels.stub(FeedServiceStub, record.address).Follow(request)
        life = lives.InstanceLife(record.instance_id, record.incarnation)
        try:
            async for message in call:
                if (stream := subscription.stream) is None:
                    if message.incarnation != record.incarnation:
                        # Another life answers at this address; the view will bring its record.
                        return
                    stream = subscription.stream = OpenStream(call, time.monotonic())
                    if subscription.fault:
                        subscription.fault = ""
                        self._find_silent()
                    self._reopening.forget(subscription)
                    for tie in tuple(subscription.ties.values()):
                        if isinstance(tie, Tie):
                            self._attach_if_due(subscription, tie)
                token_count = 0
                now_s = time.monotonic()
                for report in message.reports:
                    self._deliver_report(subscription, report)
                for update in message.requests:
                    token_count += len(update.token_ids)
                    self._deliver(life, update, now_s)
                if token_count:
                    metrics.RELAYED_TOKENS.inc(token_count)
                stream.quiet = message.quiet
                if message.quiet:
                    self._silence.forget(subscription)
                else:
                    self._silence.heard(subscription)
        finally:
            self._silence.forget(subscription)
            call.cancel()

    def _deliver_report(self, subscription: Subscription, report: prefill_pb2.PrefillReport) -> None:
        entry, term = self._table.get(report.request_id), Term(report.term.session, report.term.attempt)
        tie = subscription.ties.get((entry, True)) if entry is not None else None
        if isinstance(tie, PromptTie) and (tie.entry.accepted.session, tie.number) == term:
            tie.is_there = True
            # At once: when the attempt is over, what waits in `news` is not read.
            tie.has_ended = tie.has_ended or report.HasField("ended")
            tie.news.put_nowait(report)
            return
        if report.HasField("ended") or self._table.is_left_to_a_later_session(report.request_id, term.session):
            return
        if entry is None or entry.accepted.session == term.session:
            # Its Abort was lost. This router may be looking for a request of another session.
            self.disown(report.request_id, term, subscription.instance_id)

    def _deliver(self, life: lives.InstanceLife, update: decode_pb2.RequestTokens, now_s: float) -> None:
        entry, term = self._table.get(update.request_id), Term(update.term.session, update.term.attempt)
        has_ended = update.finish_reason or update.error
        if entry is None:
            # The request may have ended before its placement arrived.
            if not (has_ended or self._table.is_left_to_a_later_session(update.request_id, term.session)):
                self.disown(update.request_id, term, life.instance_id)
            return
        if term.session != entry.accepted.session:
            # The client has re-attached to this router, where the tokens come again under the later session.
            goes_on_elsewhere = isinstance(entry.state, lives.Decoding) and entry.state.decode != life
            if term.session < entry.accepted.session and goes_on_elsewhere and not has_ended:
                self.disown(update.request_id, term, life.instance_id)
            return
        try:
            if update.HasField("replica"):
                replica = replica_from_proto(update.replica)
                event = lives.ReplicaNamed(term.attempt, life, replica if replica.holder_id else None)
                entry.handle(event, now_s)
                entry.note_holder()
            if entry.direct is not None:
                entry.direct.note_read(term.attempt, update.read_here)
                entry.wake()
                if update.error and update.token_ids:
                    # The client may have them already: the next attempt continues after them.
                    entry.handle(
                        lives.TokensReceived(term.attempt, life, update.index, update.token_ids, update.logprobs),
                        now_s,
                    )
            entry.handle(_event_of(life, term.attempt, update), now_s)
            if update.moved:
                self._subscriptions[life.instance_id].let_go_s = now_s
            if update.moved and isinstance(entry.state, lives.Lost) and entry.state.decode == life:
                entry.note_loss(f"decode instance {life.instance_id} has moved it", life)
        except Exception:  # Isolate failures per request.
            get_logger().exception(
                "request_failed_unexpectedly",
                request_id=update.request_id,
                attempt=term.attempt,
                decode_instance_id=life.instance_id,
            )
            entry.stop(InternalError(f"the router could not take in the tokens of request {update.request_id!r}"))


def _event_of(
    life: lives.InstanceLife, attempt: int, update: decode_pb2.RequestTokens
) -> lives.TokensReceived | lives.GivenUp:
    finish = FINISH_FROM_PROTO[update.finish_reason]
    if finish is None and not update.error:
        return lives.TokensReceived(attempt, life, update.index, update.token_ids, update.logprobs)
    if update.replaced:
        return lives.GivenUp(attempt, life, RequestAlreadyExists(update.request_id))
    if update.moved:
        # A move is no failure: the request resumes without a pause.
        return lives.GivenUp(attempt, life, NoCapacity("decode", 0.0, update.error))
    if update.HasField("engine_fault"):
        return lives.GivenUp(attempt, life, fault_from_proto(update.engine_fault, update.error))
    if update.error or finish is FinishReason.CANCELLED:
        # Only this router cancels its requests, so the instance has given the request up.
        reason = update.error or "gave the request up"
        return lives.GivenUp(attempt, life, Unavailable(f"decode instance {life.instance_id}: {reason}"))
    timing = update.timing
    return lives.TokensReceived(
        attempt, life, update.index, update.token_ids, update.logprobs, finish, timing.queue_s, timing.decode_s
    )
