import time
from collections.abc import AsyncIterator

import grpc
import pytest

from kaveri.policy.placement import PlacementPolicy
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import MAX_MODEL_LEN, MODEL, collect, eventually, finish, refused, tokens_of


@pytest.fixture
async def colocated(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    async with scripted_cluster(tokenizer, 0, 0) as cluster:
        for name in ("colocated-0", "colocated-1"):
            await cluster.add_colocated(name)
        yield cluster


async def test_colocated_instances_alone_make_a_model_ready_and_answer(colocated: ScriptedCluster) -> None:
    async with colocated.router() as router:
        response = await router.stub.GetModel(inference_pb2.GetModelRequest(model=MODEL), timeout=60)
        assert response.model.ready
        assert response.model.max_model_len == MAX_MODEL_LEN
        last = await finish(router.ask())
        timing = last.timing
        assert timing.prefill_instance_id == timing.decode_instance_id
        await collect(router.ask(max_tokens=1))


async def test_an_abort_reaches_it_before_it_has_said_that_it_decodes(colocated: ScriptedCluster) -> None:
    for prefill, _ in colocated.colocated.values():
        prefill.hold.add("placed")
    async with colocated.router() as router:
        call = router.ask(request_id="a")
        await eventually(lambda: any(prefill.waiting_requests for prefill, _ in colocated.colocated.values()))
        call.cancel()
        await eventually(lambda: any(decode.aborted == [("a", 1)] for _, decode in colocated.colocated.values()))


async def test_a_prefill_instance_without_decode_is_passed_over_for_a_colocated_one(colocated: ScriptedCluster) -> None:
    prefill = await colocated.add_prefill("prefill-0")
    async with colocated.router(placement_policy=PlacementPolicy.RANDOM) as router:
        await eventually(lambda: "prefill-0" in router.router.store.view().instances)
        for number in range(8):
            assert tokens_of(await collect(router.ask((300 + number,))))
        assert not prefill.requests


async def test_with_no_instance_of_either_kind_requests_are_unavailable(tokenizer: ModelTokenizer) -> None:
    async with scripted_cluster(tokenizer, decodes=0) as cluster, cluster.router(unavailable_after_s=0.2) as router:
        started_s = time.monotonic()
        await refused(collect(router.ask()), grpc.StatusCode.UNAVAILABLE, "decode")
        assert 0.15 < time.monotonic() - started_s < 20
