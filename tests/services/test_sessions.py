"""Clients that attach again through the same or another router: real routers, prefill, decode and gRPC."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.v1 import inference_pb2, sampling_pb2
from services.router.recovery import take_over
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.session_client import GRACE_S, SECRET, WAIT_S, SessionClient, SessionRouters, computed


async def test_a_router_dies_while_decode_streams_and_another_goes_on_with_exactly_the_rest(
    cluster: Any, routers: SessionRouters
) -> None:
    await cluster.prefill(orphan_grace_s=GRACE_S)
    await cluster.decode(fake_step_s=0.01, orphan_grace_s=GRACE_S)
    await routers.start("router-0")
    await routers.start("router-1")
    client = SessionClient(prompt(1), {"max_tokens": 120, "logprobs": 1})
    whole = SessionClient(prompt(1), {"max_tokens": 120, "logprobs": 1}, request_id="whole", secret=b"")
    await whole.finish(routers.generate("router-0", whole.message()))
    before = computed(cluster)
    await client.read(routers.generate("router-0", client.message()), 20)
    assert len(client.routers) == 2
    await routers.cut("router-0")
    client.session = 1
    await client.finish(routers.generate("router-1", client.message()))
    assert client.token_ids == whole.token_ids == cluster.expected(prompt(1), 120)
    assert client.text == whole.text
    assert client.logprobs == whole.logprobs
    assert client.last is not None
    assert whole.last is not None
    assert client.last.finish_reason == whole.last.finish_reason
    assert client.last.usage.completion_tokens == 120
    assert client.last.timing.reattaches == 1
    assert computed(cluster) - before == 40, "the prompt was computed once"
    await cluster.all_free()


async def two_routers(cluster: Any, routers: SessionRouters, **decode: Any) -> None:
    await cluster.prefill(orphan_grace_s=GRACE_S, chunk_tokens=16, **decode.pop("prefill", {}))
    await cluster.decode(orphan_grace_s=GRACE_S, **{"fake_step_s": 0.01, **decode})
    await routers.start("router-0")
    await routers.start("router-1")


async def test_a_client_may_re_attach_through_the_same_router_again_and_again(
    cluster: Any, routers: SessionRouters
) -> None:
    await two_routers(cluster, routers)
    client = SessionClient(prompt(7), {"max_tokens": 100})
    call = routers.generate("router-0", client.message())
    for session in range(1, 8):
        await client.read(call, 10 * session)
        client.session = session
        call = routers.generate(f"router-{session % 2 if session > 3 else 0}", client.message())
    await client.finish(call)
    assert client.token_ids == cluster.expected(prompt(7), 100)
    assert computed(cluster) == 40
    await cluster.all_free()


async def test_text_goes_on_with_the_next_character_and_a_stop_text_straddles_the_sessions(
    cluster: Any, routers: SessionRouters
) -> None:
    await two_routers(cluster, routers)
    whole = SessionClient(prompt(8), {"max_tokens": 60}, request_id="whole")
    await whole.finish(routers.generate("router-0", whole.message()))
    stop = whole.text[len(whole.text) // 2 : len(whole.text) // 2 + 6]
    for number, params in enumerate(({"max_tokens": 60}, {"max_tokens": 60, "stop": [stop]})):
        expected = SessionClient(prompt(8), params, request_id=f"expected-{number}")
        await expected.finish(routers.generate("router-0", expected.message()))
        for cut in range(1, len(expected.token_ids), 7):
            client = SessionClient(prompt(8), params, request_id=f"r{number}-{cut}")
            call = routers.generate("router-0", client.message())
            await client.read(call, cut)
            client.session = 1
            await client.finish(routers.generate("router-1", client.message()))
            assert (client.text, client.token_ids) == (expected.text, expected.token_ids)
            assert client.last is not None
            assert expected.last is not None
            assert client.last.finish_reason == expected.last.finish_reason
    await cluster.all_free()


async def test_cancel_works_through_any_router(cluster: Any, routers: SessionRouters) -> None:
    await two_routers(cluster, routers)
    client = SessionClient(prompt(10), {"max_tokens": 300})
    call = routers.generate("router-0", client.message())
    await client.read(call, 3)
    assert await routers.cancel("router-1", "a")
    await client.finish(call)
    assert client.last is not None
    assert client.last.finish_reason == sampling_pb2.FINISH_REASON_CANCELLED
    assert not await routers.cancel("router-1", "a")
    await cluster.all_free()


@pytest.mark.parametrize("how", ["by its id", "by its client's leaving"])
async def test_a_request_cancelled_while_it_is_looked_for_frees_prefill_within_a_second(
    cluster: Any, routers: SessionRouters, how: str
) -> None:
    await two_routers(cluster, routers, prefill={"fake_step_s": 0.05})
    client = SessionClient(prompt(31, 400), {"max_tokens": 100})
    call = routers.generate("router-0", client.message())
    await eventually(lambda: computed(cluster) > 0, "it is computed")
    await routers.cut("router-0")
    call.cancel()
    feeds, asked = routers.by_name["router-1"].feeds, asyncio.Event()
    attach = feeds.attach

    async def attached_and_held(record: Any, attachment: Any, *args: Any) -> Any:
        attached = await attach(record, attachment, *args)
        if attachment.at_prefill:
            asked.set()
            await asyncio.Event().wait()
        return attached

    feeds.attach = attached_and_held  # type: ignore[method-assign]
    client.session = 1
    call = routers.generate("router-1", client.message())
    await asyncio.wait_for(asked.wait(), WAIT_S)
    if how == "by its id":
        assert await routers.cancel("router-1", "a")
        await client.finish(call)
    else:
        call.cancel()
    await cluster.all_free(1.0)


async def test_a_thousand_re_attaches_a_second_are_refused_by_name_and_disturb_no_other_request(
    cluster: Any, routers: SessionRouters
) -> None:
    await cluster.prefill(orphan_grace_s=GRACE_S)
    # After its end, a request with its id and another secret would be a new one.
    await cluster.decode(orphan_grace_s=GRACE_S, fake_step_s=0.08)
    await routers.start("router-0", max_requests=20, max_reattaches_per_s=5.0)
    client = SessionClient(prompt(32), {"max_tokens": 200})
    call = routers.generate("router-0", client.message())
    await client.read(call, 3)
    bad = replace(client, session=1, secret=b"another secret, too")

    async def refused() -> str:
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in routers.generate("router-0", bad.message()):
                pass
        return f"{caught.value.code().name} {caught.value.details()}"

    outcomes = await asyncio.gather(*(refused() for _ in range(1000)))
    limited = [outcome for outcome in outcomes if "RESOURCE_EXHAUSTED" in outcome]
    assert 1000 - len(limited) <= 20 + 5 * WAIT_S
    assert all("more than 5 re-attaches a second" in outcome for outcome in limited)
    # New requests do not count.
    other = SessionClient(prompt(34), {"max_tokens": 5}, request_id="other")
    await other.finish(routers.generate("router-0", other.message()))
    await client.finish(call)
    assert client.token_ids == cluster.expected(prompt(32), 200)
    assert client.last is not None
    assert (client.last.timing.attempts, client.last.timing.reattaches) == (1, 0)
    await cluster.all_free()


FORGED = {
    "of no instance": inference_pb2.OwnerHint(prefill_instance_id="x", decode_instance_id="y" * 5000),
    "of a former life": inference_pb2.OwnerHint(
        prefill_instance_id="prefill-0", prefill_incarnation=1, decode_instance_id="decode-0", decode_incarnation=1
    ),
    "of the wrong phase": inference_pb2.OwnerHint(prefill_instance_id="decode-0", decode_instance_id="prefill-0"),
    "of nothing": inference_pb2.OwnerHint(),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("store", ["away", "emptied", "emptied and away in the middle"])
async def test_a_forged_hint_and_a_store_that_is_away_or_empty_cost_nothing_but_questions(
    cluster: Any, routers: SessionRouters, forged: str, store: str
) -> None:
    await two_routers(cluster, routers)
    await cluster.decode("decode-1", orphan_grace_s=GRACE_S)
    client = SessionClient(prompt(35), {"max_tokens": 60})
    await client.read(routers.generate("router-0", client.message()), 5)
    await routers.cut("router-0")
    client.owner = FORGED[forged]
    client.session = 1
    router = routers.by_name["router-1"]
    if store == "emptied and away in the middle":
        find = router.placer._takeover.find

        async def find_while_it_goes(*args: Any) -> Any:
            cluster.state.take_away()
            cluster.state.bring_back(empty=True)
            cluster.state.take_away()
            return await find(*args)

        router.placer._takeover.find = find_while_it_goes  # type: ignore[method-assign]
    else:
        cluster.state.take_away()
    if store == "emptied":
        cluster.state.bring_back(empty=True)
    try:
        await client.finish(routers.generate("router-1", client.message()))
    finally:
        cluster.state.bring_back()
    assert client.token_ids == cluster.expected(prompt(35), 60)
    assert computed(cluster) == 40, "the prompt was computed once"
    await cluster.all_free()


async def test_no_more_instances_are_asked_than_there_may_be_when_no_hint_holds(
    cluster: Any, routers: SessionRouters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(take_over, "_ASKED_TOGETHER", 2)
    monkeypatch.setattr(take_over, "_MOST_ASKED", 3)
    await cluster.prefill()
    for number in range(5):
        await cluster.decode(f"decode-{number}")
    router = await routers.start("router-0")
    attach, asked = router.feeds.attach, []

    async def counted(record: Any, attachment: Any, *args: Any) -> Any:
        if not attachment.at_prefill:
            asked.append(record.instance_id)
        return await attach(record, attachment, *args)

    router.feeds.attach = counted  # type: ignore[method-assign]
    client = SessionClient(prompt(36), {"max_tokens": 5}, session=1)
    await client.finish(routers.generate("router-0", client.message()))
    assert client.token_ids == cluster.expected(prompt(36), 5)
    assert len(asked) == len(set(asked)) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"secret": b"another secret, too"}, "secret"),
        ({"secret": b""}, "secret"),
        ({"secret": b"short"}, "secret"),
        ({"session": 70_000}, "session"),
        ({"prompt": prompt(99)}, "prompt"),
        ({"token_ids": [1] * 60}, "received.token_ids"),
        ({"token_ids": [1] * 49, "text": ""}, "received.token_ids"),
        ({"token_ids": [3, 1, 2], "text": ""}, "received.token_ids"),
        ({"text": "x" * 10_000}, "received.characters"),
        ({"params": {"max_tokens": 50, "seed": None}}, "params.seed"),
    ],
)
async def test_bad_re_attaches_are_refused_by_field_and_disturb_no_one(
    cluster: Any, routers: SessionRouters, change: dict[str, Any], field: str
) -> None:
    await two_routers(cluster, routers, fake_step_s=0.02)
    client = SessionClient(prompt(11), {"max_tokens": 50})
    call = routers.generate("router-0", client.message())
    await client.read(call, 3)
    # From the claim router-1 learns where the request is.
    await eventually(lambda: any(claim.hint for claim in cluster.state.requests()), "a claim with the instances")
    bad = replace(client, **{"session": 1, "token_ids": list(client.token_ids), **change})
    message = bad.message()
    if field == "params.seed":
        message.params.ClearField("seed")
    with pytest.raises(aio.AioRpcError) as refused:
        await bad.read(routers.generate("router-1", message), 1000)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refused.value.details() or "")
    assert SECRET.decode() not in (refused.value.details() or "")
    # A mistake of the request's own client, who has the secret, ends the former session: it goes on in the next one.
    client.session = 2
    if field in ("secret", "session", "params.seed"):
        await client.finish(call)
    else:
        await client.finish(routers.generate("router-0", client.message()))
    assert client.token_ids == cluster.expected(prompt(11), 50)
    await cluster.all_free()
