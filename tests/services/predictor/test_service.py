"""Predictor service over real gRPC and a real Redis, around a deterministic model."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.domain.view import InstanceState, Role
from kaveri.errors import InvalidArgument, KaveriError, ModelNotFound, NoCapacity, Unavailable
from kaveri.rpc.server import check_health
from kaveri.wire.status import error_of
from tests.services.conftest import eventually
from tests.services.predictor.conftest import DEADLINE_S, LastTokenModel, RunningPredictor


async def refusal(call: "asyncio.Task[Any]") -> KaveriError:
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    return error_of(refused.value)


async def test_a_call_answers_range_bucket_and_probabilities_of_each_prompt(predictor: RunningPredictor) -> None:
    response = await predictor.ask([7, 3], [4], [5])
    assert (response.granularity, response.version) == (100, "v1")
    found = [(answer.bucket, answer.length.low, answer.length.high) for answer in response.predictions]
    assert found == [(3, 300, 400), (4, 400, 500), (0, 0, 100)]
    assert list(response.predictions[0].probabilities) == pytest.approx([0.1, 0.1, 0.1, 0.6, 0.1])
    assert not any(answer.truncated for answer in response.predictions)
    assert predictor.metric("kaveri_predictor_prompts_total", outcome="predicted") == 3
    assert predictor.metric("kaveri_predictor_seconds_count") == 3
    assert predictor.metric("kaveri_predictor_batch_prompts_sum") == 3


async def test_it_is_registered_as_a_predictor_of_its_model_and_healthy(predictor: RunningPredictor) -> None:
    await eventually(lambda: predictor.status() is not None, "it registers")
    status = predictor.status()
    assert status is not None
    assert (status.record.role, status.record.model) == (Role.PREDICTOR, "fake")
    assert status.record.address == predictor.host.address
    assert "v1" in status.record.engine
    assert await check_health(predictor.host.address, DEADLINE_S)


async def test_its_heartbeats_tell_how_many_prompts_wait(predictor: RunningPredictor, model: LastTokenModel) -> None:
    model.free.clear()
    predictor.ask(*[[number] for number in range(6)])

    def tells() -> bool:
        status = predictor.status()
        return status is not None and (status.load.waiting_requests, status.load.running_requests) == (2, 4)

    await eventually(tells, "four are computed and two wait")


async def test_a_prompt_beyond_the_models_length_is_cut_and_counted(
    predictor: RunningPredictor, model: LastTokenModel
) -> None:
    response = await predictor.ask([1] * 65, [2] * 64)
    assert [answer.truncated for answer in response.predictions] == [True, False]
    assert predictor.metric("kaveri_predictor_truncated_prompts_total") == 1
    assert max(len(prompt) for batch in model.batches for prompt in batch) == 64


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([], "prompts"),
        ([[1]] * 7, "prompts"),
        ([[1], []], "prompts[1].token_ids"),
        ([[1], [5, 1000, 2]], "prompts[1].token_ids"),
        ([[4_000_000_000]], "prompts[0].token_ids"),
    ],
    ids=["none", "too many", "an empty one", "outside the vocabulary", "far outside"],
)
async def test_bad_prompts_are_refused_by_field(
    predictor: RunningPredictor, prompts: list[list[int]], field: str
) -> None:
    error = await refusal(predictor.ask(*prompts))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_another_models_prompts_are_refused(predictor: RunningPredictor) -> None:
    error = await refusal(predictor.ask([1], model="other"))
    assert isinstance(error, ModelNotFound)
    assert (error.model, error.served) == ("other", ("fake",))


async def test_a_full_queue_refuses_with_a_delay(predictor: RunningPredictor, model: LastTokenModel) -> None:
    model.free.clear()
    accepted = [predictor.ask(*[[1]] * 6)]
    await eventually(lambda: len(model.batches) == 1, "the first four are computed")
    accepted.append(predictor.ask(*[[2]] * 6))
    await eventually(lambda: predictor.metric("kaveri_predictor_waiting_prompts") == 8, "four are computed, eight wait")
    error = await refusal(predictor.ask([3]))
    assert isinstance(error, NoCapacity)
    assert error.retry_after_s > 0
    assert predictor.metric("kaveri_predictor_prompts_total", outcome="refused") == 1
    model.free.set()
    await asyncio.gather(*accepted)


async def test_calls_that_nobody_waits_for_any_more_are_not_computed(
    predictor: RunningPredictor, model: LastTokenModel
) -> None:
    model.free.clear()
    first = predictor.ask([0])
    await eventually(lambda: len(model.batches) == 1, "the first is computed")
    cancelled, expired = predictor.ask([1], [2]), predictor.ask([3], timeout_s=4.0)
    await eventually(lambda: predictor.metric("kaveri_predictor_waiting_prompts") == 3, "they wait")
    cancelled.cancel()
    with pytest.raises(aio.AioRpcError) as late:
        await expired
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: predictor.metric("kaveri_predictor_waiting_prompts") == 0, "both have left the queue")
    model.free.set()
    assert (await first).predictions[0].bucket == 0
    assert (await predictor.ask([4])).predictions[0].bucket == 4
    assert model.batches == [[(0,)], [(4,)]]
    assert predictor.metric("kaveri_predictor_prompts_total", outcome="dropped") == 3


async def test_draining_it_answers_what_it_has_refuses_what_comes_and_leaves(
    predictor: RunningPredictor, model: LastTokenModel
) -> None:
    await eventually(lambda: predictor.status() is not None, "it registers")
    model.free.clear()
    held = predictor.ask([2])
    await eventually(lambda: len(model.batches) == 1, "it is computed")
    predictor.stopping.set()

    def drains() -> bool:
        status = predictor.status()
        return status is not None and status.load.state is InstanceState.DRAINING

    await eventually(drains, "the cluster sees that it drains")
    assert isinstance(await refusal(predictor.ask([1])), Unavailable)
    model.free.set()
    assert (await held).predictions[0].bucket == 2
    await predictor.serving
    await eventually(lambda: predictor.status() is None, "it has left")


async def test_a_model_that_fails_is_unavailable_and_the_service_goes_on(
    predictor: RunningPredictor, model: LastTokenModel
) -> None:
    model.rows = lambda _: [[1 / 0]]
    assert isinstance(await refusal(predictor.ask([1], [2])), Unavailable)
    assert predictor.metric("kaveri_predictor_prompts_total", outcome="failed") == 2
    model.rows = None
    assert (await predictor.ask([3])).predictions[0].bucket == 3
