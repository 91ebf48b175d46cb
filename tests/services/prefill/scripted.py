"""Scripted surroundings of a prefill instance: engine, hand-over, and decode instances over gRPC."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from kaveri.cluster.memory_store import MemoryStore
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, Phase, Role
from kaveri.engine.contract import EngineEvent, EngineInfo, EngineKey, EngineRequest, EngineStats
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import Ticket
from kaveri.lives.prompt import HandOverReport
from kaveri.policy.prediction import PredictionMode
from kaveri.v1 import decode_pb2, decode_pb2_grpc, feed_pb2, feed_pb2_grpc
from kaveri.wire.messages import ticket_to_proto
from kaveri.wire.status import abort
from services.prefill.forecaster import LengthForecaster
from services.prefill.metrics import PrefillMetrics
from services.prefill.predictors import Predictors
from services.prefill.requests import PrefillRequest
from tests.support.scripted_ports import add_port

LAYOUT = KvLayout("fingerprint", 2, 16, 2, 8, "float32")
MODEL = "tiny"


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not come true in time"
        await asyncio.sleep(0.002)


class ScriptedEngine:
    """PrefillEngine that records its calls. One block holds 16 tokens."""

    def __init__(self, total_blocks: int = 64, max_model_len: int = 1000, runs_ahead: bool = False) -> None:
        eos, endpoints = frozenset[int](), ()
        self.info = EngineInfo(
            "fake", LAYOUT, total_blocks, max_model_len, 1000, eos, 1, endpoints, runs_ahead=runs_ahead
        )
        self.free_blocks = total_blocks
        self.asked_count = 0
        self.submitted: list[EngineKey] = []
        self.aborted: list[EngineKey] = []
        self.pushes: list[tuple[EngineKey, Ticket]] = []
        self.refuses_push: list[KaveriError] = []
        self.most_tokens = 10_000
        self.broken: KaveriError | None = None

    def prefill(self, request: EngineRequest) -> None:
        self.asked_count += 1
        if self.broken is not None:
            raise self.broken
        if len(request.token_ids) > self.most_tokens:
            raise InvalidArgument("token_ids", len(request.token_ids), "shorter")
        needed = LAYOUT.block_count(len(request.token_ids))
        if needed > self.free_blocks:
            raise NoCapacity("kv pool", 0.1)
        self.free_blocks -= needed
        self.submitted.append(request.key)

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        if self.refuses_push:
            raise self.refuses_push.pop(0)
        self.pushes.append((key, ticket))

    def abort(self, key: EngineKey) -> None:
        self.aborted.append(key)

    def stats(self) -> EngineStats:
        return EngineStats(self.free_blocks, 0, 0, 0, 7)

    def kv_flow(self) -> KvFlow:
        return KvFlow()

    @property
    def submitted_ids(self) -> list[str]:
        return [key.request_id for key in self.submitted]

    @property
    def aborted_ids(self) -> list[str]:
        return [key.request_id for key in self.aborted]


class ScriptedHandOver:
    report: Callable[[PrefillRequest, HandOverReport], None]

    def __init__(self, at_first_token: bool = False) -> None:
        self.at_first_token = lambda: at_first_token
        self.begun: list[str] = []
        self.ended: list[tuple[str, bool]] = []
        self.failed: list[str] = []

    async def run(self) -> None:
        await asyncio.Event().wait()

    def begin(self, request: PrefillRequest) -> None:
        self.begun.append(request.request_id)

    def push_failed(self, request: PrefillRequest, event: EngineEvent) -> None:
        self.failed.append(request.request_id)

    def end(self, request: PrefillRequest, handed_over: bool) -> None:
        self.ended.append((request.request_id, handed_over))


class ScriptedDecodePeer(decode_pb2_grpc.DecodeServiceServicer, feed_pb2_grpc.FeedServiceServicer):
    """Decode instance that grants, refuses or ignores Reserve calls, and records all calls."""

    def __init__(self, instance_id: str, store: MemoryStore) -> None:
        self.instance_id = instance_id
        self.reserved: list[decode_pb2.ReserveRequest] = []
        self.aborted: list[tuple[str, int]] = []
        self.aborted_reservations: list[int] = []
        self.calls: list[str] = []
        self.refusals: list[KaveriError] = []
        self.always: KaveriError | None = None
        """Refusal of every Reserve call without one in `refusals`."""
        self.room_for: set[str] = set()
        """Request ids that `always` does not refuse."""
        self.full = False
        """True: requests that may wait do, and others are refused."""
        self.waiting: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.incarnation = secrets.randbits(63)
        self.layout = LAYOUT
        self.total_blocks = 64
        self._store = store
        self._sequence_number = 0
        self._server: aio.Server | None = None
        self._address = ""

    async def Reserve(self, request: Any, context: Any) -> decode_pb2.ReserveResponse:  # noqa: N802
        self.reserved.append(request)
        self.calls.append(f"reserve {request.request_id}")
        await self.may_answer.wait()
        await self._wait_in_line(request, context)
        always = None if request.request_id in self.room_for else self.always
        refusal = self.refusals.pop(0) if self.refusals else always
        if refusal is not None:
            await abort(context, refusal)
        blocks = LAYOUT.block_count(len(request.token_ids))
        secret = secrets.token_bytes(16)
        ticket = Ticket(
            secrets.token_bytes(16), secret, 1, (), tuple(range(blocks)), len(request.token_ids), 9.0, LAYOUT
        )
        return decode_pb2.ReserveResponse(ticket=ticket_to_proto(ticket), incarnation=self.incarnation)

    async def _wait_in_line(self, request: Any, context: Any) -> None:
        if not self.full or request.request_id in self.room_for:
            return
        if not request.wait:
            await abort(context, NoCapacity("decode", 0.1))
        self.waiting.append(request.request_id)
        try:
            while self.full and request.request_id not in self.room_for:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        finally:
            self.waiting.remove(request.request_id)

    async def Abort(self, request: Any, context: Any) -> feed_pb2.AbortResponse:  # noqa: N802
        for attempt in request.attempts:
            self.aborted.append((attempt.request_id, attempt.term.attempt))
            self.aborted_reservations.append(attempt.term.placement)
            self.calls.append(f"abort {attempt.request_id}")
        return feed_pb2.AbortResponse()

    @property
    def asked(self) -> list[str]:
        return [request.request_id for request in self.reserved]

    def calls_for(self, request_id: str) -> list[str]:
        kinds_and_ids = (call.split(" ", 1) for call in self.calls)
        return [kind for kind, of_request in kinds_and_ids if of_request == request_id]

    async def start(self, **load: Any) -> None:
        # As instances do, it admits the keep-alive of its callers.
        pings = ("grpc.http2.min_ping_interval_without_data_ms", 5_000)
        self._server = aio.server(options=[("grpc.so_reuseport", 0), pings])
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        feed_pb2_grpc.add_FeedServiceServicer_to_server(self, self._server)
        self._address = f"127.0.0.1:{add_port(self._server)}"
        await self._server.start()
        await self.say(**load)

    async def say(self, free_blocks: int = 64, **load: Any) -> None:
        """Send a heartbeat."""
        self._sequence_number += 1
        record = InstanceRecord(
            self.instance_id,
            self.incarnation,
            Role.ENGINE,
            self._address,
            MODEL,
            layout=self.layout,
            max_model_len=1000,
            lease_ttl_s=3600.0,
            phases=(Phase.DECODE,),
        )
        stated = {"state": InstanceState.READY, "total_blocks": self.total_blocks, **load}
        await self._store.heartbeat(
            record, InstanceLoad(sequence_number=self._sequence_number, free_blocks=free_blocks, **stated)
        )

    async def die(self) -> None:
        """Break the connections, but keep the lease."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


def params(max_tokens: int = 50, **more: Any) -> ResolvedParams:
    return ResolvedParams(max_tokens=max_tokens, seed=0, **more)


def no_predictions(metrics: PrefillMetrics) -> LengthForecaster:
    predictors = Predictors(None, MODEL, "", random.Random(0))  # type: ignore[arg-type]
    return LengthForecaster(predictors, PredictionMode.OFF, 1.0, metrics)


def new_metrics() -> PrefillMetrics:
    return PrefillMetrics(CollectorRegistry())
