import asyncio
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from transformers import AutoTokenizer

from kaveri.domain.sampling import derived_seed
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from kaveri.text.tokenizer import ModelTokenizer
from services.router.config import RouterConfig
from services.router.service import serve
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.engine_door import WITHIN_S, EngineDoor, asks, open_door
from tests.services.router.scripted_answers import PROMPT, answer, eventually, refused
from tests.services.router.test_router_cancellation import PHASES, all_legs_are_over, bring_to, read_placements
from tests.support.redis_fixture import free_port
from tests.support.scripted_ports import plain_channel


async def test_a_whole_answer_is_one_message(door: EngineDoor) -> None:
    (response,) = await door.ask(asks())
    assert response.complete == vllm_engine_pb2.GenerateComplete(
        output_ids=answer(PROMPT, 20), finish_reason="length", prompt_tokens=3, completion_tokens=20
    )


async def test_a_streamed_answer_has_each_token_once_and_ends_as_vllms_does(door: EngineDoor) -> None:
    *chunks, last = await door.ask(asks(stream=True))
    assert [token_id for each in chunks for token_id in each.chunk.token_ids] == answer(PROMPT, 20)
    assert all(each.chunk.prompt_tokens == 3 for each in chunks)
    assert all(each.chunk.completion_tokens == len(each.chunk.token_ids) for each in chunks)
    # As in vLLM's own servicer, the last message repeats the last chunk.
    assert last.complete.output_ids == chunks[-1].chunk.token_ids
    assert (last.complete.finish_reason, last.complete.prompt_tokens) == ("length", 3)


async def test_a_text_is_tokenized_as_in_our_own_api(door: EngineDoor, tokenizer: ModelTokenizer) -> None:
    request = asks()
    request.text = "Count from 1 to 9."
    (response,) = await door.ask(request)
    prompt = tuple(tokenizer.backend.encode("Count from 1 to 9.").ids)
    assert response.complete.output_ids == answer(prompt, 20)
    assert response.complete.prompt_tokens == len(prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_with_their_tokens(door: EngineDoor, stream: bool) -> None:
    responses = await door.ask(asks(stream=stream, logprobs=2, max_tokens=5))
    kind = "chunk" if stream else "complete"
    reports = [getattr(each, kind).output_logprobs for each in responses if each.WhichOneof("response") == kind]
    assert [token_id for each in reports for token_id in each.token_ids] == answer(PROMPT, 5)
    assert [value for each in reports for value in each.token_logprobs] == [0, -1, -2, -3, -4]
    tops = [top for each in reports for top in each.top_logprobs]
    assert [(list(top.token_ids), list(top.values)) for top in tops] == [([0, 1], [0, -1])] * 5


async def test_without_likely_tokens_only_the_drawn_ones_are_reported(door: EngineDoor) -> None:
    (response,) = await door.ask(asks(logprobs=0, max_tokens=2))
    report = response.complete.output_logprobs
    assert (list(report.token_ids), list(report.top_logprobs)) == (answer(PROMPT, 2), [])


async def test_the_end_names_the_stop_text_that_was_met(door: EngineDoor, tokenizer: ModelTokenizer) -> None:
    texts = [tokenizer.token_piece(token_id).text for token_id in answer(PROMPT, 6)]
    stop = texts[5]
    assert stop.strip()
    assert stop not in "".join(texts[:5])
    request = asks(stop=["never", stop], skip_special_tokens=True)
    (response,) = await door.ask(request)
    assert response.complete.finish_reason == "stop"
    assert response.complete.matched_stop_str == stop
    assert response.complete.output_ids == answer(PROMPT, 6)


async def test_the_end_names_the_stop_token_that_was_met(cluster: ScriptedCluster, door: EngineDoor) -> None:
    cluster.decodes["decode-0"].stop_at = 4
    (response,) = await door.ask(asks(stop_token_ids=[answer(PROMPT, 4)[3]]))
    assert (response.complete.finish_reason, response.complete.matched_token_id) == ("stop", answer(PROMPT, 4)[3])
    (response,) = await door.ask(asks())
    assert response.complete.WhichOneof("matched_stop") is None, "the model's own end is not named"


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_have_their_indices_and_derived_seeds(
    cluster: ScriptedCluster, door: EngineDoor, stream: bool
) -> None:
    responses = await door.ask(asks(stream=stream, request_id="many", n=3, seed=-1))
    completes = [each.complete for each in responses if each.HasField("complete")]
    assert sorted(each.index for each in completes) == [0, 1, 2]
    for index in range(3):
        chunks = [each.chunk for each in responses if each.HasField("chunk") and each.chunk.index == index]
        if stream:
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == answer(PROMPT, 20)
        else:
            assert completes[index].output_ids == answer(PROMPT, 20)
    asked = {request.request_id: request.params.seed for request in cluster.taken()}
    assert asked == {f"many-{number}": derived_seed(2**64 - 1, number) for number in range(3)}
    assert asked["many-0"] == 2**64 - 1


async def test_one_answer_of_several_that_fails_ends_the_call(cluster: ScriptedCluster, tokenizer: Any) -> None:
    async with open_door(cluster, max_requests=2) as door:
        await refused(door.ask(asks(n=3)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        await all_legs_are_over(cluster, door.router)


@pytest.mark.parametrize(("n", "again_n"), [(1, 1), (2, 2), (1, 2), (2, 1)])
async def test_an_id_in_flight_is_refused(cluster: ScriptedCluster, door: EngineDoor, n: int, again_n: int) -> None:
    # Otherwise an Abort of the id would reach only one of the two calls.
    reached = await bring_to(cluster, "decoding")
    first = asyncio.create_task(door.ask(asks(request_id="mine", n=n)))
    await eventually(reached)
    await refused(asyncio.wait_for(door.ask(asks(request_id="mine", n=again_n)), 30.0), grpc.StatusCode.ALREADY_EXISTS)
    await door.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]), timeout=WITHIN_S)
    assert {each.complete.finish_reason for each in await first} == {"abort"}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("n", [1, 2])
async def test_abort_ends_the_answers_as_aborted_and_every_leg_with_them(
    cluster: ScriptedCluster, phase: str, n: int
) -> None:
    reached = await bring_to(cluster, phase)
    async with open_door(cluster) as door:
        asking = asyncio.create_task(door.ask(asks(request_id="mine", n=n)))
        await eventually(reached)
        await eventually(lambda: len(door.router.router.table) == n)
        await read_placements(door.router, phase)
        ids = ["other", "mine", "mine", ""]
        await door.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=ids), timeout=WITHIN_S)
        responses = await asking
        assert [each.complete.finish_reason for each in responses] == ["abort"] * n
        for each in responses:
            assert each.complete.output_ids == answer(PROMPT, 20)[: each.complete.completion_tokens]
        await all_legs_are_over(cluster, door.router)


async def test_abort_takes_a_bounded_number_of_ids(door: EngineDoor) -> None:
    for ids in (["x"] * 257, ["x" * 129]):
        await refused(
            door.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=ids), timeout=WITHIN_S),
            grpc.StatusCode.INVALID_ARGUMENT,
        )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_goes_ends_every_leg(cluster: ScriptedCluster, phase: str, n: int) -> None:
    reached = await bring_to(cluster, phase)
    async with open_door(cluster) as door:
        call = door.stub.Generate(asks(n=n, stream=True), timeout=WITHIN_S)
        reading = asyncio.create_task(call.read())
        await eventually(reached)
        await eventually(lambda: len(door.router.router.table) == n)
        await read_placements(door.router, phase)
        call.cancel()
        await all_legs_are_over(cluster, door.router)
        await asyncio.wait((reading,))


async def test_an_answer_too_large_for_one_message_is_refused_and_can_be_streamed(
    door: EngineDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Less than one token takes, as the last message may have any number of tokens.
    monkeypatch.setattr("kaveri.hosting.vllm_grpc.MAX_MESSAGE_BYTES", 40)
    assert (await door.refusal(asks(logprobs=5))).field == "stream"
    assert len(await door.ask(asks(logprobs=5, stream=True))) > 1


async def test_health_says_why_no_request_would_be_taken(tokenizer: ModelTokenizer) -> None:
    async with scripted_cluster(tokenizer, 0, 0) as cluster, open_door(cluster) as door:
        health = await door.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert (health.healthy, health.message) == (False, "no prefill instance is ready")
        await cluster.add_prefill("prefill-0")
        await cluster.add_decode("decode-0")
        await eventually(lambda: len(door.router.router.store.view().instances) == 3)
        health = await door.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert (health.healthy, health.message) == (True, "")
        request = health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine")
        standard = await health_pb2_grpc.HealthStub(door.router.channel).Check(request, timeout=WITHIN_S)
        assert standard.status == health_pb2.HealthCheckResponse.SERVING
        door.router.router.drain()
        health = await door.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert (health.healthy, health.message) == (False, "this router is draining")
        info = await door.stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest(), timeout=WITHIN_S)
        assert info.is_paused


async def test_the_model_is_described(door: EngineDoor) -> None:
    info = await door.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=WITHIN_S)
    assert (info.served_model_name, info.model_path, info.is_generation) == ("kaveri-tiny", "kaveri-tiny", True)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (8192, 8191, 1536)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert (list(info.eos_token_ids), info.bos_token_id) == ([2], 1)
    assert info.default_sampling_params_json == ""


async def test_callers_are_told_the_models_defaults_and_complete_their_requests_themselves(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 30}))
    async with open_door(cluster, generation_config=str(path)) as door:
        info = await door.stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=WITHIN_S)
        assert info.default_sampling_params_json == '{"temperature":0.6,"top_p":0.95,"top_k":20}'
        request = asks()
        request.sampling_params.ClearField("temperature")
        await door.ask(request)
        (sent,) = cluster.taken()
        assert (sent.params.temperature, sent.params.top_p, sent.params.top_k) == (1.0, 1.0, 0)


async def test_the_loads_of_all_instances_are_one_schedulers(tokenizer: ModelTokenizer) -> None:
    layout = KvLayout("m", layer_count=1, block_tokens=16, kv_head_count=1, head_dim=2, dtype="float32")
    async with scripted_cluster(tokenizer, decodes=2, layout=layout) as cluster, open_door(cluster) as door:
        response = await door.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=0, include=["core"]), timeout=9)
        (load,) = response.loads
        assert response.dp_rank_count == 1
        assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (0, 2 * 100 * 16, 0.0)
        await refused(
            door.stub.GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1), timeout=WITHIN_S),
            grpc.StatusCode.INVALID_ARGUMENT,
        )


async def test_the_tokenizer_can_be_built_from_what_is_sent(door: EngineDoor, tmp_path: Any) -> None:
    chunks = [chunk async for chunk in door.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=WITHIN_S)]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert "model.safetensors" not in archive.namelist()
        archive.extractall(tmp_path)
    built = AutoTokenizer.from_pretrained(tmp_path)
    ours = AutoTokenizer.from_pretrained("kaveri/models/kaveri_tiny")
    messages = [{"role": "user", "content": "Count from 1 to 9."}]
    assert built.apply_chat_template(messages) == ours.apply_chat_template(messages)


async def test_what_is_not_built_is_unimplemented(door: EngineDoor) -> None:
    for call in (
        door.stub.Embed(vllm_engine_pb2.EmbedRequest(), timeout=WITHIN_S),
        door.stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=WITHIN_S),
        door.stub.StartProfile(common_pb2.StartProfileRequest(), timeout=WITHIN_S),
        door.stub.StopProfile(common_pb2.StopProfileRequest(), timeout=WITHIN_S),
        door.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=WITHIN_S).read(),
    ):
        await refused(call, grpc.StatusCode.UNIMPLEMENTED)


async def test_the_service_is_on_the_routers_own_port_alone_and_with_the_flag_alone(
    cluster: ScriptedCluster, tmp_path: Any
) -> None:
    keys_file, public_port = str(tmp_path / "keys.toml"), free_port()
    metadata = (("authorization", f"Bearer {add_key(keys_file, 'alice', KeyLimits())}"),)
    given = {"keys_file": keys_file, "public_port": public_port, "redis_url": "redis://127.0.0.1:1/0"}

    async def health(target: str, open_channel: Any = plain_channel) -> Any:
        async with open_channel(target) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            return await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=WITHIN_S, metadata=metadata)

    async with open_door(cluster, **given) as door:
        assert (await health(door.router.address)).healthy
        await refused(health(f"127.0.0.1:{public_port}", aio.insecure_channel), grpc.StatusCode.UNIMPLEMENTED)
    async with cluster.router() as router:
        await refused(health(router.address), grpc.StatusCode.UNIMPLEMENTED)


async def test_without_the_extra_the_flag_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    monkeypatch.delitem(sys.modules, "services.router.vllm_grpc", raising=False)
    monkeypatch.delattr("services.router.vllm_grpc", raising=False)
    with pytest.raises(ConfigError, match=r"^--vllm-grpc: .*pip install .*\[vllm-grpc\]'$"):
        await serve(RouterConfig(vllm_grpc=True), asyncio.Event())


async def test_abort_reaches_several_answers_that_wait_for_an_instance(tokenizer: ModelTokenizer) -> None:
    async with scripted_cluster(tokenizer, 0, 0) as cluster, open_door(cluster) as door:
        asking = asyncio.create_task(door.ask(asks(request_id="mine", n=2)))
        # The server takes a channel's calls in order: this one follows the one above.
        await door.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        await door.stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]), timeout=WITHIN_S)
        await cluster.add_prefill("prefill-0")
        await cluster.add_decode("decode-0")
        assert [each.complete.finish_reason for each in await asking] == ["abort", "abort"]
        assert not cluster.taken()
