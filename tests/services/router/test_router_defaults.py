import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import SamplingParams
from kaveri.models import resolve_model
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import (
    MAX_MODEL_LEN,
    MODEL,
    PROMPT,
    answer,
    ask,
    collect,
    invalid,
    text_of,
    tokens_of,
)

DRAWN = ("temperature", "top_p", "top_k")
VALUES = {"temperature": 0.5, "top_p": 0.75, "top_k": 20}
"""Exact in float32."""
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = shutil.copytree(resolve_model(MODEL), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(VALUES | {"max_new_tokens": 9, "do_sample": False}))
    return {"model": str(folder), "served_model_name": MODEL}


@pytest.fixture
def elsewhere(tmp_path: Path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"temperature": 0.25, "max_new_tokens": 4}))
    return str(path)


def asks(**params: Any) -> inference_pb2.GenerateRequest:
    tokens = inference_pb2.TokenIds(ids=PROMPT)
    if not params:
        return inference_pb2.GenerateRequest(token_ids=tokens)
    return inference_pb2.GenerateRequest(token_ids=tokens, params=sampling_pb2.SamplingParams(**params))


async def drawn_with(
    cluster: ScriptedCluster, router: RouterUnderTest, **params: Any
) -> tuple[dict[str, Any], list[inference_pb2.GenerateResponse]]:
    """Sampling parameters that an instance got for a request with `params`, and the answer."""
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
        assert cluster.taken()[0].params.HasField("seed")
        resolved = responses[0].resolved_params
        assert {name: getattr(resolved, name) for name in DRAWN} == VALUES


@pytest.mark.parametrize("given", [*({name: value} for name, value in NEUTRAL.items()), NEUTRAL, {"temperature": 0.0}])
async def test_what_a_request_says_itself_wins(
    cluster: ScriptedCluster, model: dict[str, Any], given: dict[str, Any]
) -> None:
    async with cluster.router(**model) as router:
        drawn, _ = await drawn_with(cluster, router, **given)
        assert drawn == VALUES | given


async def test_min_tokens_beyond_the_default_of_max_tokens_is_refused_by_name(
    cluster: ScriptedCluster, model: dict[str, Any]
) -> None:
    async with cluster.router(**model) as router:
        error = await invalid(collect(router.stub.Generate(asks(min_tokens=10), timeout=60)))
        assert (error.field, error.value, error.limit) == ("params.min_tokens", "10", "a whole number in [0, 9]")


async def test_none_ignores_the_models_values(cluster: ScriptedCluster, model: dict[str, Any]) -> None:
    async with cluster.router(**model, generation_config="none", max_attempts=1) as router:
        drawn, responses = await drawn_with(cluster, router)
        assert drawn == NEUTRAL
        assert responses[0].max_tokens == MAX_MODEL_LEN - len(PROMPT)


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


def at_least(min_tokens: int, **fields: Any) -> inference_pb2.GenerateRequest:
    request = ask(**fields)
    request.params.min_tokens = min_tokens
    return request


async def test_a_stop_text_ends_the_answer_behind_min_tokens_only(
    cluster: ScriptedCluster, tokenizer: ModelTokenizer
) -> None:
    stop = tokenizer.backend.decode(answer(PROMPT, 20)[4:6])
    async with cluster.router() as router:
        cut = await collect(router.stub.Generate(at_least(5, stop=(stop,)), timeout=60))
        assert cut[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
        assert len(tokens_of(cut)) == 6
        whole = await collect(router.stub.Generate(at_least(6, stop=(stop,)), timeout=60))
        assert text_of(whole) == tokenizer.backend.decode(answer(PROMPT, 20))


async def test_more_tokens_than_there_is_room_for_are_refused_by_name(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        for request in (at_least(21), at_least(MAX_MODEL_LEN)):
            if request.params.min_tokens == MAX_MODEL_LEN:
                request.params.ClearField("max_tokens")
            error = await invalid(collect(router.stub.Generate(request, timeout=60)))
            assert error.field == "params.min_tokens"
