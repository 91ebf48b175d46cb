"""min_tokens at the router: stop texts before them, and limits."""

from typing import Any

import pytest
from grpc import aio

from kaveri.errors import InvalidArgument
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, PROMPT, answer, ask, collect, text_of, tokens_of


def asks(min_tokens: int, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> inference_pb2.GenerateRequest:
    request = ask(prompt, **fields)
    request.params.min_tokens = min_tokens
    return request


async def test_a_stop_text_ends_the_answer_behind_min_tokens_only(
    cluster: ScriptedCluster, tokenizer: ModelTokenizer
) -> None:
    stop = tokenizer.backend.decode(answer(PROMPT, 20)[4:6])
    async with cluster.router() as router:
        cut = await collect(router.stub.Generate(asks(5, stop=(stop,)), timeout=60))
        assert cut[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
        assert len(tokens_of(cut)) == 6
        whole = await collect(router.stub.Generate(asks(6, stop=(stop,)), timeout=60))
        assert text_of(whole) == tokenizer.backend.decode(answer(PROMPT, 20))


async def test_more_tokens_than_there_is_room_for_are_refused_by_name(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        for request in (asks(21), asks(MAX_MODEL_LEN)):
            if request.params.min_tokens == MAX_MODEL_LEN:
                request.params.ClearField("max_tokens")
            with pytest.raises(aio.AioRpcError) as refused:
                await collect(router.stub.Generate(request, timeout=60))
            error = error_of(refused.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == "params.min_tokens"
