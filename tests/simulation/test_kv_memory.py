"""The simulated KV is found wrong when it is anything but what was written for the request."""

import asyncio
import random
from collections.abc import Callable

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest, FirstToken, Landed, PrefillProgress
from kaveri.engine.stepwise.fake import FakeModel, StaleKv
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.engine_recorder import EngineRecorder
from tests.simulation.cluster.engine import SimulatedEngine
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_wire import LoopWire

_MODEL = FakeModel(layer_count=1, block_tokens=4, max_model_len=64)
_PARAMS = ResolvedParams(max_tokens=20, temperature=0.0, seed=1)


def _slice(token_ids: list[int], start: int, block_ids: list[int]) -> SequenceSlice:
    return SequenceSlice(token_ids, start, block_ids, True, 0, _PARAMS)


def test_kv_written_in_slices_reads_as_one_chain() -> None:
    memory = KvMemory(_MODEL, 8)
    memory.write(_slice([1, 2, 3, 4, 5, 6], 0, [7, 3, 5]))
    assert memory.write(_slice([7, 8, 9], 6, [7, 3, 5])) == _MODEL.chain(range(1, 10))
    assert memory.read([7, 3, 5], 9) == _MODEL.chain(range(1, 10))


@pytest.mark.parametrize(
    ("block_ids", "token_count"),
    [([3, 7], 8), ([7, 7], 8), ([7, 1], 8), ([7, 4], 8), ([7, 3], 7)],
    ids=["swapped", "twice", "never written", "of another request", "more than was computed"],
)
def test_kv_in_the_wrong_place_is_found(block_ids: list[int], token_count: int) -> None:
    memory = KvMemory(_MODEL, 8)
    memory.write(_slice([1, 2, 3, 4, 5, 6, 7, 8], 0, [7, 3]))
    memory.write(_slice([1, 2, 9, 4, 5, 6, 7, 8], 0, [6, 4]))
    with pytest.raises(StaleKv):
        memory.read(block_ids, token_count)


def _engine(wire: LoopWire, seed: int, divergent: bool = False) -> SimulatedEngine:
    return SimulatedEngine(
        _MODEL,
        wire=wire,
        rng=random.Random(seed),
        block_count=32,
        chunk_tokens=8,
        max_batch=4,
        step_s=1e-4,
        divergent=divergent,
    )


async def _until(condition: Callable[[], object]) -> None:
    """Looks after every turn of the loop, so that it misses no state between two steps on a slow machine either."""
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def _ticket(engine: SimulatedEngine, request: EngineRequest) -> Ticket:
    return await asyncio.wrap_future(engine.reserve(request, 30.0))


async def test_blocks_stay_in_quarantine_until_the_sender_has_stopped() -> None:
    wire = LoopWire()
    prefill, decode = _engine(wire, 1), _engine(wire, 2)
    prefilled, decoded = EngineRecorder(), EngineRecorder()
    prefill.start(prefilled)
    decode.start(decoded)
    request = EngineRequest(EngineKey("r", 1), tuple(range(1, 41)), 0, _PARAMS)
    ticket = await _ticket(decode, request)
    # The push opens before the first of five steps ends, and the abort comes after that step.
    prefill.prefill(request)
    prefill.push_to(request.key, ticket)
    await _until(lambda: prefilled.of(PrefillProgress))
    assert decode.kv_flow().receiving.sender_count == 1
    assert not prefilled.of(FirstToken)
    decode.abort(request.key)
    assert decode.kv_flow().receiving.quarantined_block_count == 10
    assert decode.stats().free_blocks < 32
    decode.check_integrity()
    await _until(lambda: decode.stats().free_blocks == 32)
    assert decode.kv_flow().receiving.quarantined_block_count == 0
    prefill.close()
    decode.close()


async def test_write_of_a_revoked_transfer_is_found_when_its_blocks_were_given_away() -> None:
    wire = LoopWire()
    prefill, decode = _engine(wire, 1), _engine(wire, 2)
    prefilled, decoded = EngineRecorder(), EngineRecorder()
    prefill.start(prefilled)
    decode.start(decoded)
    request = EngineRequest(EngineKey("r", 1), tuple(range(1, 18)), 0, _PARAMS)
    ticket = await _ticket(decode, request)
    prefill.prefill(request)
    prefill.push_to(request.key, ticket)
    await _until(lambda: decoded.of(Landed))
    # What a sender would do whose blocks were not kept in quarantine.
    block = prefill._memory.get(0)
    decode._memory.put(ticket.block_ids[1], block)
    decode.admit(request.key)
    await _until(lambda: decode.draws.problems)
    assert f"block {ticket.block_ids[1]} holds" in decode.draws.problems[0]
    assert decoded.problems, "the engine goes on with wrong KV"
    prefill.close()
    decode.close()


async def test_ticket_of_a_former_life_is_refused() -> None:
    wire = LoopWire()
    prefill, former = _engine(wire, 1), _engine(wire, 2)
    prefilled = EngineRecorder()
    prefill.start(prefilled)
    request = EngineRequest(EngineKey("r", 1), tuple(range(1, 18)), 0, _PARAMS)
    ticket = await _ticket(former, request)
    address = ticket.endpoints[0].address
    former.close()
    # The next life listens where the former one did.
    wire._numbers = iter([int(address.removeprefix("loop-"))])  # type: ignore[assignment]
    _engine(wire, 3)
    prefill.prefill(request)
    prefill.push_to(request.key, ticket)
    await _until(lambda: len(prefilled.events) > 4)
    assert "of epoch" in repr(prefilled.events), prefilled.events
    prefill.close()


@pytest.mark.parametrize("divergent", [False, True])
async def test_lives_draw_different_tokens_from_one_prompt_only_where_they_diverge(divergent: bool) -> None:
    drawn = []
    for seed in range(6):
        engine = _engine(LoopWire(), seed, divergent=divergent)
        recorder = EngineRecorder()
        engine.start(recorder)
        engine.prefill(EngineRequest(EngineKey("r", 1), (1, 2, 3), 0, _PARAMS))
        await _until(lambda recorder=recorder: recorder.of(FirstToken))
        drawn.append(recorder.of(FirstToken)[0].token_id)
        engine.close()
    assert (len(set(drawn)) > 1) is divergent, drawn
