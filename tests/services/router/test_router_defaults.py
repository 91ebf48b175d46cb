"""Sampling defaults at the router: what requests leave unset is the model's, and what they say themselves wins."""

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument
from kaveri.models import resolve_model
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, MODEL, PROMPT, answer, collect, tokens_of

DRAWN = ("temperature", "top_p", "top_k")
VALUES = {"temperature": 0.5, "top_p": 0.75, "top_k": 20}
"""Numbers that the wire does not change."""
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    """Settings of a router whose model's generation_config.json has VALUES and a length."""
    folder = shutil.copytree(resolve_model(MODEL), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(VALUES | {"max_new_tokens": 9, "do_sample": False}))
    return {"model": str(folder), "served_model_name": MODEL}


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    """The path of another such file."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"temperature": 0.25, "max_new_tokens": 4}))
    return str(path)


def asks(**params: Any) -> inference_pb2.GenerateRequest:
    """A request that says nothing but these parameters."""
    tokens = inference_pb2.TokenIds(ids=PROMPT)
    if not params:
        return inference_pb2.GenerateRequest(token_ids=tokens)
    return inference_pb2.GenerateRequest(token_ids=tokens, params=sampling_pb2.SamplingParams(**params))


async def drawn_with(
    cluster: ScriptedCluster, router: RouterUnderTest, **params: Any
) -> tuple[dict[str, Any], list[inference_pb2.GenerateResponse]]:
    """The sampling parameters that an instance got for such a request, and the answer."""
    before = len(cluster.taken())
    responses = await collect(router.stub.Generate(asks(**params), timeout=60))
    assert len(cluster.taken()) == before + 1
    newest = next(request for request in cluster.taken() if request.request_id == responses[0].request_id)
    return {name: getattr(newest.params, name) for name in DRAWN if newest.params.HasField(name)}, responses


async def test_what_a_request_leaves_unset_is_the_models(cluster: ScriptedCluster, model: dict[str, Any]) -> None:
    async with cluster.router(**model) as router:
        drawn, responses = await drawn_with(cluster, router)
        assert drawn == VALUES
        assert tokens_of(responses) == answer(PROMPT, 9)
        assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert responses[0].max_tokens == 9
        resolved = responses[0].resolved_params
        assert {name: getattr(resolved, name) for name in DRAWN} == VALUES


@pytest.mark.parametrize("given", [*({name: value} for name, value in NEUTRAL.items()), NEUTRAL, {"temperature": 0.0}])
async def test_what_a_request_says_itself_wins(
    cluster: ScriptedCluster, model: dict[str, Any], given: dict[str, Any]
) -> None:
    async with cluster.router(**model) as router:
        drawn, _ = await drawn_with(cluster, router, **given)
        assert drawn == VALUES | given


async def test_a_request_may_be_longer_than_the_models_max_new_tokens(
    cluster: ScriptedCluster, model: dict[str, Any]
) -> None:
    async with cluster.router(**model) as router:
        _, responses = await drawn_with(cluster, router, max_tokens=20)
        assert tokens_of(responses) == answer(PROMPT, 20)


async def test_min_tokens_beyond_the_default_of_max_tokens_is_refused_by_name(
    cluster: ScriptedCluster, model: dict[str, Any]
) -> None:
    async with cluster.router(**model) as router:
        with pytest.raises(aio.AioRpcError) as refused:
            await collect(router.stub.Generate(asks(min_tokens=10), timeout=60))
        error = error_of(refused.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value, error.limit) == ("params.min_tokens", "10", "a whole number in [0, 9]")


async def test_none_ignores_the_models_values(cluster: ScriptedCluster, model: dict[str, Any]) -> None:
    async with cluster.router(**model, generation_config="none", max_attempts=1) as router:
        drawn, responses = await drawn_with(cluster, router)
        assert drawn == NEUTRAL
        assert responses[0].max_tokens == MAX_MODEL_LEN - len(PROMPT)


async def test_a_model_without_values_draws_as_ever(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        drawn, _ = await drawn_with(cluster, router, max_tokens=3)
        assert drawn == NEUTRAL


async def test_a_path_replaces_the_models_values_and_limits_every_answer(
    cluster: ScriptedCluster, model: dict[str, Any], elsewhere: str
) -> None:
    async with cluster.router(**model, generation_config=elsewhere) as router:
        for params in ({}, {"max_tokens": 20}):
            drawn, responses = await drawn_with(cluster, router, **params)
            assert drawn == NEUTRAL | {"temperature": 0.25}
            assert tokens_of(responses) == answer(PROMPT, 4)
            assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        _, responses = await drawn_with(cluster, router, max_tokens=2)
        assert tokens_of(responses) == answer(PROMPT, 2)


async def test_clients_can_see_the_defaults(cluster: ScriptedCluster, model: dict[str, Any]) -> None:
    async with cluster.router(**model) as router, AsyncClient(router.address) as client:
        (shown,) = await client.list_models()
        assert shown.default_params == SamplingParams(**VALUES, max_tokens=9)
        assert (await client.get_model(MODEL)).default_params == shown.default_params
        drawn: Any = await client.generate(prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=2, top_k=5))
        newest = next(request for request in cluster.taken() if request.request_id == drawn.request_id)
        assert {name: getattr(newest.params, name) for name in DRAWN} == VALUES | {"top_k": 5}


async def test_a_bad_parameter_is_refused_as_ever(cluster: ScriptedCluster, model: dict[str, Any]) -> None:
    async with cluster.router(**model) as router:
        for given in ({"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}):
            with pytest.raises(aio.AioRpcError) as refused:
                await collect(router.stub.Generate(asks(**given), timeout=60))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"params.{next(iter(given))}" in (refused.value.details() or "")


async def test_a_re_attach_has_the_length_that_its_first_router_has_resolved(
    cluster: ScriptedCluster, model: dict[str, Any], elsewhere: str
) -> None:
    async with cluster.router(**model, generation_config=elsewhere) as router:
        request = asks(max_tokens=12, seed=1)
        request.request_id, request.secret, request.session = "a", bytes(16), 1
        request.received.token_ids.extend(answer(PROMPT, 2))
        for max_tokens, expected in ((7, 7), (0, 4)):
            request.received.max_tokens = max_tokens
            request.session += 1
            responses = [response async for response in router.stub.Generate(request, timeout=60)]
            assert responses[0].max_tokens == expected
            assert tokens_of(responses) == answer(PROMPT, expected)[2:]
