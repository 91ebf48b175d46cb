"""min_tokens at the router: stop texts before them, limits, and instances that do not know them."""

from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.errors import InvalidArgument
from kaveri.policy.placement import PlacementPolicy
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, PROMPT, answer, ask, collect, text_of, tokens_of


def asks(min_tokens: int, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> inference_pb2.GenerateRequest:
    request = ask(prompt, **fields)
    request.params.min_tokens = min_tokens
    return request


@pytest.mark.parametrize("min_tokens", [7, 20])
async def test_an_instance_that_ends_an_answer_too_early_has_lost_it(cluster: ScriptedCluster, min_tokens: int) -> None:
    for decode in cluster.decodes.values():
        decode.stop_at = 7
    # Tokens that overtake the first one, which comes from prefill, are lost with their attempt.
    async with cluster.router(max_attempts=16) as router:
        ended = await collect(router.stub.Generate(asks(6), timeout=60))
        assert tokens_of(ended) == answer(PROMPT, 7)
        assert ended[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
        whole = await collect(router.stub.Generate(asks(min_tokens), timeout=60))
        assert tokens_of(whole) == answer(PROMPT, 20)
        assert whole[-1].timing.attempts >= 2


async def test_a_first_token_that_ends_an_answer_too_early_is_drawn_elsewhere(cluster: ScriptedCluster) -> None:
    cluster.prefills["prefill-0"].stop_at = 1
    async with cluster.router(placement_policy=PlacementPolicy.ROUND_ROBIN) as router:
        attempts = []
        for number in range(2):
            responses = await collect(router.stub.Generate(asks(1, (300 + number,)), timeout=60))
            assert tokens_of(responses) == answer((300 + number,), 20)
            attempts.append(responses[-1].timing.attempts)
    assert sorted(attempts) == [1, 2]


async def test_a_cluster_that_does_not_know_min_tokens_is_named(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.stop_at = 1
    async with cluster.router() as router:
        with pytest.raises(aio.AioRpcError) as refused:
            await collect(router.stub.Generate(asks(1), timeout=60))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "min_tokens" in (refused.value.details() or "")


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
