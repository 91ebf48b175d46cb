import asyncio

import grpc
import pytest
from transformers import AutoTokenizer

from kaveri.lives.request_values import Ended
from kaveri.models import resolve_model
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import (
    MAX_MODEL_LEN,
    MODEL,
    PROMPT,
    answer,
    ask,
    collect,
    eventually,
    logprobs_at,
    refused,
    rest_of,
    text_of,
    tokens_of,
)
from tests.support.chat_templates import SHAPES


async def test_an_answer_arrives_whole_and_in_order(cluster: ScriptedCluster, tokenizer: ModelTokenizer) -> None:
    async with cluster.router() as router:
        responses = await collect(router.ask(request_id="mine"))
    assert tokens_of(responses) == answer(PROMPT, 20)
    assert text_of(responses) == tokenizer.backend.decode(tokens_of(responses))
    assert [response.request_id for response in responses] == ["mine"] + [""] * (len(responses) - 1)
    last = responses[-1]
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 20)
    assert last.timing.attempts == 1
    assert last.timing.prefill_instance_id in ("prefill-0", "prefill-1")
    assert last.timing.decode_instance_id == "decode-0"
    assert (last.timing.prefill_queue_s, last.timing.prefill_s, last.timing.decode_s) == (0.125, 0.5, 0.25)
    assert (last.timing.kv_bytes, last.timing.kv_transport) == (4096, "tcp")
    # Equal if decode was quicker than the first token, as both are relayed together.
    assert 0 < last.timing.router_s < last.timing.ttft_s <= last.timing.e2e_s


async def test_a_client_gets_the_metadata_of_its_call_once_its_prompt_has_begun(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.hold |= {"started", "first_token"}
    async with cluster.router() as router:
        call = router.ask()
        metadata = asyncio.create_task(call.initial_metadata())
        await eventually(lambda: sum(prefill.open_requests for prefill in cluster.prefills.values()) == 1)
        assert not metadata.done()
        for prefill in cluster.prefills.values():
            begun, prefill.release = prefill.release, asyncio.Event()
            begun.set()
        await asyncio.wait_for(metadata, 60)
        assert sum(prefill.waiting_requests for prefill in cluster.prefills.values()) == 1
        cluster.let_all_go()
        assert tokens_of([await call.read(), *await rest_of(call)]) == answer(PROMPT, 20)


async def test_the_first_token_does_not_wait_for_the_hand_over(cluster: ScriptedCluster) -> None:
    cluster.hold("handed_over")
    for decode in cluster.decodes.values():
        decode.may_step.clear()
    async with cluster.router() as router:
        call = router.ask()
        first = await call.read()
        assert list(first.token_ids) == answer(PROMPT, 1)
        assert first.request_id
        cluster.let_all_go()
        rest = await rest_of(call)
        assert tokens_of([first, *rest]) == answer(PROMPT, 20)


@pytest.mark.parametrize("stop_at", [1, 2, 7])
@pytest.mark.parametrize("repeat_tokens", [False, True])
async def test_the_token_that_ends_an_answer_is_among_its_tokens_and_not_in_its_text(
    cluster: ScriptedCluster, tokenizer: ModelTokenizer, stop_at: int, repeat_tokens: bool
) -> None:
    for instance in (*cluster.prefills.values(), *cluster.decodes.values()):
        instance.stop_at = stop_at
    for decode in cluster.decodes.values():
        decode.repeat_tokens = repeat_tokens
    async with cluster.router() as router:
        responses = await collect(router.ask(logprobs=1))
    tokens = answer(PROMPT, stop_at)
    assert tokenizer.backend.decode(tokens) != tokenizer.backend.decode(tokens[:-1]), "the token has no text anyway"
    assert tokens_of(responses) == tokens
    assert text_of(responses) == tokenizer.backend.decode(tokens[:-1])
    assert sum(len(response.logprobs) for response in responses) == stop_at
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP


async def test_an_answer_of_two_tokens_still_tells_of_its_kv_transfer(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.lives.request.HAND_OVER_GRACE_S", 60.0)
    cluster.hold("handed_over")
    async with cluster.router() as router:
        call = router.ask(max_tokens=2, request_id="two")
        responses = [await call.read()]
        entry = router.router.table.get("two")
        await eventually(lambda: entry.finish is not None)
        assert not isinstance(entry.state, Ended), "it did not wait for the report of its hand-over"
        cluster.let_all_go()
        responses += await rest_of(call)
        assert tokens_of(responses) == answer(PROMPT, 2)
        assert responses[-1].timing.kv_bytes == 4096


async def test_a_slow_reader_gets_a_long_answer_in_responses_of_a_bounded_size(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4_000
    monkeypatch.setattr("kaveri.text.answer.MAX_OUTPUT_BYTES", limit)
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 3
    async with cluster.router() as router:
        call = router.stub.Generate(ask(request_id="long", max_tokens=400, logprobs=5), timeout=20)
        responses = [await call.read()]
        entry = router.router.table.get("long")
        taken = asyncio.Event()
        monkeypatch.setattr(entry, "wait_for_output", taken.wait)
        await eventually(lambda: decode.is_paused)
        cluster.let_all_go()
        await eventually(lambda: isinstance(entry.state, Ended))
        taken.set()
        responses += await rest_of(call)
        assert max(response.ByteSize() for response in responses) < limit
        assert len(responses) > 10
        assert tokens_of(responses) == answer(PROMPT, 400)
        assert text_of(responses) == router.router.intake.tokenizer.backend.decode(answer(PROMPT, 400))
        logprobs = [each for response in responses for each in response.logprobs]
        text_offsets = [each.text_offset for each in logprobs]
        assert text_offsets == sorted(text_offsets)
        for each in logprobs:
            each.ClearField("text_offset")
        assert logprobs == [logprobs_at(index, 5) for index in range(400)]
        assert [bool(response.finish_reason) for response in responses] == [False] * (len(responses) - 1) + [True]


async def test_a_stop_text_over_token_boundaries_ends_the_request_everywhere(
    cluster: ScriptedCluster, tokenizer: ModelTokenizer
) -> None:
    whole = tokenizer.backend.decode(answer(PROMPT, 30))
    fifth = tokenizer.backend.decode(answer(PROMPT, 5))
    stop = whole[len(fifth) - 2 : len(fifth) + 2]
    async with cluster.router() as router:
        call = router.ask(request_id="stops", max_tokens=400, stop=(stop,))
        responses = await collect(call)
        assert text_of(responses) == whole[: whole.index(stop)]
        assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
        await eventually(lambda: ("stops", 1) in cluster.decodes["decode-0"].aborted)


async def test_all_that_prefill_reports_may_come_in_one_response(
    cluster: ScriptedCluster, tokenizer: ModelTokenizer
) -> None:
    for prefill in cluster.prefills.values():
        prefill.joins = True
    first = tokenizer.backend.decode(answer(PROMPT, 1))
    async with cluster.router() as router:
        whole = await collect(router.ask())
        assert tokens_of(whole) == answer(PROMPT, 20)
        assert whole[-1].timing.kv_bytes == 4096
        stopped = await collect(router.ask(stop=(first,)))
        assert (tokens_of(stopped), text_of(stopped)) == (answer(PROMPT, 1), "")
        assert stopped[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP


async def test_the_parts_of_a_message_reach_a_template_that_goes_over_parts(cluster: ScriptedCluster) -> None:
    plain = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    plain.chat_template = SHAPES["parts, picked by type"]
    tokenizer = ModelTokenizer(plain, cluster.tokenizer.vocab_size)
    turns = [inference_pb2.Message(role="user", content="one"), inference_pb2.Message(role="user", parts=["a", "b"])]
    messages = inference_pb2.Messages(messages=turns)
    params = sampling_pb2.SamplingParams(max_tokens=1)
    cluster.tokenizer = tokenizer
    async with cluster.router() as router:
        await collect(router.stub.Generate(inference_pb2.GenerateRequest(messages=messages, params=params), timeout=60))
    text = tokenizer.backend.decode(list(cluster.taken()[0].token_ids), skip_special_tokens=False)
    assert text == "<|user|>one\n<|user|>a\nb\n<|assistant|>"
    tokenizer.close()


async def test_models_are_listed_with_their_limits(cluster: ScriptedCluster, tokenizer: ModelTokenizer) -> None:
    async with cluster.router() as router:
        await eventually(lambda: len(router.router.store.view().instances) == 5)
        (model,) = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.vocab_size) == (MODEL, MAX_MODEL_LEN, tokenizer.vocab_size)
        assert model.has_chat_template
        assert model.ready
        assert (await router.stub.GetModel(inference_pb2.GetModelRequest(model=MODEL))).model == model
        await refused(router.stub.GetModel(inference_pb2.GetModelRequest(model="other")), grpc.StatusCode.NOT_FOUND)
