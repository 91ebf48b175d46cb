"""Places requests on decode instances: reserves room, has the engine push to the ticket, tries elsewhere if that fails.

Room first, bytes after: without room anywhere a request's KV stays in this instance's pool, which is the queue (the
burst control of DistServe, arXiv 2401.09670, section 4.3, with a push instead of a pull).

Requests without room stand in line here. The first of them waits at one decode instance, which it asks again and again:
there it cannot be overtaken without a bound (kaveri.policy.room_line). The others take room where they see it.
"""

import asyncio
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ClusterView, InstanceStatus, Role
from kaveri.engine.contract import EngineKey, KvPushFailed, PrefillEngine
from kaveri.errors import (
    EngineError,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    NoCapacity,
    StaleAttempt,
    Unavailable,
)
from kaveri.policy.placement import (
    DEFAULT_THRESHOLDS,
    DecodePlacementPolicy,
    HeavyThresholds,
    UnconfirmedWork,
    blocks_there,
    choose_decode,
    choose_line,
    largest_prompt,
)
from kaveri.telemetry.logs import get_logger
from services.prefill.decode_peers import DecodePeers, Reservation
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import Failed, Placed, PrefillRequest

_REST_WHEN_FULL_S = 0.02
"""An instance that refused for want of room is not asked again for this long, unless there is no other to ask."""
_REST_WHEN_FAILED_S = 0.5
_ASK_AGAIN_S = 0.1
"""The first in line asks this often. Decode instances keep its place for longer."""
_LONGEST_WAIT_S = 0.25
"""Between two looks at a view that does not change."""
_VIEW_TIMEOUT_S = 1.0
_NO_INSTANCE_S = 2.0
"""A request fails when there was no decode instance at all for this long; its router may know of others."""


@dataclass(eq=False, slots=True)
class _Placement:
    task: asyncio.Task[None]
    target: InstanceStatus | None = None
    """Where room was asked for and may have been granted."""
    waits_at: InstanceStatus | None = None
    """Where it has a place in line. Only the first in line here has one."""
    ask_at_s: float = 0.0
    """When it asks there again."""
    push_failure: asyncio.Future[KvPushFailed] | None = None

    def waits_there(self, instance_id: str) -> bool:
        """Whether its place in line is at that instance."""
        return self.waits_at is not None and self.waits_at.record.instance_id == instance_id

    def forget_place(self, instance_id: str) -> None:
        """That instance knows that it does not wait there any more."""
        if self.waits_there(instance_id):
            self.waits_at = None


class Dispatcher:
    """Placements of the requests of one prefill instance. For one event loop."""

    at_first_token = False

    def __init__(
        self,
        engine: PrefillEngine,
        store: ClusterStore,
        model: str,
        metrics: PrefillMetrics,
        rng: random.Random,
        policy: DecodePlacementPolicy = DecodePlacementPolicy.POWER_OF_TWO,
        thresholds: HeavyThresholds = DEFAULT_THRESHOLDS,
    ) -> None:
        self._engine = engine
        self._layout = engine.info.layout
        self._store = store
        self._model = model
        self._metrics = metrics
        self._rng = rng
        self._policy = policy
        self._thresholds = thresholds
        self._turn = 0
        self._peers = DecodePeers(self._layout)
        self._placements: dict[PrefillRequest, _Placement] = {}
        # Those that found no room, in that order.
        self._line: dict[PrefillRequest, None] = {}
        self._unconfirmed_blocks: UnconfirmedWork[EngineKey] = UnconfirmedWork()
        self._unconfirmed_heavy: UnconfirmedWork[EngineKey] = UnconfirmedWork()
        self._resting_until_s: dict[str, float] = {}
        self._waiters: dict[PrefillRequest, asyncio.Future[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Follows the view until cancelled; placements live no longer than this."""
        try:
            async with self._tasks:
                while True:
                    view = await self._store.wait_for_change(_VIEW_TIMEOUT_S)
                    self._wake_all()
                    await self._peers.retain({status.record.address for status in view.instances.values()})
        finally:
            await self._peers.close()

    def begin(self, request: PrefillRequest) -> None:
        """Looks for a place, unless it did already."""
        if request not in self._placements:
            self._placements[request] = _Placement(self._tasks.create_task(self._place_or_fail(request)))

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """The engine's push ended without acceptance."""
        placement = self._placements.get(request)
        if placement is not None and placement.push_failure is not None and not placement.push_failure.done():
            placement.push_failure.set_result(event)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """Stops looking. Unless the request was handed over, the room that it has or may have is given back."""
        placement = self._placements.pop(request, None)
        if placement is None:
            return
        placement.task.cancel()
        self._line.pop(request, None)
        if placement.target is not None and not handed_over:
            self._give_back(request, placement)
        self._stop_waiting(request, placement)

    async def _place_or_fail(self, request: PrefillRequest) -> None:
        try:
            await self._place(request)
        except EngineError as error:
            request.report(request, Failed(Unavailable(str(error))))
        except KaveriError as error:
            request.report(request, Failed(error))
        except Exception as error:  # One request's bad luck must not end the others'.
            get_logger().exception("placement failed", request_id=request.request_id, attempt=request.attempt)
            request.report(request, Failed(Unavailable(f"placement failed: {error!r}")))

    async def _place(self, request: PrefillRequest) -> NoReturn:
        """Goes on until end() cancels it: only the engine says that the KV has arrived."""
        placement = self._placements[request]
        loop = asyncio.get_running_loop()
        unfit: dict[str, KaveriError] = {}
        while True:
            target = await self._find_room(request, unfit)
            instance_id = target.record.instance_id
            try:
                reservation = await self._reserve(request, placement, target)
            except StaleAttempt:
                raise
            except (InvalidArgument, LayoutMismatch) as error:
                unfit[instance_id] = error
                placement.target = None
                placement.forget_place(instance_id)
                continue
            except NoCapacity as error:
                placement.target = None
                await self._refused(request, placement, target, error)
                continue
            except KaveriError as error:
                # It may have reserved all the same.
                self._give_back(request, placement)
                self._failed_there(request, instance_id, "unavailable", str(error))
                continue
            self._line.pop(request, None)
            placement.forget_place(instance_id)
            self._stop_waiting(request, placement)
            placement.push_failure = loop.create_future()
            try:
                self._engine.push_to(request.key, reservation.ticket)
            except (LayoutMismatch, InvalidArgument) as error:
                unfit[instance_id] = error
                self._give_back(request, placement)
                continue
            request.report(request, Placed(instance_id, reservation.incarnation, reservation.stream_losses))
            failure = await placement.push_failure
            self._give_back(request, placement)
            self._failed_there(request, instance_id, "push_failed", failure.reason)

    async def _find_room(self, request: PrefillRequest, unfit: dict[str, KaveriError]) -> InstanceStatus:
        needed_tokens = request.token_count + 1
        heavy = self._thresholds.is_heavy(request.predicted_length, request.prompt_tokens)
        seen_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            view = self._store.view()
            self._resting_until_s = {
                instance_id: until_s for instance_id, until_s in self._resting_until_s.items() if until_s > now_s
            }
            avoid = {*unfit, *self._resting_until_s}
            target = choose_decode(
                view,
                self._model,
                needed_tokens,
                self._unconfirmed_blocks,
                self._rng,
                self._layout,
                avoid,
                policy=self._policy,
                predicted_tokens=_predicted_tokens(request),
                unconfirmed_heavy=self._unconfirmed_heavy,
                heavy=heavy,
                turn=self._turn,
            )
            if target is None or target.record.instance_id in avoid:
                target = self._line_to_ask(request, view, unfit, now_s)
            if target is not None:
                # From here on, without a wait in between, so that no two requests count on the same room.
                self._unconfirmed_blocks.add(request.key, target, blocks_there(target, needed_tokens))
                self._unconfirmed_heavy.add(request.key, target, int(heavy))
                self._turn += 1
                return target
            candidates = self._candidates(view)
            if candidates and candidates.issubset(unfit):
                raise unfit[min(candidates)]
            largest = largest_prompt(view, self._model, (Role.DECODE,), self._layout)
            if largest is not None and request.token_count > largest:
                limit = f"at most {largest} tokens: no decode instance holds more"
                raise InvalidArgument("token_ids", f"{request.token_count} tokens", limit)
            if candidates:
                seen_s = now_s
            elif now_s - seen_s > _NO_INSTANCE_S:
                raise Unavailable(self._why_none(view), retry_after_s=1.0)
            wake_s = min(self._resting_until_s.values(), default=now_s + _LONGEST_WAIT_S)
            if self._is_first(request):
                wake_s = min(wake_s, self._placements[request].ask_at_s)
            await self._wait_for_change(request, min(wake_s - now_s, _LONGEST_WAIT_S))

    def _line_to_ask(
        self, request: PrefillRequest, view: ClusterView, unfit: Collection[str], now_s: float
    ) -> InstanceStatus | None:
        """Where the request asks for room although it sees none there: if it is the first in line, and it is time."""
        self._line.setdefault(request)
        placement = self._placements[request]
        if not self._is_first(request) or now_s < placement.ask_at_s:
            return None
        placement.ask_at_s = now_s + _ASK_AGAIN_S
        waits_at = placement.waits_at
        if waits_at is not None:
            instance_id = waits_at.record.instance_id
            if any(status.record.instance_id == instance_id for status in view.ready(Role.DECODE, self._model)):
                return view.instances[instance_id]
            self._stop_waiting(request, placement)
        avoid = {*unfit, *self._resting_until_s}
        return choose_line(view, self._model, request.token_count + 1, self._unconfirmed_blocks, self._layout, avoid)

    async def _refused(
        self, request: PrefillRequest, placement: _Placement, target: InstanceStatus, error: NoCapacity
    ) -> None:
        """`target` has no room, and has given the request a place in line there."""
        instance_id = target.record.instance_id
        self._rest(instance_id, min(error.retry_after_s, _REST_WHEN_FULL_S))
        if placement.waits_there(instance_id):
            return
        self._metrics.placements.labels("no_room").inc()
        self._line.setdefault(request)
        if placement.waits_at is None and self._is_first(request):
            placement.waits_at = target
            placement.ask_at_s = time.monotonic() + _ASK_AGAIN_S
        else:
            # It does not ask there again and again, so nothing may be kept for it. Waited for, so that it does not
            # overtake the next question.
            await asyncio.shield(self._tasks.create_task(self._peers.abort(target, request)))

    def _stop_waiting(self, request: PrefillRequest, placement: _Placement) -> None:
        if placement.waits_at is not None:
            # As _give_back().
            self._tasks.create_task(self._peers.abort(placement.waits_at, request))
            placement.waits_at = None

    def _is_first(self, request: PrefillRequest) -> bool:
        return next(iter(self._line), None) is request

    def _settle(self, request: PrefillRequest, instance_id: str) -> None:
        self._unconfirmed_blocks.settle(request.key, instance_id)
        self._unconfirmed_heavy.settle(request.key, instance_id)

    def _candidates(self, view: ClusterView) -> set[str]:
        return {
            status.record.instance_id
            for status in view.ready(Role.DECODE, self._model)
            if self._layout.is_mappable(status.record.layout)
        }

    def _why_none(self, view: ClusterView) -> str:
        for status in view.ready(Role.DECODE, self._model):
            try:
                if status.record.layout is not None:
                    self._layout.require_mappable(status.record.layout)
            except LayoutMismatch as error:
                return f"there is no decode instance that takes this one's KV: {status.record.instance_id}: {error}"
        return "there is no decode instance"

    async def _reserve(self, request: PrefillRequest, placement: _Placement, target: InstanceStatus) -> Reservation:
        placement.target = target
        timeout_s = request.deadline_s - time.monotonic()
        reserved = False
        try:
            reservation = await self._peers.reserve(target, request, timeout_s)
            reserved = True
            self._metrics.placements.labels("reserved").inc()
            return reservation
        finally:
            if not reserved:
                self._settle(request, target.record.instance_id)

    def _give_back(self, request: PrefillRequest, placement: _Placement) -> None:
        assert placement.target is not None
        self._settle(request, placement.target.record.instance_id)
        placement.forget_place(placement.target.record.instance_id)
        # Not part of the placement's own task: it must be sent although that one is cancelled.
        self._tasks.create_task(self._peers.abort(placement.target, request))
        placement.target = None

    def _failed_there(self, request: PrefillRequest, instance_id: str, outcome: str, reason: str) -> None:
        self._metrics.placements.labels(outcome).inc()
        self._rest(instance_id, _REST_WHEN_FAILED_S)
        get_logger().warning(
            "placement failed, trying again",
            request_id=request.request_id,
            attempt=request.attempt,
            decode_instance_id=instance_id,
            outcome=outcome,
            reason=reason,
        )

    def _rest(self, instance_id: str, rest_s: float) -> None:
        self._resting_until_s[instance_id] = time.monotonic() + rest_s

    async def _wait_for_change(self, request: PrefillRequest, timeout_s: float) -> None:
        waiter = self._waiters[request] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._waiters.pop(request, None)

    def _wake_all(self) -> None:
        # In the order of the line: who has waited longest chooses first.
        for request in self._line:
            waiter = self._waiters.get(request)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


def _predicted_tokens(request: PrefillRequest) -> int:
    """Tokens that the request is predicted to end with, at the least."""
    return 0 if request.predicted_length is None else request.prompt_tokens + request.predicted_length.low
