"""Exceptions within the vLLM engine: in one request's sampling, and in a step."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineEvent, EngineKey, EngineRequest, EngineStopped, FirstToken, RequestFailed
from kaveri.testing.engine_conformance import make_request
from kaveri.testing.engine_recorder import SOON_S, wait_until_free
from tests.support.engine_process import RemoteEngine
from tests.support.engine_suite import start_adopting

# The first test that needs it loads vLLM.
pytestmark = pytest.mark.timeout(300)

_DEADLY = 13


def test_a_draw_that_raises_ends_its_request_and_the_engine_goes_on(prefills: Any) -> None:
    engine: RemoteEngine = prefills.lend().open(total_blocks=60, max_batch=4, deadly_seed=_DEADLY)
    recorder = start_adopting(engine)
    try:
        sampled = [make_request(engine, f"r{n}", 8, 9, temperature=1.0) for n in range(3)]
        seeds = (_DEADLY, 1, 2)
        requests = [replace(r, params=replace(r.params, seed=seed)) for r, seed in zip(sampled, seeds, strict=True)]
        deadly, others = requests[0], requests[1:]
        for request in (deadly, *others):
            engine.prefill(request)
        failed = recorder.wait_for(RequestFailed, deadly.key)
        assert (failed.reason, failed.is_final) == ("its draw raised IndexError('a draw that raises')", True)
        assert len(recorder.token_ids[deadly.key]) == 2
        for request in others:
            recorder.wait_for_finish(request.key)
            alone = replace(request, key=request.key._replace(serial=99))
            engine.prefill(alone)
            recorder.wait_for_finish(alone.key)
            assert recorder.token_ids[alone.key] == recorder.token_ids[request.key]
        wait_until_free(engine)
    finally:
        engine.close()


def _broken_by(prefills: Any, *requests: EngineRequest) -> list[EngineEvent]:
    """Compute prompts until one of them stops the engine; return its events."""
    events, stopped = list[EngineEvent](), threading.Event()

    def listen(news: Sequence[EngineEvent]) -> None:
        events.extend(news)
        if isinstance(events[-1], EngineStopped):
            stopped.set()

    engine: RemoteEngine = prefills.lend().open(total_blocks=60, max_batch=4, deadly_token=_DEADLY)
    try:
        engine.start(listen)
        for request in requests:
            engine.prefill(request)
        assert stopped.wait(SOON_S), events
    finally:
        engine.close()
    return events


def _request(name: str, first_token: int, suspect_until: int = 0) -> EngineRequest:
    params = ResolvedParams(max_tokens=9, temperature=0.0, seed=1, ignore_eos=True)
    return EngineRequest(EngineKey(name, 1), (first_token, 3, 1, 4, 1, 5, 9, 2), 0, params, suspect_until)


def test_a_step_that_raises_makes_its_requests_suspects(prefills: Any) -> None:
    deadly = _request("deadly", _DEADLY)
    events = _broken_by(prefills, deadly)
    assert not any(isinstance(event, RequestFailed) for event in events)
    assert events[-1] == EngineStopped("RuntimeError('a forward pass that raises')", {deadly.key: 1})


def test_a_suspect_is_computed_without_others_and_blamed_alone(prefills: Any) -> None:
    suspect, deadly, innocent = _request("suspect", 5, 1), _request("deadly", _DEADLY, 1), _request("innocent", 6)
    events = _broken_by(prefills, suspect, deadly, innocent)
    assert next(event.key for event in events if isinstance(event, FirstToken)) == suspect.key
    failed = RequestFailed(deadly.key, "RuntimeError('a forward pass that raises')", is_final=True)
    assert events[-2:] == [failed, EngineStopped("RuntimeError('a forward pass that raises')", {})]
