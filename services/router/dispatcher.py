"""Places requests on prefill instances, follows each attempt to its end, and places anew what was lost."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Coroutine

from grpc import aio

from kaveri.cluster.store import ClusterStore, RequestRecord
from kaveri.domain.view import ClusterView, InstanceState, InstanceStatus, Role
from kaveri.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    StaleAttempt,
    Unavailable,
)
from kaveri.policy.placement import PlacementPolicy, UnconfirmedWork, choose_prefill, missing_roles
from kaveri.policy.retry import RetryLimits, RetryState, Setback, after_setback
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import prefill_pb2
from kaveri.wire.attempts import MAX_ATTEMPT
from kaveri.wire.messages import params_to_proto
from kaveri.wire.status import error_of
from services.router import metrics
from services.router.attempt_numbers import AttemptNumbers
from services.router.channels import Channels
from services.router.placement_line import PlacementLine
from services.router.requests import Attempt, RequestEntry
from services.router.token_streams import TokenStreams

_LONGEST_WAIT_S = 1.0
"""Between two looks for an instance, when nothing wakes the request."""
_HOPELESS = (InvalidArgument, LayoutMismatch, ModelNotFound, DeadlineExceeded, RequestAlreadyExists)
"""Errors that would meet the request anywhere else as well."""
_CLAIM_WAIT_S = 5.0
"""Longest wait for a sign of life from the router that holds a request id: more than the lease of most clusters."""
_CLAIM_AGAIN_S = 0.1
_MAX_UNCLOSED = 65_536
_CLOSED_AT_ONCE = 100


class Dispatcher:
    """Runs the attempts of every request of one router."""

    def __init__(
        self,
        *,
        model: str,
        router_id: str,
        router_incarnation: int,
        stream_id: str,
        policy: PlacementPolicy,
        max_attempts: int,
        unavailable_after_s: float,
        store: ClusterStore,
        channels: Channels,
        streams: TokenStreams,
        rng: random.Random,
    ) -> None:
        """stream_id: the router_id of the prefill and decode protocols: unique over the router's lives, and secret."""
        self._model = model
        self._router_id = router_id
        self._router_incarnation = router_incarnation
        self._stream_id = stream_id
        self._policy = policy
        self._limits = RetryLimits(max_attempts, unavailable_after_s)
        self._store = store
        self._channels = channels
        self._streams = streams
        self._rng = rng
        self._turn = 0
        self._numbers = AttemptNumbers()
        self._unconfirmed: UnconfirmedWork[Attempt] = UnconfirmedWork()
        self._view_changed = asyncio.Event()
        self._line: PlacementLine[RequestEntry] = PlacementLine()
        self._members: frozenset[tuple[str, int, InstanceState]] = frozenset()
        self._errands: set[asyncio.Task[None]] = set()
        self._closing: dict[str, asyncio.Task[None]] = {}
        # Claims of ended requests that the store could not be asked to close; at most one for each id.
        self._unclosed: dict[str, None] = {}

    def update(self, view: ClusterView) -> None:
        """Wakes requests that wait for an instance; closes claims that were left open while the store was away."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        members = frozenset(
            (instance_id, status.record.incarnation, status.load.state)
            for instance_id, status in view.instances.items()
        )
        if view.store_connected:
            for request_id in tuple(itertools.islice(self._unclosed, _CLOSED_AT_ONCE)):
                del self._unclosed[request_id]
                self.close_request(request_id)
        if members != self._members:
            self._members = members
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
            missing = missing_roles(view, self._model)
            if not missing:
                return view
            try:
                async with asyncio.timeout(until_s - time.monotonic()):
                    await self._view_changed.wait()
            except TimeoutError as error:
                raise Unavailable(f"no {missing[0]} instance serves {self._model!r}", retry_after_s=1.0) from error

    async def run(self, entry: RequestEntry) -> None:
        """Follows a request until it has ended; what goes wrong ends the entry with an error.

        When cancelled, the prefill stream and the decode instance are told at once, by errands that outlive the call.
        """
        try:
            await self._serve(entry)
        except KaveriError as error:
            entry.fail(error)
        except Exception:
            get_logger().exception(
                "request_failed_unexpectedly",
                request_id=entry.request_id,
                attempt=entry.attempt.number if entry.attempt is not None else 0,
            )
            entry.fail(InternalError(f"the router failed while it served request {entry.request_id!r}"))

    async def claim_request(self, request_id: str, ttl_s: float) -> None:
        """Enters a request into the store's table. Raises RequestAlreadyExists when a router that lives holds it.

        A router that died holds its requests until its lease ends: so the holder has to show one more heartbeat, for
        which this waits.
        """
        closing = self._closing.get(request_id)
        if closing is not None:
            # The caller uses an id again before the store has heard that its former request ended.
            await asyncio.wait({closing})
        claim = RequestRecord(request_id, self._router_id, self._router_incarnation, phase="prefill", attempt=1)
        asked_s = time.monotonic()
        self._unclosed.pop(request_id, None)
        while (holder := await self._store.claim_request(claim, ttl_s)) is not None:
            if holder.is_of(self._router_id, self._router_incarnation):
                # Left behind: a request of this router that is in flight is in its own table.
                await self._store.close_request(request_id, self._router_id, self._router_incarnation)
                continue
            if self._was_heard(holder, asked_s) or time.monotonic() > asked_s + _CLAIM_WAIT_S:
                raise RequestAlreadyExists(request_id)
            changed = self._view_changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLAIM_AGAIN_S):
                    await changed.wait()

    def _was_heard(self, holder: RequestRecord, since_s: float) -> bool:
        """Whether the holder's router has sent a heartbeat since then."""
        status = self._store.view().instances.get(holder.router_id)
        if status is None or status.record.incarnation != holder.router_incarnation:
            return False
        return time.monotonic() - status.heartbeat_age_s >= since_s

    def close_request(self, request_id: str) -> None:
        """Takes an ended request out of the store's table, without making anyone wait."""
        errand = self._start_errand(self._close_claim(request_id))
        self._closing[request_id] = errand
        errand.add_done_callback(lambda _: self._closing.pop(request_id, None))

    async def _close_claim(self, request_id: str) -> None:
        if not await self._store.close_request(request_id, self._router_id, self._router_incarnation):
            self._unclosed[request_id] = None
            if len(self._unclosed) > _MAX_UNCLOSED:
                # It ends with the request's deadline.
                del self._unclosed[next(iter(self._unclosed))]

    async def close(self) -> None:
        """Waits for errands, each of which has a time limit of its own."""
        if self._errands:
            await asyncio.wait(self._errands)

    def check_integrity(self) -> None:
        """Asserts, while no request is in flight, that nothing of ended ones is left."""
        assert not self._errands, self._errands
        assert not len(self._unconfirmed), len(self._unconfirmed)
        assert not len(self._line), len(self._line)

    async def _serve(self, entry: RequestEntry) -> None:
        number = self._numbers.last(entry.request_id)
        state = RetryState()
        while True:
            if len(entry.token_ids) >= self._most_tokens(entry):
                entry.finish_with_length()
                return
            await asyncio.sleep(state.pause_until_s - time.monotonic())
            target = await self._choose(entry, state)
            number += 1
            attempt = entry.begin_attempt(number, target.record.instance_id, target.record.incarnation)
            self._numbers.note(entry.request_id, number, time.monotonic())
            metrics.ATTEMPTS.inc()
            await self._follow(entry, attempt, target)
            if entry.finish is not None or entry.error is not None:
                return
            state = self._after_loss(entry, attempt, target, state)
            if isinstance(attempt.lost, StaleAttempt):
                number = max(number, attempt.lost.newest_attempt)
                if number >= MAX_ATTEMPT:
                    raise attempt.lost

    def _after_loss(
        self, entry: RequestEntry, attempt: Attempt, target: InstanceStatus, state: RetryState
    ) -> RetryState:
        """What holds for the next attempt. Raises the error that has ended this one when there is to be none."""
        lost = attempt.lost
        assert lost is not None
        setback = _setback(attempt)
        if setback is Setback.LOST:
            metrics.LOST_ATTEMPTS.inc()
            get_logger().warning(
                "attempt_lost",
                request_id=entry.request_id,
                attempt=attempt.number,
                prefill_instance_id=attempt.prefill_instance_id,
                decode_instance_id=attempt.decode_instance_id,
                generated_tokens=len(entry.token_ids),
                error=str(lost),
            )
        else:
            entry.timing.attempts -= 1
            self._note_delay(entry, str(lost))
        if isinstance(lost, _HOPELESS):
            raise lost
        prefill_did_its_part = attempt.handed_over and attempt.decode_instance_id != attempt.prefill_instance_id
        after = after_setback(
            state,
            self._limits,
            setback,
            None if prefill_did_its_part else target.record,
            time.monotonic(),
            self._rng.random(),
            lost.retry_after_s if isinstance(lost, NoCapacity) else 0.0,
        )
        if after is None:
            raise lost
        return after

    def _note_delay(self, entry: RequestEntry, reason: str) -> None:
        """Logs why a request is not placed at once: one line a request, whatever else delays it."""
        if not entry.delay_noted:
            entry.delay_noted = True
            get_logger().info("placement_delayed", request_id=entry.request_id, attempt=0, reason=reason)

    def _most_tokens(self, entry: RequestEntry) -> int:
        accepted = entry.accepted
        assert accepted.params.max_tokens is not None
        return min(accepted.params.max_tokens, accepted.max_model_len - len(accepted.prompt_token_ids))

    async def _choose(self, entry: RequestEntry, state: RetryState) -> InstanceStatus:
        """Waits until an instance takes the request: until a rest ends, room appears or the view changes.

        Nothing may be awaited before the choice is entered as unconfirmed work, so that no two count on one place.
        """
        try:
            while True:
                view = await self.wait_for_instances(entry.accepted.deadline_s)
                now_s = time.monotonic()
                resting = state.resting(view, now_s)
                if not self._line.must_join(entry):
                    self._turn += 1
                    target = choose_prefill(
                        view,
                        self._model,
                        self._unconfirmed,
                        self._policy,
                        self._rng,
                        turn=self._turn,
                        avoid=state.failed(view),
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

    async def _follow(self, entry: RequestEntry, attempt: Attempt, target: InstanceStatus) -> None:
        """Runs one attempt until it is over. It leaves nothing behind, whichever way it ends."""
        try:
            await self._prefill(entry, attempt, target)
            await attempt.over
        finally:
            attempt.over.cancel()
            # What a prefill instance had reserved when it died, and where, is known to nobody.
            untold = not attempt.decode_instance_id and isinstance(attempt.lost, Unavailable) and not attempt.unsent
            if untold or (attempt.decode_instance_id and not attempt.decode_done):
                self._start_errand(self._streams.abort(attempt))

    async def _prefill(self, entry: RequestEntry, attempt: Attempt, target: InstanceStatus) -> None:
        """Sends the request to prefill and takes in what it reports; loses the attempt if that ends too soon."""
        accepted = entry.accepted
        request = prefill_pb2.PrefillRequest(
            request_id=entry.request_id,
            attempt=attempt.number,
            router_id=self._stream_id,
            token_ids=(*accepted.prompt_token_ids, *entry.token_ids),
            generated_count=attempt.first_index,
            params=params_to_proto(accepted.params),
        )
        self._unconfirmed.add(attempt, target, len(request.token_ids))
        if target.record.role is Role.COLOCATED:
            # It will decode the request too: known from here on, an abort or a broken stream misses no moment.
            self._streams.place(attempt, target.record.instance_id, target.record.incarnation)
        now_s = time.monotonic()
        if entry.timing.attempts == 1:
            entry.timing.router_s = now_s - accepted.arrived_s
        call = self._channels.prefill(target.record.address).Prefill(request, timeout=accepted.deadline_s - now_s)

        def stop_reading(_: object) -> None:
            call.cancel()

        attempt.over.add_done_callback(stop_reading)
        try:
            async for event in call:
                self._take(entry, attempt, event)
            if not attempt.handed_over:
                attempt.lose(Unavailable(f"prefill instance {attempt.prefill_instance_id} ended without hand-over"))
        except aio.AioRpcError as rpc_error:
            # Prefill's death is no loss once decode needs nothing of it: neither its token nor the name of the place.
            if not attempt.is_decodes_alone:
                error = error_of(rpc_error)
                # gRPC's own words for a channel that has no connection: nothing has left this process.
                attempt.unsent = "failed to connect to all addresses" in (rpc_error.details() or "")
                known = not isinstance(error, RequestCancelled)
                attempt.lose(error if known else Unavailable(f"prefill instance gave the request up: {error}"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the attempt is over, or the channel was closed.
            if not attempt.is_decodes_alone:
                attempt.lose(Unavailable(f"prefill instance {attempt.prefill_instance_id} has left the cluster"))
        finally:
            call.cancel()
            self._settle(attempt)
            entry.prefill_closed(attempt)

    def _settle(self, attempt: Attempt) -> None:
        self._unconfirmed.settle(attempt, attempt.prefill_instance_id)
        self._line.wake_first()

    def _take(self, entry: RequestEntry, attempt: Attempt, event: prefill_pb2.PrefillResponse) -> None:
        timing = entry.timing
        match event.WhichOneof("event"):
            case "started":
                self._settle(attempt)
                timing.prefill_queue_s = event.started.queue_s
            case "placed":
                timing.decode_instance_id = event.placed.decode_instance_id
                placed = event.placed
                self._streams.place(attempt, placed.decode_instance_id, placed.decode_incarnation, placed.stream_losses)
                self._start_errand(self._store.update_request(self._record(attempt, phase="decode")))
            case "first_token":
                timing.prefill_s = event.first_token.prefill_s
                entry.take_first_token(attempt, event.first_token)
            case "handed_over":
                attempt.handed_over = True
                timing.kv_bytes = event.handed_over.kv_bytes
                timing.kv_transfer_s = event.handed_over.kv_transfer_s
                timing.kv_tail_s = event.handed_over.kv_tail_s
                timing.kv_transport = event.handed_over.kv_transport

    def _record(self, attempt: Attempt, phase: str) -> RequestRecord:
        return RequestRecord(
            request_id=attempt.request_id,
            router_id=self._router_id,
            router_incarnation=self._router_incarnation,
            phase=phase,
            attempt=attempt.number,
            prefill_instance_id=attempt.prefill_instance_id,
            decode_instance_id=attempt.decode_instance_id,
            prefill_incarnation=attempt.prefill_incarnation,
            decode_incarnation=attempt.decode_incarnation,
        )

    def _start_errand(self, errand: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._end_errand)
        return task

    def _end_errand(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("errand_failed", exc_info=task.exception())


def _setback(attempt: Attempt) -> Setback:
    if isinstance(attempt.lost, NoCapacity):
        return Setback.FULL
    return Setback.UNREACHED if attempt.unsent else Setback.LOST
