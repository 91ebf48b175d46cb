"""Room on a decode instance that has too little for everybody: who is overtaken, how often, and who is waited for."""

import asyncio
import itertools
import random
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.policy.room_line import MAX_OVERTAKES

BLOCK_BYTES = 4096  # of 16 tokens in the fake engine's pool, over all layers
TIGHT = {"max_model_len": 160, "kv_cache_memory": 12 * BLOCK_BYTES}


def prompt(seed: int, token_count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 1000) for _ in range(token_count)]


async def is_refused(by_hand: Any, decode: Any, request_id: str, token_count: int) -> bool:
    """Asks for room by hand; whether there is none."""
    try:
        await by_hand.reserve(decode, request_id, token_count)
    except aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return True
    return False


async def overtake(by_hand: Any, decode: Any, count: int) -> None:
    """So many small requests get room and give it back."""
    held_blocks = decode.held_blocks
    for number in range(count):
        await by_hand.reserve(decode, f"overtakes {number}", 1)
        await by_hand.abort(decode, f"overtakes {number}")
        await by_hand.eventually(lambda: decode.held_blocks == held_blocks, "its block is free")


def small_decode(cluster: Any, instance_id: str = "decode-0", **settings: Any) -> Any:
    return cluster.decode(instance_id, **{**TIGHT, **settings})


@pytest.fixture(autouse=True)
def fake_engines(cluster: Any) -> None:
    cluster.needs_fake_engines("counts blocks of 16 tokens")


@pytest.fixture
def places_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places in line are kept however long it takes to ask again."""
    monkeypatch.setattr("services.decode.instance._PLACE_KEPT_S", 1e6)


async def test_a_large_request_under_a_steady_stream_of_small_ones_is_placed_within_a_bound(
    cluster: Any, by_hand: Any
) -> None:
    # Each of the small ones takes 1 or 2 of 12 blocks, the large one 9. Sixteen of them want room at all times, from
    # another prefill instance, and of different lengths, so that there is hardly ever room for the large one by chance.
    stream = await cluster.prefill("prefill-0", max_model_len=160)
    prefill = await cluster.prefill("prefill-1", max_model_len=160)
    decode = await small_decode(cluster, fake_step_s=0.02)
    router = await cluster.router()
    width, order, numbers = 16, list[str](), itertools.count()
    stopping = asyncio.Event()

    async def send_small(number: int) -> None:
        name, token_ids, length = f"small {number}", prompt(number, 4), 2 + 5 * number % 23
        call = router.prefill(stream, name, token_ids, max_tokens=length, ignore_eos=True)
        await by_hand.eventually(lambda: call.seen("placed"), f"{name} is placed")
        order.append(name)
        assert await router.answer(call, name) == cluster.expected(token_ids, length)

    async def keep_coming() -> None:
        while not stopping.is_set():
            await send_small(next(numbers))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(width):
            tasks.create_task(keep_coming())
        await by_hand.eventually(lambda: len(order) >= 2 * width, "the small ones run")
        token_ids = prompt(1, 140)
        large = router.prefill(prefill, "large", token_ids, max_tokens=10, ignore_eos=True)
        await by_hand.eventually(lambda: decode.metric("kaveri_decode_line_requests") > 0, "the large one waits")
        before = len(order)
        await by_hand.eventually(lambda: large.seen("placed"), "the large one is placed")
        overtakes = len(order) - before
        stopping.set()
        assert await router.answer(large, "large") == cluster.expected(token_ids, 10)
    # Each of the small ones may have had its room before the large one waited, and not have said so.
    assert overtakes <= MAX_OVERTAKES + 2 * width
    await cluster.all_free()


@pytest.mark.usefixtures("places_last")
async def test_what_is_free_is_kept_for_who_was_overtaken_to_the_limit(cluster: Any, by_hand: Any) -> None:
    decode = await small_decode(cluster)
    await cluster.router()
    await by_hand.reserve(decode, "taken", 79)
    assert await is_refused(by_hand, decode, "large", 127)
    await overtake(by_hand, decode, MAX_OVERTAKES)
    assert await is_refused(by_hand, decode, "small", 1)
    # Others are not even asked to try.
    assert decode.engine.stats().free_blocks == 7
    assert decode.load().free_blocks == 0
    await by_hand.abort(decode, "taken")
    await by_hand.eventually(decode.free, "the pool is free")
    assert await is_refused(by_hand, decode, "small", 1)
    assert not await is_refused(by_hand, decode, "large", 127)
    assert not await is_refused(by_hand, decode, "small", 1)
    for request_id in ("large", "small"):
        await by_hand.abort(decode, request_id)
    await cluster.all_free()


@pytest.mark.parametrize("how", ["it is aborted", "it stops asking", "its time is over"])
async def test_nothing_is_kept_for_a_request_that_wants_no_room_any_more(
    cluster: Any, by_hand: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.decode.instance._PLACE_KEPT_S", 1e6)
    decode = await small_decode(cluster)
    await cluster.router()
    await by_hand.reserve(decode, "taken", 79)

    async def ask(timeout_s: float = 1e6) -> None:
        with pytest.raises(aio.AioRpcError):
            await by_hand.reserve(decode, "large", 127, timeout_s=timeout_s)

    for number in range(MAX_OVERTAKES):
        await ask()
        await by_hand.reserve(decode, f"overtakes {number}", 1)
        await by_hand.abort(decode, f"overtakes {number}")
        await by_hand.eventually(lambda: decode.held_blocks == 5, "its block is free")
    await ask()
    assert decode.load().free_blocks == 0
    if how == "it is aborted":
        await by_hand.abort(decode, "large")
        assert decode.load().free_blocks == 7
    elif how == "it stops asking":
        monkeypatch.setattr("services.decode.instance._PLACE_KEPT_S", 0.5)
        await ask()
    else:
        await ask(timeout_s=0.5)
    await by_hand.eventually(lambda: decode.load().free_blocks == 7, "nothing is kept")
    assert not await is_refused(by_hand, decode, "small", 1)


@pytest.mark.usefixtures("places_last")
async def test_a_waiting_request_that_finds_room_elsewhere_gives_its_place_up(cluster: Any, by_hand: Any) -> None:
    prefill = await cluster.prefill(**TIGHT)
    decodes = [await small_decode(cluster, f"decode-{number}") for number in range(2)]
    router = await cluster.router()
    for decode in decodes:
        await by_hand.reserve(decode, "taken", 79)
    token_ids = prompt(2, 127)
    call = router.prefill(prefill, "large", token_ids, max_tokens=10, ignore_eos=True)

    def waited_at() -> list[Any]:
        return [decode for decode in decodes if decode.metric("kaveri_decode_line_requests") == 1]

    await by_hand.eventually(lambda: len(waited_at()) == 1, "it waits")
    (here,) = waited_at()
    elsewhere = next(decode for decode in decodes if decode is not here)
    await overtake(by_hand, here, MAX_OVERTAKES)
    assert here.load().free_blocks == 0
    await by_hand.abort(elsewhere, "taken")
    assert await router.answer(call, "large") == cluster.expected(token_ids, 10)
    assert call.get("placed").decode_instance_id == elsewhere.instance_id
    await by_hand.eventually(lambda: not waited_at(), "it does not wait any more")
    assert here.load().free_blocks == 7
    await by_hand.abort(here, "taken")
    await cluster.all_free()


@pytest.mark.usefixtures("places_last")
async def test_a_request_that_ends_while_it_waits_gives_its_place_up(cluster: Any, by_hand: Any) -> None:
    prefill, decode = await cluster.prefill(**TIGHT), await small_decode(cluster)
    router = await cluster.router()
    await by_hand.reserve(decode, "taken", 79)
    first = router.prefill(prefill, "first", prompt(3, 120), max_tokens=10)
    await by_hand.eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "it waits")
    first.call.cancel()
    await by_hand.eventually(lambda: decode.metric("kaveri_decode_line_requests") == 0, "it does not wait any more")
    await by_hand.abort(decode, "taken")
    await cluster.all_free()
