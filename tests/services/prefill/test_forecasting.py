"""Length predictions during prefill, over real gRPC: used when in time, otherwise not waited for."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import pytest
import structlog
from prometheus_client import CollectorRegistry

from kaveri.domain.length import TokenRange
from kaveri.policy.prediction import PredictionMode, PredictionOutcome
from kaveri.v1 import predictor_pb2
from services.prefill.forecaster import LengthForecaster, Question
from services.prefill.metrics import PrefillMetrics
from services.prefill.predictors import Predictors
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses

MODES = ["parallel", "sequential"]
PATIENT = {"prediction_budget_s": 20.0}
CHUNKS = {"chunk_tokens": 16, "fake_step_s": 0.05}
"""A prompt of 60 tokens takes four steps."""

NewPredictor = Callable[..., Awaitable[Any]]


def outcome(prefill: Any, name: str) -> float:
    count: float = prefill.metric("kaveri_predictions_total", outcome=name)
    return count


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    with structlog.testing.capture_logs() as entries:
        yield lambda: [entry["event"] for entry in entries if entry["event"].startswith("predict")]


async def serve(cluster: Any, **settings: Any) -> tuple[Any, Any]:
    prefill = await cluster.prefill(**settings)
    await cluster.decode()
    return prefill, await cluster.router()


async def ask(
    cluster: Any, router: Any, prefill: Any, name: str, seed: int = 1, tokens: int = 60, max_tokens: int = 5
) -> None:
    token_ids = prompt(seed, tokens)
    call = router.prefill(prefill, name, token_ids, max_tokens=max_tokens)
    assert await router.answer(call, name) == cluster.expected(token_ids, max_tokens)


@pytest.mark.parametrize("mode", MODES)
async def test_a_prediction_that_is_there_in_time_reaches_the_decode_instance(
    cluster: Any, new_predictor: NewPredictor, mode: str
) -> None:
    predictor = await new_predictor()
    # Two seconds for the first chunk, beside which the prediction runs.
    prefill = await cluster.prefill(prediction=PredictionMode(mode), chunk_tokens=32, fake_step_s=2.0, **PATIENT)
    decode = await cluster.decode(fake_step_s=0.01)
    router = await cluster.router()
    token_ids = prompt(1, 60)
    call = router.prefill(prefill, "a", token_ids, max_tokens=300)
    # Heavy: of more than 128 tokens, as predicted.
    await eventually(lambda: decode.load().heavy_requests == 1, "decode knows that it is long")
    assert await router.answer(call, "a") == cluster.expected(token_ids, 300)
    assert predictor.prompts == [token_ids]
    assert outcome(prefill, "used") == 1
    assert prefill.metric("kaveri_prediction_seconds_count") == 1


async def test_a_prompt_of_one_chunk_is_placed_within_it_once_the_prediction_is_there(
    cluster: Any, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, router = await serve(cluster, fake_step_s=3.0)
    call = router.prefill(prefill, "a", prompt(1, 60), max_tokens=5)
    await eventually(lambda: call.seen("started") and predictor.calls, "the chunk has begun")
    assert not call.seen("placed")
    predictor.held.set()
    await eventually(lambda: call.seen("placed"), "it is placed")
    assert not call.seen("first_token")
    assert outcome(prefill, "used") == 1
    assert await router.answer(call, "a") == cluster.expected(prompt(1, 60), 5)


@pytest.mark.parametrize("settings", [{}, CHUNKS], ids=["one chunk", "four chunks"])
async def test_in_parallel_no_request_waits_for_a_prediction(
    cluster: Any, new_predictor: NewPredictor, settings: dict[str, Any]
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, decode = await cluster.prefill(**settings), await cluster.decode(fake_step_s=0.01)
    router = await cluster.router()
    await ask(cluster, router, prefill, "a", max_tokens=20)
    assert len(predictor.calls) == 1
    assert outcome(prefill, "late") == 1
    assert outcome(prefill, "used") == 0
    assert decode.metric("kaveri_decode_requests_total", outcome="finished") == 1


async def test_in_sequence_a_request_is_queued_when_its_prediction_is_there(
    cluster: Any, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, router = await serve(cluster, prediction=PredictionMode.SEQUENTIAL, **PATIENT)
    call = router.prefill(prefill, "a", prompt(1, 60), max_tokens=5)
    await eventually(lambda: bool(predictor.calls), "the predictor is asked")
    assert prefill.load().queued_prefill_tokens == 60
    assert prefill.load().waiting_requests == 1
    assert prefill.held_blocks == 0
    assert not call.seen("started")
    predictor.held.set()
    assert await router.answer(call, "a") == cluster.expected(prompt(1, 60), 5)
    assert outcome(prefill, "used") == 1


async def test_in_sequence_a_request_goes_on_when_the_budget_is_over(
    cluster: Any, new_predictor: NewPredictor, said: Callable[[], list[str]]
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, router = await serve(cluster, prediction=PredictionMode.SEQUENTIAL, prediction_budget_s=0.05)
    number = 0
    # Until it has been late three times, with a rest after each.
    while outcome(prefill, "late") < 3:
        await ask(cluster, router, prefill, f"r{number}")
        number += 1
    await ask(cluster, router, prefill, "last")
    assert outcome(prefill, "used") == 0
    assert said() == ["predictor_failing"]


@pytest.mark.parametrize("mode", MODES)
async def test_garbage_is_not_used_and_said_once(
    cluster: Any,
    new_predictor: NewPredictor,
    said: Callable[[], list[str]],
    mode: str,
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.always(predictor_pb2.PredictResponse(granularity=100))
    prefill, router = await serve(cluster, prediction=PredictionMode(mode), **CHUNKS, **PATIENT)
    for number in range(6):
        await ask(cluster, router, prefill, f"r{number}", seed=number)
    assert outcome(prefill, "failed") + outcome(prefill, "late") >= 1
    assert outcome(prefill, "used") == 0
    assert said() == ["predictor_failing"]
    predictor.answer = predictor.bucket(3)
    number = 6
    while not outcome(prefill, "used"):
        await ask(cluster, router, prefill, f"r{number}", seed=number)
        number += 1
    assert said()[1:] == ["predictor_works"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_dead_predictor_holds_no_request_up_and_is_used_again_when_it_is_back(
    cluster: Any, new_predictor: NewPredictor, said: Callable[[], list[str]], mode: str
) -> None:
    predictor = await new_predictor()
    prefill, router = await serve(cluster, prediction=PredictionMode(mode), **CHUNKS, **PATIENT)
    number = 0
    while not outcome(prefill, "used"):
        await ask(cluster, router, prefill, f"first-{number}", seed=number)
        number += 1
    await predictor.die()
    for number in range(6):
        await ask(cluster, router, prefill, f"r{number}", seed=number)
    assert outcome(prefill, "used") == 1
    assert said()[1:] == ["predictor_failing"]
    await predictor.leave()
    await ask(cluster, router, prefill, "gone")
    await predictor.start()
    number = 6
    while outcome(prefill, "used") == 1:
        await ask(cluster, router, prefill, f"r{number}", seed=number)
        number += 1
    assert said()[2:] == ["predictor_works"]


async def test_a_predictor_that_hangs_is_noticed_although_no_request_waits_for_it(
    cluster: Any, new_predictor: NewPredictor, said: Callable[[], list[str]]
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, router = await serve(cluster)
    number = 0
    while not said():
        await ask(cluster, router, prefill, f"r{number}")
        number += 1
    assert said() == ["predictor_failing"]
    predictor.held.set()
    while "predictor_works" not in said():
        await ask(cluster, router, prefill, f"r{number}")
        number += 1


async def test_what_is_settled_or_needs_no_decode_is_not_asked_about(cluster: Any, new_predictor: NewPredictor) -> None:
    predictor = await new_predictor()
    prefill, router = await serve(cluster, prediction=PredictionMode.SEQUENTIAL, **PATIENT)
    call = router.prefill(prefill, "settled", prompt(1, 20), max_tokens=9, ignore_eos=True)
    await router.answer(call, "settled")
    await ask(cluster, router, prefill, "one token", max_tokens=1)
    assert not predictor.calls
    await ask(cluster, router, prefill, "open")
    assert len(predictor.calls) == 1


async def test_switched_off_no_predictor_is_asked(cluster: Any, new_predictor: NewPredictor) -> None:
    predictor = await new_predictor()
    prefill = await cluster.prefill(prediction=PredictionMode.OFF)
    await cluster.decode()
    await ask(cluster, await cluster.router(), prefill, "a")
    assert not predictor.calls


async def test_without_a_predictor_of_its_model_a_request_goes_on(
    cluster: Any, said: Callable[[], list[str]], new_predictor: NewPredictor
) -> None:
    prefill = await cluster.prefill(model="other", prediction=PredictionMode.SEQUENTIAL, **PATIENT)
    await cluster.decode(model="other")
    predictor = await new_predictor()  # registered for another model
    await ask(cluster, await cluster.router(), prefill, "a")
    assert not predictor.calls
    assert outcome(prefill, "none") == 1
    assert not said()


async def test_the_predictor_that_an_operator_names_is_the_one_asked(cluster: Any, new_predictor: NewPredictor) -> None:
    other, named = await new_predictor("other"), await new_predictor("named", registered=False)
    settings = {"predictor_address": named.address, "prediction": PredictionMode.SEQUENTIAL, **PATIENT}
    prefill, router = await serve(cluster, **settings)
    for number in range(5):
        await ask(cluster, router, prefill, f"r{number}")
    assert (len(named.calls), len(other.calls)) == (5, 0)
    assert outcome(prefill, "used") == 5


async def test_a_later_attempt_is_asked_about_by_its_prompt_alone(cluster: Any, new_predictor: NewPredictor) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.bucket(1)
    prefill, router = await serve(cluster, prediction=PredictionMode.SEQUENTIAL, **PATIENT)
    token_ids = prompt(2, 30)
    whole = cluster.expected(token_ids, 210)
    for name, generated in (("within", 150), ("outlived", 205)):
        call = router.prefill(
            prefill, name, token_ids + whole[:generated], max_tokens=210, attempt=2, generated_count=generated
        )
        assert await router.answer(call, name, attempt=2) == whole[generated:]
    assert predictor.prompts == [token_ids, token_ids]
    # Predicted are 100 to 199 tokens of the whole answer.
    assert (outcome(prefill, "used"), outcome(prefill, "outlived")) == (1, 1)


async def test_held_requests_count_for_the_queues_limit_and_leave_it_when_cancelled(
    cluster: Any, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    prefill, router = await serve(cluster, max_queue=2, prediction=PredictionMode.SEQUENTIAL, **PATIENT)
    held = [router.prefill(prefill, f"held-{number}", prompt(number, 40), max_tokens=5) for number in range(2)]
    await eventually(lambda: prefill.load().waiting_requests == 2, "both are held")
    refused = router.prefill(prefill, "refused", prompt(5, 40), max_tokens=5)
    with refuses(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await refused.ended()
    await eventually(lambda: len(predictor.prompts) == 2, "the predictor is asked about both")
    for call in held:
        await call.cancel()
    await eventually(lambda: prefill.load().queued_prefill_tokens == 0, "nothing is queued any more")
    await eventually(lambda: predictor.cancelled == len(predictor.calls), "its calls are cancelled")
    predictor.held.set()
    await ask(cluster, router, prefill, "next")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def forecaster(cluster: Any, registry: CollectorRegistry) -> AsyncIterator[LengthForecaster]:
    predictors = Predictors(await cluster.store(), "fake", "", random.Random(0))
    metrics = PrefillMetrics(registry)
    forecaster = LengthForecaster(predictors, PredictionMode.PARALLEL, 1.0, metrics)
    running = asyncio.create_task(forecaster.run())
    await asyncio.sleep(0)
    yield forecaster
    running.cancel()
    await asyncio.wait([running])


class AskedPredictor:
    def __init__(self, forecaster: LengthForecaster) -> None:
        self._forecaster = forecaster
        self.lengths: dict[int, TokenRange | None] = {}

    def ask(self, number: int, then: Callable[[], None] = lambda: None) -> Question:
        def answered(length: TokenRange | None) -> None:
            self.lengths[number] = length
            then()

        question = self._forecaster.ask(prompt(number, 5), answered)
        assert question is not None
        return question


@pytest.fixture
def asked(forecaster: LengthForecaster) -> AskedPredictor:
    return AskedPredictor(forecaster)


async def test_what_is_accepted_at_the_same_moment_is_asked_in_one_call(
    asked: AskedPredictor, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    for number in range(100):
        asked.ask(number)
    await eventually(lambda: len(asked.lengths) == 100, "all are answered")
    # Two calls, which may overtake one another.
    assert sorted(len(call.prompts) for call in predictor.calls) == [36, 64]
    assert sorted(predictor.prompts) == sorted(prompt(number, 5) for number in range(100))
    assert set(asked.lengths.values()) == {TokenRange(300, 400)}


async def test_a_request_that_breaks_over_its_answer_keeps_no_other_from_its_own(
    asked: AskedPredictor, new_predictor: NewPredictor
) -> None:
    await new_predictor()

    def break_down() -> None:
        raise RuntimeError("broken")

    asked.ask(0, break_down)
    for number in (1, 2):
        asked.ask(number)
    await eventually(lambda: list(asked.lengths) == [0, 1, 2], "the others are answered")
    asked.ask(7)
    await eventually(lambda: 7 in asked.lengths, "the forecaster still works")


async def test_an_answer_that_ends_another_request_of_the_call_leaves_the_rest_their_answers(
    asked: AskedPredictor, forecaster: LengthForecaster, new_predictor: NewPredictor
) -> None:
    await new_predictor()
    asked.ask(0, lambda: forecaster.drop(ended))
    ended = asked.ask(1)
    asked.ask(2)
    await eventually(lambda: 2 in asked.lengths, "the last one is answered")
    assert list(asked.lengths) == [0, 2]


async def test_a_call_ends_when_no_request_waits_for_any_of_it(
    asked: AskedPredictor,
    forecaster: LengthForecaster,
    new_predictor: NewPredictor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The call must not end by its own time limit.
    monkeypatch.setattr(forecaster, "_timeout_s", 1000.0)
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    questions = [asked.ask(number) for number in range(3)]
    await eventually(lambda: bool(predictor.calls), "the predictor is asked")
    for question in questions:
        assert not predictor.cancelled
        forecaster.drop(question)
    await eventually(lambda: predictor.cancelled == 1, "the call is cancelled", 20.0)
    assert not asked.lengths


async def test_an_answer_after_the_decision_changes_nothing(
    asked: AskedPredictor, forecaster: LengthForecaster, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    late = asked.ask(1)
    await eventually(lambda: bool(predictor.calls), "the predictor is asked")
    forecaster.decided(late, PredictionOutcome.LATE)
    predictor.held.set()
    asked.ask(2)
    await eventually(lambda: 2 in asked.lengths, "the next one is answered")
    assert 1 not in asked.lengths


async def test_what_ends_before_it_is_sent_is_never_asked(
    asked: AskedPredictor, forecaster: LengthForecaster, new_predictor: NewPredictor
) -> None:
    predictor = await new_predictor()
    forecaster.drop(asked.ask(1))
    await asyncio.sleep(0)
    asked.ask(2)
    await eventually(lambda: list(asked.lengths) == [2], "the other one is answered")
    assert predictor.prompts == [prompt(2, 5)]


async def test_answers_that_always_come_too_late_are_logged_once(
    asked: AskedPredictor,
    forecaster: LengthForecaster,
    registry: CollectorRegistry,
    new_predictor: NewPredictor,
    said: Callable[[], list[str]],
) -> None:
    predictor = await new_predictor()
    predictor.answer = predictor.hold(predictor.bucket(3))
    for number in range(1, 11):
        question = asked.ask(number)
        await eventually(lambda: len(predictor.calls) == number, "the predictor is asked")  # noqa: B023
        forecaster.decided(question, PredictionOutcome.LATE)
        predictor.held.set()
        answered = "kaveri_prediction_seconds_count"
        await eventually(lambda: registry.get_sample_value(answered) == number, "it answers")  # noqa: B023
        predictor.held.clear()
    assert registry.get_sample_value("kaveri_predictions_total", {"outcome": "late"}) == 10
    assert said() == ["predictor_works", "predictions_late"]
    predictor.answer = predictor.bucket(3)
    in_time = asked.ask(11)
    await eventually(lambda: 11 in asked.lengths, "it is answered")
    forecaster.decided(in_time, PredictionOutcome.USED)
    assert said()[2:] == ["predictions_in_time"]
