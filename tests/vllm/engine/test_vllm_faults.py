"""vLLM engine beyond the conformance suite: dying peers, each transport, prefix caches, pushes from other engines."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.contract import (
    EngineKey,
    FirstToken,
    KvPushed,
    Landed,
    Preempted,
    PrefillProgress,
    StepTokens,
)
from kaveri.errors import LayoutMismatch
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.testing.engine_conformance import Pair, make_request, when_there_is_room
from kaveri.testing.engine_recorder import EngineRecorder, wait_until_free
from tests.support.engine_process import RemoteEngine
from tests.support.plain_transformers import PlainTransformers

# The first test that needs it loads vLLM.
pytestmark = pytest.mark.timeout(300)

_BLOCKS = 60


class _VllmEngines:
    def __init__(self, prefills: Any, decodes: Any, folder: Path, stack: ExitStack) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._folder = folder
        self._stack = stack
        self._count = 0

    def prefill(self, recorder: EngineRecorder, **arguments: Any) -> RemoteEngine:
        engine: RemoteEngine = self._prefills.lend().open(**{"total_blocks": _BLOCKS, "max_batch": 1} | arguments)
        return self._started(engine, recorder)

    def decode(self, recorder: EngineRecorder, *transports: str, **arguments: Any) -> RemoteEngine:
        self._count += 1
        listen = [KvEndpoint(name, self._address(name)) for name in transports or ("unix",)]
        given = {"total_blocks": _BLOCKS, "max_batch": 4, "listen": listen} | arguments
        if transports:
            given["transports"] = transports
        engine: RemoteEngine = self._decodes.lend().open(**given)
        return self._started(engine, recorder)

    def pair(self, *transports: str, admit: bool = True, **arguments: Any) -> Pair:
        prefilled = EngineRecorder()
        prefill = self.prefill(prefilled, **({"transports": transports} if transports else {}))
        return self.pair_with(prefill, prefilled, *transports, admit=admit, **arguments)

    def pair_with(
        self, prefill: Any, prefilled: EngineRecorder, *transports: str, admit: bool = True, **arguments: Any
    ) -> Pair:
        """Start another decode engine and pair it with an existing prefill engine."""
        decoded = EngineRecorder()
        decode = self.decode(decoded, *transports, **arguments)
        if admit:
            decoded.on_event = lambda event: decode.admit(event.key) if isinstance(event, Landed) else None
        return Pair(prefill, decode, prefilled, decoded)

    def _started(self, engine: RemoteEngine, recorder: EngineRecorder) -> RemoteEngine:
        self._stack.callback(engine.close)
        engine.start(recorder)
        return engine

    def _address(self, transport: str) -> str:
        local = transport in ("unix", "shm")
        return str(self._folder / f"{transport}{self._count}.sock") if local else "127.0.0.1:0"


@pytest.fixture
def bench(prefills: Any, decodes: Any, tmp_path: Path) -> Iterator[_VllmEngines]:
    with ExitStack() as stack:
        yield _VllmEngines(prefills, decodes, tmp_path, stack)


@pytest.mark.parametrize("transport", ["unix", "tcp", "shm", "gloo", "nixl"])
def test_kv_lands_in_vllms_own_memory_over_every_transport(
    bench: _VllmEngines, reference: PlainTransformers, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    pair = bench.pair(transport)
    requests = [make_request(pair.prefill, f"{transport}{length}", length, 12) for length in (1, 32, 33, 90)]
    for request in requests:
        pair.hand_over(request)
    for request in requests:
        assert pair.answer(request) == reference.answer(request.token_ids, 12)
        assert pair.prefilled.wait_for(KvPushed, request.key).transport.startswith(transport)
    wait_until_free(pair.prefill, pair.decode)


def test_kv_goes_by_way_of_a_copy_where_vllms_memory_is_on_a_device(
    mirrored_prefills: Any, mirrored_decodes: Any, tmp_path: Path, reference: PlainTransformers
) -> None:
    with ExitStack() as stack:
        pair = _VllmEngines(mirrored_prefills, mirrored_decodes, tmp_path, stack).pair()
        first = make_request(pair.prefill, "first", 100, 12)
        tail = make_request(pair.prefill, "tail", 20, 8).token_ids
        second = replace(first, key=EngineKey("second", 1), token_ids=first.token_ids[:70] + tail)
        for request in (first, second, make_request(pair.prefill, "third", 33, 12)):
            pair.hand_over(request)
            assert pair.answer(request) == reference.answer(request.token_ids, 12)
        wait_until_free(pair.prefill, pair.decode)
        # Cached in the prefill engine, but not in the new decode engine.
        pair.decode.close()
        engines = _VllmEngines(mirrored_prefills, mirrored_decodes, tmp_path, stack)
        again = engines.pair_with(pair.prefill, pair.prefilled, "tcp")
        third = replace(first, key=EngineKey("third", 2))
        again.hand_over(third)
        assert again.answer(third) == reference.answer(first.token_ids, 12)
        wait_until_free(again.prefill, again.decode)


def test_blocks_that_decode_has_cached_are_not_pushed(bench: _VllmEngines, reference: PlainTransformers) -> None:
    pair = bench.pair()
    first = make_request(pair.prefill, "first", 100, 8)
    pair.hand_over(first)
    assert pair.answer(first) == reference.answer(first.token_ids, 8)
    wait_until_free(pair.prefill, pair.decode)
    tail = make_request(pair.prefill, "tail", 20, 8).token_ids
    second = replace(first, key=EngineKey("second", 1), token_ids=first.token_ids[:70] + tail)
    ticket = pair.reserve(second)
    assert (ticket.first_block, len(ticket.block_ids), ticket.token_count) == (2, 1, 90)
    pair.prefill.prefill(second)
    pair.prefill.push_to(second.key, ticket)
    assert pair.answer(second) == reference.answer(second.token_ids, 8)
    assert (
        pair.prefilled.wait_for(KvPushed, second.key).kv_bytes == ticket.layout.block_bytes * ticket.layout.layer_count
    )
    wait_until_free(pair.prefill, pair.decode)


def test_what_prefill_has_cached_is_pushed_without_being_computed(
    bench: _VllmEngines, reference: PlainTransformers
) -> None:
    pair = bench.pair()
    first = make_request(pair.prefill, "first", 97, 1)
    pair.prefill.prefill(first)
    pair.prefilled.wait_for_finish(first.key)
    second = replace(first, key=EngineKey("second", 1), params=replace(first.params, max_tokens=9))
    pair.hand_over(second)
    assert pair.answer(second) == reference.answer(second.token_ids, 9)
    assert pair.prefilled.of(PrefillProgress, first.key)
    assert not pair.prefilled.of(PrefillProgress, second.key)
    wait_until_free(pair.prefill, pair.decode)


def test_growing_answers_never_take_the_blocks_of_a_prompt(bench: _VllmEngines, reference: PlainTransformers) -> None:
    recorder = EngineRecorder()
    engine = bench.decode(recorder, total_blocks=8)

    def adopt(event: Any) -> None:
        if isinstance(event, FirstToken):
            engine.adopt(event.key)
            engine.admit(event.key)

    recorder.on_event = adopt
    growing = [make_request(engine, f"r{i}", 30, 90) for i in range(3)]
    for request in growing:
        engine.prefill(request)
    for request in growing:
        recorder.wait_for_tokens(request.key, 2)
    prompt = make_request(engine, "prompt", 100, 5)
    when_there_is_room(lambda: engine.prefill(prompt))
    for request in (*growing, prompt):
        recorder.wait_for_finish(request.key)
        assert recorder.token_ids[request.key] == reference.answer(request.token_ids, request.params.max_tokens or 0)
    assert recorder.of(Preempted), "there was room for all: the test has shown nothing"
    kinds = [type(event) for event in recorder.events if getattr(event, "key", None) == prompt.key]
    assert Preempted not in kinds[: kinds.index(FirstToken)]
    wait_until_free(engine)


def test_adopted_request_does_not_wait_for_a_prompt_that_is_under_way(
    bench: _VllmEngines, reference: PlainTransformers
) -> None:
    recorder = EngineRecorder()
    # Calls made while the prompt is computed arrive between two of its steps.
    engine = bench.decode(recorder, pause_s=0.05)
    request, prompt = make_request(engine, "r", 20, 12), make_request(engine, "prompt", 110, 2)
    engine.prefill(request)
    recorder.wait_for(FirstToken, request.key)
    engine.prefill(prompt)
    recorder.wait_for(PrefillProgress, prompt.key)
    engine.adopt(request.key)
    engine.admit(request.key)
    recorder.wait_for(FirstToken, prompt.key)
    before = recorder.events[: recorder.events.index(recorder.of(FirstToken, prompt.key)[0])]
    drawn = [step for event in before if isinstance(event, StepTokens) for step in event.steps]
    assert len([step for step in drawn if step.key == request.key]) >= 2
    recorder.wait_for_finish(request.key)
    assert recorder.token_ids[request.key] == reference.answer(request.token_ids, 12)
    engine.abort(prompt.key)
    wait_until_free(engine)


def test_kv_of_another_engine_is_refused_by_the_order_of_its_bytes(bench: _VllmEngines, model_folder: Path) -> None:
    from kaveri.engine.stepwise.engine import StepwiseEngine
    from kaveri.engine.transformers.loading import load_runner

    pair = bench.pair()
    request = make_request(pair.prefill, "r", 20, 5)
    ticket = pair.reserve(request)
    runner = load_runner(str(model_folder), "float32", "cpu", 128, ticket.layout.block_tokens)
    foreign = StepwiseEngine(runner, 20)
    try:
        foreign.start(EngineRecorder())
        foreign.prefill(request)
        with pytest.raises(LayoutMismatch) as raised:
            foreign.push_to(request.key, ticket)
        assert raised.value.field == "order"
    finally:
        foreign.close()
