import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kaveri.errors import NoCapacity, Unavailable
from services.predictor.batcher import PredictionBatcher, choose_batch
from services.predictor.metrics import PredictorMetrics
from services.predictor.worker import WorkerThread
from tests.services.conftest import eventually

LONG = 10
WAIT_S = 30.0


@pytest.fixture
async def batcher(model: Any, worker: WorkerThread) -> AsyncIterator[PredictionBatcher]:
    batcher = PredictionBatcher(model, worker, 4, LONG, 8, PredictorMetrics(CollectorRegistry()))
    running = asyncio.create_task(batcher.run())
    yield batcher
    model.free.set()
    running.cancel()
    await asyncio.wait([running])


def bucket_of(row: list[float]) -> int:
    return row.index(max(row))


def ask(batcher: PredictionBatcher, *prompts: list[int]) -> "asyncio.Task[list[list[float]]]":
    return asyncio.create_task(batcher.predict(prompts))


async def hold_up(batcher: PredictionBatcher, model: Any) -> "asyncio.Task[Any]":
    """Send a prompt that is computed until `model.free` is set."""
    model.free.clear()
    first = ask(batcher, [0])
    await eventually(lambda: len(model.batches) == 1, "the first batch is computed")
    return first


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 6))
def test_a_batch_is_the_first_prompt_and_the_next_that_may_go_with_it(lengths: list[int], size: int) -> None:
    batch = choose_batch(lengths, size, LONG)
    assert batch == sorted(set(batch))
    if not lengths:
        assert not batch
    elif lengths[0] > LONG:
        assert batch == [0]
    else:
        short = [place for place, tokens in enumerate(lengths) if tokens <= LONG]
        assert batch == short[:size]
        assert batch[0] == 0


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 6))
def test_whoever_waits_is_in_the_batch_of_his_place_at_the_latest(lengths: list[int], size: int) -> None:
    waiting, batches = list(enumerate(lengths)), []
    while waiting:
        places = choose_batch([tokens for _, tokens in waiting], size, LONG)
        batches.append({waiting[place][0] for place in places})
        waiting = [entry for place, entry in enumerate(waiting) if place not in places]
    for number in range(len(lengths)):
        assert next(turn for turn, batch in enumerate(batches) if number in batch) <= number


async def test_prompts_that_wait_at_the_same_time_are_computed_together(batcher: PredictionBatcher, model: Any) -> None:
    first = await hold_up(batcher, model)
    calls = [ask(batcher, [1], [2]), ask(batcher, [3]), ask(batcher, [4], [5], [6])]
    await eventually(lambda: batcher.waiting_count == 6, "all wait")
    assert batcher.computing_count == 1
    model.free.set()
    rows = [row for answers in await asyncio.gather(first, *calls) for row in answers]
    assert [bucket_of(row) for row in rows] == [0, 1, 2, 3, 4, 0, 1]
    assert model.batches == [[(0,)], [(1,), (2,), (3,), (4,)], [(5,), (6,)]]


async def test_a_long_prompt_is_computed_alone(batcher: PredictionBatcher, model: Any) -> None:
    first = await hold_up(batcher, model)
    long = [1] * (LONG + 1)
    call = ask(batcher, [1], long, [2])
    await eventually(lambda: batcher.waiting_count == 3, "all wait")
    model.free.set()
    await asyncio.gather(first, call)
    assert model.batches[1:] == [[(1,), (2,)], [tuple(long)]]


async def test_what_was_cancelled_before_its_batch_is_never_computed(batcher: PredictionBatcher, model: Any) -> None:
    first = await hold_up(batcher, model)
    gone, stays = ask(batcher, [1], [2]), ask(batcher, [3])
    await eventually(lambda: batcher.waiting_count == 3, "all wait")
    gone.cancel()
    await eventually(lambda: batcher.waiting_count == 1, "the cancelled ones have left")
    model.free.set()
    await asyncio.gather(first, stays)
    assert model.batches == [[(0,)], [(3,)]]
    await batcher.wait_idle()


async def test_what_was_cancelled_within_its_batch_leaves_the_others_their_answers(
    batcher: PredictionBatcher, model: Any
) -> None:
    first = await hold_up(batcher, model)
    first.cancel()
    second = ask(batcher, [2])
    await eventually(lambda: batcher.waiting_count == 1, "it waits")
    model.free.set()
    assert bucket_of((await second)[0]) == 2
    assert first.cancelled()


async def test_a_full_queue_refuses_a_call_as_a_whole(batcher: PredictionBatcher, model: Any) -> None:
    first = await hold_up(batcher, model)
    full = ask(batcher, *([number] for number in range(7)))
    await eventually(lambda: batcher.waiting_count == 7, "they wait")
    with pytest.raises(NoCapacity, match="predictor"):
        await asyncio.wait_for(batcher.predict([[1], [2]]), WAIT_S)
    assert batcher.waiting_count == 7
    last = ask(batcher, [4])
    model.free.set()
    await asyncio.gather(first, full)
    assert bucket_of((await last)[0]) == 4


@pytest.mark.parametrize(
    "rows",
    [
        lambda count: [[0.2] * 5] * (count - 1),
        lambda count: [[0.2] * 4] * count,
        lambda count: [[float("nan")] * 5] * count,
        lambda count: [[1 / 0]],
    ],
    ids=["too few", "of too few buckets", "no numbers", "an error"],
)
async def test_a_model_that_fails_or_answers_nonsense_fails_its_batch_only(
    batcher: PredictionBatcher, model: Any, rows: Any
) -> None:
    model.rows = rows
    with pytest.raises(Unavailable, match="the predictor failed: "):
        await batcher.predict([[1], [2]])
    model.rows = None
    assert bucket_of((await batcher.predict([[1]]))[0]) == 1


async def test_who_waits_when_it_stops_is_told(model: Any, worker: WorkerThread) -> None:
    batcher = PredictionBatcher(model, worker, 4, LONG, 8, PredictorMetrics(CollectorRegistry()))
    running = asyncio.create_task(batcher.run())
    calls = [await hold_up(batcher, model), ask(batcher, [1], [2])]
    await eventually(lambda: batcher.waiting_count == 2, "they wait")
    running.cancel()
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S)
    model.free.set()
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]


async def test_it_is_idle_only_when_nothing_is_computed_and_nothing_waits(
    batcher: PredictionBatcher, model: Any
) -> None:
    await asyncio.wait_for(batcher.wait_idle(), 5)
    first = await hold_up(batcher, model)
    idle = asyncio.create_task(batcher.wait_idle())
    second = ask(batcher, [1])
    await eventually(lambda: batcher.waiting_count == 1, "one waits")
    assert not idle.done()
    model.free.set()
    await asyncio.gather(first, second)
    await asyncio.wait_for(idle, 5)
