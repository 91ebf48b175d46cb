"""Hands prefilled requests over to decode: reserves room at an instance and pushes the KV there, or tries elsewhere if
that fails. While its own instance decodes, its own engine adopts them instead. Without room anywhere, a request's KV
stays in this instance's pool (burst control of DistServe, arXiv 2401.09670, section 4.3, with a push instead of a pull)
and the request waits in line at a decode instance (kaveri.policy.decode_room)."""

import asyncio
import random
from collections.abc import Callable
from typing import Protocol

from kaveri.cluster.store import ClusterStore
from kaveri.engine.contract import EngineKey, KvPushFailed, PrefillEngine
from kaveri.errors import EngineError, InvalidArgument, KaveriError, LayoutMismatch, Unavailable
from kaveri.lives.prompt import Adopted, HandOverFailed, HandOverReport, RoomReserved
from kaveri.policy.placement import DEFAULT_THRESHOLDS, AnyDecodePlacement, DecodePlacementPolicy, HeavyThresholds
from kaveri.policy.room_search import RoomSearch
from kaveri.telemetry.logs import get_logger
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import PrefillRequest
from services.prefill.room_finder import Placement, Room, RoomFinder

_AFTER_FIRST_TOKEN_S = 0.002
"""Delay of the adoption on engines that run ahead; about the time until a first token reaches its client."""


class PromptKeeper(Protocol):
    """Keeps the KV of prompts on this instance after it was pushed, so that requests can be resumed from it."""

    def keep(self, request: PrefillRequest, room: Room) -> None:
        """Keep the prompt's KV once its push to `room` is accepted. Raises EngineError."""

    def forget(self, request: PrefillRequest) -> None:
        """Undo keep(): the prompt is not handed over."""


class DecodePlacer:
    """Moves one prefill instance's requests to decode instances. Implements HandOver. Not thread-safe."""

    report: Callable[[PrefillRequest, HandOverReport], None]

    def __init__(
        self,
        engine: PrefillEngine,
        store: ClusterStore,
        model: str,
        metrics: PrefillMetrics,
        rng: random.Random,
        policy: AnyDecodePlacement = DecodePlacementPolicy.POWER_OF_TWO,
        thresholds: HeavyThresholds = DEFAULT_THRESHOLDS,
        own_id: str = "",
        decodes_here: Callable[[], bool] = lambda: False,
        adopt: Callable[[PrefillRequest], Adopted] | None = None,
    ) -> None:
        """policy: chooses decode instances. thresholds: lengths above which it counts a request as heavy. own_id: this
        instance, which gets no pushes. decodes_here: returns True while it decodes as well. adopt: called then with a
        request whose first token is sampled, to decode it on its own engine; raises KaveriErrors."""
        self._engine = engine
        layout = engine.info.layout
        search: RoomSearch[EngineKey] = RoomSearch(model, layout, policy, rng)
        self.finder = RoomFinder(store, search, layout, own_id, metrics)
        self._thresholds = thresholds
        self._own_id = own_id
        self.at_first_token = decodes_here
        self._adopt_here = adopt
        self.keeps: PromptKeeper | None = None
        """None: the KV of prompts is freed once it is pushed."""
        self._placements: dict[PrefillRequest, Placement] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve hand-overs until cancelled, which ends them."""
        async with self._tasks:
            await self.finder.run()

    def begin(self, request: PrefillRequest) -> None:
        """Search for a decode instance for the request, or adopt it on its own engine. Idempotent."""
        if request in self._placements:
            return
        # A request that came while the instance did not decode is pushed: its first token may not be drawn yet.
        if request.engine_request.stays and self.at_first_token():
            # After the event loop's present iteration, so that the first token is sent before.
            delay_s = _AFTER_FIRST_TOKEN_S if self._engine.info.runs_ahead else 0.0
            handle = asyncio.get_running_loop().call_later(delay_s, self._adopt, request)
            self._placements[request] = Placement(request, work=handle)
            return
        is_heavy = self._thresholds.is_heavy(request.predicted_length, request.engine_request.prompt_tokens)
        placement = self._placements[request] = Placement(request, is_heavy)
        if self._own_id:
            own = Unavailable("no other decode instance takes the request", retry_after_s=1.0)
            placement.unfit[self._own_id] = own
        placement.work = self._tasks.create_task(self._place(placement))

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Search for another decode instance after a failed push of the request's KV."""
        placement = self._placements.get(request)
        if placement is not None and placement.push_failure is not None and not placement.push_failure.done():
            placement.push_failure.set_result(event)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """End the hand-over of a request. Room reserved at a decode instance is given back unless `handed_over`."""
        placement = self._placements.pop(request, None)
        if placement is None:
            return
        assert placement.work is not None
        placement.work.cancel()
        self.finder.give_up(placement)
        if self.keeps is not None and not handed_over:
            self.keeps.forget(request)
        if placement.target is not None and not handed_over:
            self._give_back(placement)

    def _adopt(self, request: PrefillRequest) -> None:
        assert self._adopt_here is not None
        try:
            report: HandOverReport = self._adopt_here(request)
        except KaveriError as error:
            report = HandOverFailed(error)
        self.report(request, report)

    async def _place(self, placement: Placement) -> None:
        """Search and push until end() cancels this, which it does once decode has accepted the KV."""
        request = placement.request
        try:
            while True:
                room = await self.finder.find(placement)
                placement.target = room.target
                instance_id = room.target.record.instance_id
                placement.push_failure = asyncio.get_running_loop().create_future()
                try:
                    if self.keeps is not None:
                        self.keeps.keep(request, room)
                    self._engine.push_to(request.engine_request.key, room.ticket)
                except (LayoutMismatch, InvalidArgument) as error:
                    placement.unfit[instance_id] = error
                    self._give_back(placement)
                    continue
                self.report(request, RoomReserved(instance_id, room.incarnation))
                failure = await placement.push_failure
                self._give_back(placement)
                self.finder.failed_there(request, room.target, "push_failed", failure.reason)
        except EngineError as error:
            self.report(request, HandOverFailed(Unavailable(str(error))))
        except KaveriError as error:
            self.report(request, HandOverFailed(error))
        except Exception as error:  # Isolate failures per request.
            attempt = request.ownership.term.attempt
            get_logger().exception("placement_failed_unexpectedly", request_id=request.request_id, attempt=attempt)
            self.report(request, HandOverFailed(Unavailable(f"placement failed: {error!r}")))

    def _give_back(self, placement: Placement) -> None:
        assert placement.target is not None
        self.finder.give_back(placement.request, placement.target)
        placement.target = None
