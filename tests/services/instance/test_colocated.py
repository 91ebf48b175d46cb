import asyncio
import random
from typing import Any

import grpc
import pytest

from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from tests.services.conftest import TIGHT, eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses

LONG = 400
SLOW = {"fake_step_s": 0.01}


async def test_a_request_is_answered_by_one_instance_and_nothing_is_pushed(cluster: Any) -> None:
    instance = await cluster.colocated()
    router = await cluster.router()
    token_ids = prompt(1, 50)
    call = router.prefill(instance, "a", token_ids, max_tokens=20)
    assert await router.answer(call, "a") == cluster.expected(token_ids, 20)
    assert (call.kinds[0], call.kinds[-1]) == ("started", "handed_over")
    assert sorted(call.kinds[1:-1]) == ["first_token", "placed"]
    assert call.get("placed").decode_instance_id == "colocated-0"
    handed_over = call.get("handed_over")
    assert (handed_over.kv_bytes, handed_over.kv_transport) == (0, "none")
    assert router.last["a", 1].timing.decode_s > 0
    await cluster.all_free()


@pytest.mark.parametrize("admission", AdmissionPolicy)
@pytest.mark.parametrize("known_lengths", [False, True])
@pytest.mark.parametrize("ordering", [OrderingPolicy.FCFS, OrderingPolicy.SJF])
async def test_many_requests_in_a_pool_that_holds_a_few_are_all_answered_exactly(
    cluster: Any, admission: AdmissionPolicy, known_lengths: bool, ordering: OrderingPolicy
) -> None:
    # The longest alone takes 10 of 12 blocks: prompts wait while answers grow and preempt one another.
    instance = await cluster.colocated(
        chunk_tokens=32, max_batch=8, decode_policy=admission, prefill_policy=ordering, **TIGHT
    )
    router = await cluster.router()
    rng = random.Random(7)
    sizes = {f"r{number}": (rng.randrange(1, 90), rng.randrange(1, 70)) for number in range(40)}
    prompts = {name: prompt(index, sizes[name][0]) for index, name in enumerate(sizes)}
    calls = {
        name: router.prefill(instance, name, prompts[name], sizes[name][1], ignore_eos=known_lengths) for name in sizes
    }
    answers = await asyncio.gather(*(router.answer(calls[name], name) for name in sizes))
    for name, answer in zip(sizes, answers, strict=True):
        assert answer == cluster.expected(prompts[name], sizes[name][1]), name
    assert router.duplicates == 0
    preemptions = sum(last.timing.preemptions for last in router.last.values())
    if admission is AdmissionPolicy.GREEDY or not known_lengths:
        assert preemptions > 0, "there was room for all: the test has shown nothing"
    print(f"{admission}, known {known_lengths}, {ordering}: {preemptions} preemptions")
    await cluster.all_free()


async def test_answers_go_on_while_a_long_prompt_is_computed(cluster: Any) -> None:
    instance = await cluster.colocated(chunk_tokens=16, **SLOW)
    router = await cluster.router()
    answering = router.prefill(instance, "answering", prompt(1, 20), max_tokens=200)
    await eventually(lambda: ("answering", 1) in router.tokens, "it decodes")
    long = router.prefill(instance, "long", prompt(2, LONG), max_tokens=2)
    await eventually(lambda: long.seen("started"), "the prompt's first chunk")
    before = len(router.tokens["answering", 1])
    await eventually(lambda: long.seen("first_token"), "the prompt is computed")
    # 25 chunks, each in a step with a token of the running answer; the first and last may be seen late.
    assert len(router.tokens["answering", 1]) - before >= 20
    await answering.cancel()
    await instance.abort("answering")
    await cluster.all_free()


@pytest.mark.parametrize("phase", ["queued", "computed", "decoding"])
async def test_an_abort_ends_a_request_in_any_phase(cluster: Any, phase: str) -> None:
    instance = await cluster.colocated(chunk_tokens=16, fake_step_s=0.03)
    router = await cluster.router()
    ahead = router.prefill(instance, "ahead", prompt(1, LONG), max_tokens=1)
    await eventually(lambda: ahead.seen("started"), "the one ahead runs")
    if phase == "queued":
        router.prefill(instance, "queued", prompt(2, 100), max_tokens=10)
        await eventually(lambda: instance.load().waiting_requests == 1, "the other one waits")
    if phase == "decoding":
        await ahead.cancel()
        router.prefill(instance, "decoding", prompt(2, 20), max_tokens=400)
        await eventually(lambda: ("decoding", 1) in router.tokens, "it decodes")
    await instance.abort({"queued": "queued", "computed": "ahead", "decoding": "decoding"}[phase])
    if phase == "queued":
        assert not ahead.reading.done(), "another one was aborted too"
        await ahead.cancel()
    await cluster.all_free()


async def test_nobody_can_reserve_room_for_a_push(cluster: Any) -> None:
    instance = await cluster.colocated()
    with refuses(grpc.StatusCode.UNAVAILABLE):
        await instance.reserve("a", 10)
    assert instance.free()


async def test_a_length_that_is_known_to_prefill_is_known_to_decode(cluster: Any) -> None:
    instance = await cluster.colocated(**SLOW)
    router = await cluster.router()
    for name, max_tokens in (("long", 200), ("short", 100)):
        router.prefill(instance, name, prompt(1, 20), max_tokens, ignore_eos=True)
    await eventually(lambda: len(router.tokens) == 2, "both decode")
    assert (instance.load().heavy_requests, instance.load().light_requests) == (1, 1)
    for name in ("long", "short"):
        await instance.abort(name)
    await cluster.all_free()


async def test_its_load_is_that_of_both_phases(cluster: Any) -> None:
    instance = await cluster.colocated(chunk_tokens=16, fake_step_s=0.1)
    router = await cluster.router()
    router.prefill(instance, "decoding", prompt(1, 20), max_tokens=400)
    await eventually(lambda: ("decoding", 1) in router.tokens, "it decodes")
    computing = router.prefill(instance, "computing", prompt(2, LONG), max_tokens=10)
    await eventually(lambda: computing.seen("started"), "the other one is computed")
    router.prefill(instance, "queued", prompt(3, 80), max_tokens=10)
    await eventually(lambda: instance.load().waiting_requests == 1, "the last one waits")
    load = instance.load()
    assert load.running_requests == 2
    assert 80 < load.queued_prefill_tokens <= 480
    assert load.heavy_requests + load.light_requests == 1, "only what decodes is heavy or light there"

    def counts_the_blocks_of_both() -> bool:
        load = instance.load()
        return load.free_blocks == load.total_blocks - instance.held_blocks

    await eventually(counts_the_blocks_of_both, "all blocks that are held are counted")
    for name in ("decoding", "computing", "queued"):
        await instance.abort(name)
    await cluster.all_free()
