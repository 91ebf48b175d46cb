import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from kaveri.kv.layout.layout import KvLayout
from kaveri.models import resolve_model
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, MODEL, answer, collect, invalid, refused, tokens_of


def with_params(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hello", params=sampling_pb2.SamplingParams(**fields))


def with_ids(*ids: int, **fields: Any) -> inference_pb2.GenerateRequest:
    params = sampling_pb2.SamplingParams(**fields)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), params=params)


def with_messages(*messages: tuple[str, str]) -> inference_pb2.GenerateRequest:
    turns = [inference_pb2.Message(role=role, content=content) for role, content in messages]
    return inference_pb2.GenerateRequest(messages=inference_pb2.Messages(messages=turns))


TABLE = {
    "no prompt": (inference_pb2.GenerateRequest(), "prompt"),
    "empty text": (inference_pb2.GenerateRequest(text=""), "prompt.text"),
    "no token ids": (with_ids(), "prompt.token_ids"),
    "no messages": (with_messages(), "prompt.messages"),
    "token id outside the vocabulary": (with_ids(300, 1536), "prompt.token_ids"),
    "largest token id": (with_ids(2**32 - 1), "prompt.token_ids"),
    "stop token id outside the vocabulary": (with_params(stop_token_ids=[1536]), "params.stop_token_ids"),
    "prompt as long as the model": (with_ids(*[300] * MAX_MODEL_LEN), "prompt"),
    "prompt and answer too long": (with_ids(300, 300, max_tokens=MAX_MODEL_LEN - 1), "params.max_tokens"),
    "huge max_tokens": (with_params(max_tokens=2**32 - 1), "params.max_tokens"),
    "negative temperature": (with_params(temperature=-0.5), "params.temperature"),
    "request id too long": (inference_pb2.GenerateRequest(text="hello", request_id="é" * 65), "request_id"),
}


@pytest.mark.parametrize("case", TABLE)
async def test_bad_input_names_the_field(cluster: ScriptedCluster, case: str) -> None:
    request, field = TABLE[case]
    async with cluster.router() as router:
        error = await invalid(collect(router.stub.Generate(request, timeout=60)))
        assert error.field == field
        assert error.limit
        assert "(" not in str(error.value), "a value as the router holds it, not as the caller gave it"
        assert cluster.taken() == []


async def test_text_whose_tokens_the_model_does_not_have_costs_no_attempt(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(resolve_model(MODEL), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 290}))
    cut = ModelTokenizer.load(str(folder))
    text = tokenizer.backend.decode([300, 301])
    async with scripted_cluster(cut) as cluster, cluster.router() as router:
        for request, field in (
            (inference_pb2.GenerateRequest(text=text), "prompt.text"),
            (with_messages(("user", text)), "prompt.messages"),
        ):
            error = await invalid(collect(router.stub.Generate(request, timeout=60)))
            assert error.field == field
        assert not cluster.taken()
    cut.close()


async def test_an_unknown_model_is_not_found(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await refused(
            collect(router.stub.Generate(inference_pb2.GenerateRequest(model="other", text="hello"), timeout=60)),
            grpc.StatusCode.NOT_FOUND,
            "kaveri-tiny",
        )


async def test_the_longest_request_that_fits_is_taken(cluster: ScriptedCluster) -> None:
    prompt = (300,) * (MAX_MODEL_LEN - 1)
    async with cluster.router() as router:
        assert tokens_of(await collect(router.ask(prompt, max_tokens=1))) == answer(prompt, 1)


async def test_a_long_text_is_tokenized_like_a_short_one(cluster: ScriptedCluster) -> None:
    text = "count the words of this line. " * 200
    request = inference_pb2.GenerateRequest(text=text, params=sampling_pb2.SamplingParams(max_tokens=1))
    async with cluster.router() as router:
        await collect(router.stub.Generate(request, timeout=60))
        assert list(cluster.taken()[0].token_ids) == cluster.tokenizer.backend.encode(text).ids


async def test_a_prompt_that_no_decode_pool_holds_is_refused_with_the_limit(tokenizer: ModelTokenizer) -> None:
    layout = KvLayout("fingerprint", 2, 16, 2, 32, "float32")
    async with scripted_cluster(tokenizer, layout=layout) as cluster, cluster.router() as router:
        assert await collect(router.stub.Generate(with_ids(*[300] * 1599, max_tokens=2), timeout=60))
        too_long = collect(router.stub.Generate(with_ids(*[300] * 1600, max_tokens=2), timeout=60))
        await refused(too_long, grpc.StatusCode.INVALID_ARGUMENT, "1599")
        assert len(cluster.taken()) == 1
