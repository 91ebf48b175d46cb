from collections.abc import Sequence

import grpc
import pytest
from grpc import aio

from kaveri import AsyncClient, SamplingParams
from kaveri.domain.sampling import MAX_PROMPT_REPORT
from kaveri.policy.placement import PlacementPolicy
from kaveri.v1 import inference_pb2
from services.router.requests import RequestEntry
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import (
    SECRET,
    answer,
    ask,
    collect,
    eventually,
    invalid,
    prompt_logprobs_at,
    refused,
    tokens_of,
)

PROMPT = tuple(range(300, 311))


def asks(count: int, prompt: tuple[int, ...] = PROMPT, **fields: object) -> inference_pb2.GenerateRequest:
    request = ask(prompt, **fields)  # type: ignore[arg-type]
    request.params.prompt_logprobs = count
    return request


def check_report(responses: Sequence[inference_pb2.GenerateResponse], prompt: tuple[int, ...], count: int) -> None:
    """Each position once, in order, and before the first token."""
    place, begun = 0, False
    for response in responses:
        begun = begun or bool(response.token_ids)
        if not response.HasField("prompt_logprobs"):
            continue
        assert not begun
        report = response.prompt_logprobs
        assert (report.first, len(report.logprobs)) == (place, len(report.token_ids))
        for token_id, entry in zip(report.token_ids, report.logprobs, strict=True):
            assert token_id == prompt[place]
            if place:
                assert entry == prompt_logprobs_at(prompt, place, count)
            else:
                assert (entry.logprob, len(entry.top)) == (0, 0)
            place += 1
    assert place == len(prompt)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
async def test_the_prompt_is_reported_on_before_the_first_token(
    cluster: ScriptedCluster, prompt: tuple[int, ...]
) -> None:
    async with cluster.router() as router:
        responses = await collect(router.stub.Generate(asks(2, prompt), timeout=60))
        assert tokens_of(responses) == answer(prompt, 20)
        check_report(responses, prompt, 2)
        plain = await collect(router.ask(prompt))
        assert not any(response.HasField("prompt_logprobs") for response in plain)


async def test_an_attempt_that_was_lost_within_the_prompt_repeats_nothing(cluster: ScriptedCluster) -> None:
    cluster.prefills["prefill-0"].breaks_within_prompt = True
    attempts = []
    async with cluster.router(placement_policy=PlacementPolicy.ROUND_ROBIN) as router:
        for _ in range(2):
            responses = await collect(router.stub.Generate(asks(1), timeout=60))
            assert tokens_of(responses) == answer(PROMPT, 20)
            check_report(responses, PROMPT, 1)
            attempts.append(responses[-1].timing.attempts)
    assert sorted(attempts) == [1, 2]


async def test_a_prefill_instance_that_does_not_report_has_lost_the_attempt(cluster: ScriptedCluster) -> None:
    cluster.prefills["prefill-0"].knows_prompt_logprobs = False
    async with cluster.router(placement_policy=PlacementPolicy.ROUND_ROBIN) as router:
        for _ in range(2):
            responses = await collect(router.stub.Generate(asks(1), timeout=60))
            check_report(responses, PROMPT, 1)
    for prefill in cluster.prefills.values():
        prefill.knows_prompt_logprobs = False
    async with cluster.router() as router:
        await refused(
            collect(router.stub.Generate(asks(1), timeout=60)), grpc.StatusCode.UNAVAILABLE, "prompt_logprobs"
        )
        with pytest.raises(aio.AioRpcError):
            await router.stub.Generate(asks(1), timeout=60).read()


async def test_a_client_that_re_attaches_without_a_token_gets_the_whole_report(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        first = asks(1, request_id="r", secret=SECRET)
        call = router.stub.Generate(first, timeout=60)
        await call.read()
        call.cancel()
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(first)
        again.session = 1
        again.received.max_tokens = 20
        responses = await collect(router.stub.Generate(again, timeout=60))
        assert tokens_of(responses) == answer(PROMPT, 20)
        check_report(responses, PROMPT, 1)


async def test_the_sdk_names_each_token_of_the_prompt(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router, AsyncClient(router.address) as client:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
        got = await client.generate(prompt_token_ids=PROMPT, params=params)
        assert got.token_ids == tuple(answer(PROMPT, 3))
        assert tuple(token.token_id for token in got.prompt_tokens) == PROMPT
        backend = router.router.intake.tokenizer.backend
        assert [token.text for token in got.prompt_tokens] == [backend.decode([token_id]) for token_id in PROMPT]
        assert got.prompt_tokens[0].logprobs is None
        for place, token in enumerate(got.prompt_tokens[1:], 1):
            expected = prompt_logprobs_at(PROMPT, place, 1)
            assert token.logprobs is not None
            assert token.logprobs.logprob == expected.logprob
            assert token.logprobs.top == ((300, 0.0),)


async def test_a_report_that_would_be_too_large_is_refused_by_name(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        most = MAX_PROMPT_REPORT // 21
        error = await invalid(collect(router.stub.Generate(asks(20, (300,) * (most + 1)), timeout=60)))
        assert error.field == "params.prompt_logprobs"
        assert str(most) in str(error)
        with pytest.raises(aio.AioRpcError) as raised:
            await collect(router.stub.Generate(asks(21), timeout=60))
        assert "prompt_logprobs" in (raised.value.details() or "")


async def test_a_client_is_sent_to_a_decode_instance_behind_the_whole_report(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, wait_for_output = cluster.decodes["decode-0"], RequestEntry.wait_for_output
    decode.pause_at = 7

    async def wait_for_tokens(entry: RequestEntry, *, or_begun: bool = False) -> None:
        await eventually(lambda: len(entry.answer.token_ids) >= 7)
        await wait_for_output(entry)

    # Act as a client that reads slowly.
    monkeypatch.setattr(RequestEntry, "wait_for_output", wait_for_tokens)
    async with cluster.router() as router:
        responses = []
        async for response in router.stub.Generate(asks(1, request_id="r", secret=SECRET, direct=True), timeout=60):
            responses.append(response)
            if response.HasField("tokens_at"):
                decode.may_step.set()
    check_report(responses, PROMPT, 1)
    assert [each.HasField("prompt_logprobs") for each in responses if each.HasField("tokens_at")] == [False]
    assert tokens_of(responses) == answer(PROMPT, 20)
