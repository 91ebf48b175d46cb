"""Requests that are given up, in every phase and by everybody: within a second no block is held anywhere."""

import random
from typing import Any

import grpc

from tests.services.conftest import BLOCK_BYTES, OVER_EACH_TRANSPORT, eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses


def ended(prefill: Any, outcome: str) -> float:
    """How many requests have ended so at the prefill instance."""
    count: float = prefill.metric("kaveri_prefill_requests_total", outcome=outcome)
    return count


@OVER_EACH_TRANSPORT
async def test_a_deadline_that_passes_while_prefilling(cluster: Any) -> None:
    prefill = await cluster.prefill(chunk_tokens=16, fake_step_s=0.5)
    await cluster.decode()
    router = await cluster.router()
    call = router.prefill(prefill, "a", prompt(6, 400), max_tokens=10, timeout_s=1.5)
    with refuses(grpc.StatusCode.DEADLINE_EXCEEDED):
        await call.ended()
    # Of the instance's own timer and the end of the call one comes first.
    await eventually(lambda: ended(prefill, "deadline") + ended(prefill, "cancelled") == 1, "it is given up here too")
    await cluster.all_free()


async def test_a_router_that_stays_away_loses_its_requests_after_the_grace_and_no_other_does(cluster: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode(fake_step_s=0.01)
    gone, staying = await cluster.router("gone"), await cluster.router("staying")
    lost = gone.prefill(prefill, "lost", prompt(7, 60), max_tokens=400)
    kept = staying.prefill(prefill, "kept", prompt(8, 60), max_tokens=100)
    await lost.ended()
    await eventually(lambda: ("lost", 1) in gone.tokens, "it decodes")
    await decode.reserve("reserved", 40, router_id="gone")
    gone.unsubscribe(decode)
    assert await staying.answer(kept, "kept") == cluster.expected(prompt(8, 60), 100)
    await cluster.all_free()
    assert not gone.finished("lost")
    assert decode.metric("kaveri_decode_requests_total", outcome="finished") == 1
    assert decode.metric("kaveri_decode_requests_total", outcome="router_gone") == 2


@OVER_EACH_TRANSPORT
async def test_random_cancels_leave_nothing_behind_and_spoil_no_other_answer(cluster: Any) -> None:
    prefill = await cluster.prefill(chunk_tokens=32, fake_step_s=0.001)
    decode = await cluster.decode(max_model_len=160, kv_cache_memory=24 * BLOCK_BYTES, fake_step_s=0.001)
    router = await cluster.router()
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    calls, lengths, victims = {}, {}, set()
    for number in range(60):
        name = f"r{number % 20}-{number}"
        token_ids = prompt(number, rng.randrange(1, 120))
        lengths[name] = token_ids, rng.randrange(1, 40)
        calls[name] = router.prefill(prefill, name, token_ids, max_tokens=lengths[name][1])
        if rng.random() < 0.6:
            # One end is cancelled at prefill, another one at decode.
            victim, doomed = rng.choice(list(calls)), rng.choice(list(calls))
            victims |= {victim, doomed}
            await calls[doomed].cancel()
            await decode.abort(victim)
    spared = [name for name in calls if name not in victims]
    assert 10 <= len(spared) <= 50, "the seed cancels some and spares some"
    for name in spared:
        token_ids, length = lengths[name]
        assert await router.answer(calls[name], name) == cluster.expected(token_ids, length), name
    assert router.duplicates == 0
    for name, call in calls.items():
        await call.cancel()
        await decode.abort(name)
    await cluster.all_free()
    assert ended(prefill, "cancelled") > 0
    for instance in (prefill, decode):
        load = instance.load()
        assert (load.running_requests, load.waiting_requests, load.queued_prefill_tokens) == (0, 0, 0)
