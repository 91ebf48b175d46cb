"""Prefill and decode instances with different KV block layouts; layouts that cannot be mapped are refused."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kaveri.engine.stepwise.fake import FakeModel
from kaveri.kv.transports import TRANSPORT_NAMES
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

over_each_transport = pytest.mark.parametrize("kv_transports", [(name,) for name in TRANSPORT_NAMES])


@over_each_transport
@pytest.mark.parametrize(("here", "there"), [(16, 64), (128, 16), (48, 32)])
async def test_instances_with_blocks_of_unlike_size_answer_with_exact_tokens(
    cluster: Any, kv_transports: tuple[str, ...], here: int, there: int
) -> None:
    prefill = await cluster.prefill(block_tokens=here, chunk_tokens=64)
    await cluster.decode(block_tokens=there)
    router = await cluster.router()
    chance = random.Random(here)
    prompts = {f"r{number}": prompt(number, chance.randint(1, 400)) for number in range(12)}
    calls = {name: router.prefill(prefill, name, token_ids, max_tokens=10) for name, token_ids in prompts.items()}
    for name, call in calls.items():
        # The fake engine verifies every earlier token's KV in every step.
        assert await router.answer(call, name) == FakeModel().answer(prompts[name], 0, 10), name
        assert call.get("handed_over").kv_transport == f"{kv_transports[0]} mapped"
    await cluster.all_free()


async def test_transformers_draws_the_same_tokens_behind_a_mapped_push(cluster: Any, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", max_positions=512)
    model = {"engine": "transformers", "model": str(folder), "dtype": "float32", "kv_cache_memory": 2**23}
    prefill = await cluster.prefill(block_tokens=64, chunk_tokens=96, **model)
    decode = await cluster.decode(block_tokens=16, **model)
    router = await cluster.router()
    chance = random.Random(3)
    vocab_size = decode.engine.info.vocab_size
    prompts = {
        f"r{size}": [chance.randrange(vocab_size) for _ in range(size)] for size in (1, 16, 63, 64, 65, 200, 300)
    }
    calls = {
        name: router.prefill(prefill, name, token_ids, max_tokens=12, temperature=0.0)
        for name, token_ids in prompts.items()
    }
    reference = PlainTransformers(folder)
    for name, call in calls.items():
        expected = await asyncio.to_thread(reference.answer, prompts[name], 12)
        answer = await router.answer(call, name)
        assert answer == expected, name
        assert call.get("handed_over").kv_transport.endswith("mapped")
    await cluster.all_free()


@over_each_transport
async def test_a_request_that_is_given_up_while_it_is_mapped_leaves_nothing_behind(cluster: Any) -> None:
    prefill = await cluster.prefill(block_tokens=32, chunk_tokens=32, fake_step_s=0.01)
    decode = await cluster.decode(block_tokens=16)
    router = await cluster.router()
    calls = [router.prefill(prefill, f"r{number}", prompt(number, 400), max_tokens=5) for number in range(4)]
    await eventually(lambda: all(call.seen("placed") for call in calls[:2]), "pushes are under way")
    for number, call in enumerate(calls):
        await call.cancel()
        await decode.abort(f"r{number}")
    await cluster.all_free()
    token_ids = prompt(9, 300)
    call = router.prefill(prefill, "after", token_ids, max_tokens=5)
    assert await router.answer(call, "after") == FakeModel().answer(token_ids, 0, 5)
    await cluster.all_free()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_fingerprint", "another"),
        ("dtype", "float16"),
        ("order", "vllm-opaque-7"),
        ("layer_count", 1),
        ("first_kv_head", 2),
        ("tensor_ranks", 3),
    ],
)
async def test_what_cannot_be_mapped_is_refused_by_the_field_before_room_is_spent(
    cluster: Any, field: str, value: object
) -> None:
    decode = await cluster.decode()
    await cluster.router()
    foreign = replace(decode.engine.info.layout, block_tokens=32, **{field: value})
    with refuses(grpc.StatusCode.FAILED_PRECONDITION, field):
        await decode.reserve("a", 15, layout=foreign)
    assert decode.held_blocks == 0


async def test_a_decode_instance_of_another_model_is_never_asked_and_the_error_says_why(cluster: Any) -> None:
    prefill = await cluster.prefill(block_tokens=32)
    decode = await cluster.decode(fake_eos_probability=1e-9)
    router = await cluster.router()
    call = router.prefill(prefill, "a", prompt(9, 10), max_tokens=5)
    with refuses(grpc.StatusCode.UNAVAILABLE, "decode-0: KV layouts differ in model_fingerprint"):
        await call.ended()
    assert decode.metric("kaveri_decode_requests_total", outcome="refused") == 0
    await cluster.all_free()
