"""Places requests on decode instances: reserves room, pushes to the ticket, tries elsewhere if that fails.

Without room anywhere a request's KV stays in this instance's pool, which is the queue (the burst control of DistServe,
arXiv 2401.09670, section 4.3, with a push instead of a pull). The request waits in line at a decode instance
(kaveri.policy.decode_room), and takes room at another one that has some.
"""

import asyncio
import random
from dataclasses import dataclass

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ViewedInstance
from kaveri.engine.contract import EngineKey, KvPushFailed, PrefillEngine
from kaveri.errors import EngineError, InvalidArgument, KaveriError, LayoutMismatch, Unavailable
from kaveri.policy.placement import DEFAULT_THRESHOLDS, AnyDecodePlacement, DecodePlacementPolicy, HeavyThresholds
from kaveri.policy.room_search import RoomSearch
from kaveri.telemetry.logs import get_logger
from services.prefill.metrics import PrefillMetrics
from services.prefill.requests import HandOverFailed, PrefillRequest, RoomReserved
from services.prefill.room_finder import RoomFinder, RoomSeeker


@dataclass(eq=False, slots=True)
class _Placement:
    seeking: RoomSeeker
    task: asyncio.Task[None]
    target: ViewedInstance | None = None
    """The instance with its room."""
    push_failure: asyncio.Future[KvPushFailed] | None = None


class DecodePlacer:
    """Placements of the requests of one prefill instance. For one event loop."""

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
    ) -> None:
        """own_id: this instance, which is no target of pushes."""
        self._engine = engine
        layout = engine.info.layout
        search: RoomSearch[EngineKey] = RoomSearch(model, layout, policy, rng)
        self._finder = RoomFinder(store, search, layout, own_id, metrics)
        self._thresholds = thresholds
        self._unfit: dict[str, KaveriError] = {}
        if own_id:
            self._unfit[own_id] = Unavailable("no other decode instance takes the request", retry_after_s=1.0)
        self._placements: dict[PrefillRequest, _Placement] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Work until cancelled; placements live no longer than this."""
        async with self._tasks:
            await self._finder.run()

    def begin(self, request: PrefillRequest) -> None:
        """Search for a place. Idempotent."""
        if request not in self._placements:
            is_heavy = self._thresholds.is_heavy(request.predicted_length, request.engine_request.prompt_tokens)
            seeking = RoomSeeker(request, is_heavy, dict(self._unfit))
            task = self._tasks.create_task(self._place(request))
            self._placements[request] = _Placement(seeking, task)

    def push_failed(self, request: PrefillRequest, event: KvPushFailed) -> None:
        """Search for another place after a failed push."""
        placement = self._placements.get(request)
        if placement is not None and placement.push_failure is not None and not placement.push_failure.done():
            placement.push_failure.set_result(event)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        """End the placement. Unless the request was handed over, its room is given back."""
        placement = self._placements.pop(request, None)
        if placement is None:
            return
        placement.task.cancel()
        self._finder.give_up(placement.seeking)
        if placement.target is not None and not handed_over:
            self._give_back(request, placement)

    async def _place(self, request: PrefillRequest) -> None:
        """Place the request until end() cancels this: the engine reports the acceptance to the life."""
        placement = self._placements[request]
        try:
            while True:
                room = await self._finder.find(placement.seeking)
                placement.target = room.target
                instance_id = room.target.record.instance_id
                placement.push_failure = asyncio.get_running_loop().create_future()
                try:
                    self._engine.push_to(request.key, room.ticket)
                except (LayoutMismatch, InvalidArgument) as error:
                    placement.seeking.unfit[instance_id] = error
                    self._give_back(request, placement)
                    continue
                request.report(request, RoomReserved(instance_id, room.incarnation))
                failure = await placement.push_failure
                self._give_back(request, placement)
                self._finder.failed_there(request, room.target, "push_failed", failure.reason)
        except EngineError as error:
            request.report(request, HandOverFailed(Unavailable(str(error))))
        except KaveriError as error:
            request.report(request, HandOverFailed(error))
        except Exception as error:  # Isolate failures per request.
            get_logger().exception(
                "placement_failed_unexpectedly", request_id=request.request_id, attempt=request.owner.attempt
            )
            request.report(request, HandOverFailed(Unavailable(f"placement failed: {error!r}")))

    def _give_back(self, request: PrefillRequest, placement: _Placement) -> None:
        assert placement.target is not None
        self._finder.give_back(request, placement.target)
        placement.target = None
