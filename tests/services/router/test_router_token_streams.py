"""Token streams of decode instances: breaks, restarted instances, late tokens, aborts."""

import asyncio

import pytest
import structlog

from kaveri.domain.owner import Ownership, Term
from kaveri.lives.request_values import Ended, InstanceLife
from kaveri.v1 import feed_pb2, sampling_pb2
from services.router import metrics, subscriptions, token_feeds
from tests.services.router.cluster_script import ScriptedCluster, read_once_placed
from tests.services.router.scripted_answers import PROMPT, answer, ask, collect, eventually, finish, rest_of, tokens_of


async def test_the_end_of_a_decode_instance_is_nothing_to_requests_that_were_placed_elsewhere_since(
    cluster: ScriptedCluster,
) -> None:
    for prefill in cluster.prefills.values():
        prefill.placed_in_vain = "decode-0"
    cluster.place_on = "decode-1"
    cluster.decodes["decode-1"].pause_at = 7
    async with cluster.router() as router:
        call, responses = await read_once_placed(cluster, router, "moved", "decode-1")
        await eventually(lambda: cluster.decodes["decode-1"].is_paused)
        former = cluster.decodes["decode-0"]
        former.fail_next = "engine fault"
        former.start(cluster.taken()[0])
        await eventually(lambda: not former.running)
        await cluster.kill("decode-0")
        await eventually(lambda: "decode-0" not in router.router.feeds._subscriptions)
        cluster.let_all_go()
        last = await finish(call, responses)
        assert (last.timing.attempts, last.timing.decode_instance_id) == (1, "decode-1")


async def test_a_request_on_an_instance_that_the_view_never_names_is_placed_again(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 0.1)
    for prefill in cluster.prefills.values():
        prefill.placed_in_vain, prefill.hold = "decode-gone", {"placed"}
    async with cluster.router() as router:
        collecting = asyncio.create_task(collect(router.ask()))
        await eventually(lambda: len(cluster.taken()) == 2)
        for prefill in cluster.prefills.values():
            prefill.release.set()
        assert tokens_of(await collecting) == answer(PROMPT, 20)


async def test_a_request_that_was_placed_anew_does_not_wait_for_the_stream_of_an_unknown_instance(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 0.1)
    for prefill in cluster.prefills.values():
        prefill.placed_in_vain = "decode-gone"
    cluster.pausing()
    async with cluster.router() as router:
        call, responses = await read_once_placed(cluster, router, "moved", "decode-0")
        grace_is_over = asyncio.Event()
        asyncio.get_running_loop().call_later(subscriptions.CONNECT_GRACE_S, grace_is_over.set)
        await grace_is_over.wait()
        cluster.let_all_go()
        last = await finish(call, responses)
        assert last.timing.attempts == 1


async def test_a_router_follows_instances_with_engines_alone(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await eventually(lambda: "router-0" in router.router.store.view().instances)
        router.router.feeds.update(router.router.store.view())
        assert router.router.feeds._subscriptions.keys() == cluster.instances.keys()


async def test_a_token_stream_that_breaks_in_the_router_is_logged_and_opened_again(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.pausing()
    async with cluster.router() as router:

        def breaks_once(count: int) -> None:
            monkeypatch.undo()
            raise ZeroDivisionError("planted")

        with structlog.testing.capture_logs() as entries:
            call = router.ask()
            responses = await cluster.read_until_paused(call)
            monkeypatch.setattr(metrics.RELAYED_TOKENS, "inc", breaks_once)
            cluster.let_all_go()
            responses += await rest_of(call)
        assert tokens_of(responses) == answer(PROMPT, 20)
        assert responses[-1].timing.attempts == 2
        (entry,) = [entry for entry in entries if entry["event"] == "stream_failed"]
        assert (entry["instance_id"], entry["exc_info"]) == ("decode-0", True)
        cluster.place_on = "decode-0"
        await finish(router.ask())


@pytest.mark.parametrize("joins", [False, True])
async def test_a_placement_that_names_a_former_life_of_a_decode_instance_is_lost_at_once(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 60.0)
    cluster.place_on = "decode-0"
    for prefill in cluster.prefills.values():
        prefill.hold.add("placed")
        prefill.joins = joins
    async with cluster.router() as router:
        collecting = asyncio.create_task(collect(router.stub.Generate(ask(request_id="moved"), timeout=20)))
        await cluster.until_held()
        await cluster.kill("decode-0")
        again = await cluster.add_decode("decode-0")
        await eventually(lambda: bool(again.subscribers))
        again.attachable.add("moved")
        cluster.let_all_go()
        responses = await collecting
        assert tokens_of(responses) == answer(PROMPT, 20)
        assert responses[-1].timing.attempts == 2
        assert not again.attached, "the next life is not asked for it"


async def test_an_instance_that_no_view_ever_names_is_forgotten_with_its_last_request(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 0.05)
    for prefill in cluster.prefills.values():
        prefill.placed_in_vain = "decode-9"
    cluster.place_on = "decode-1"
    async with cluster.router() as router:
        await finish(router.ask())
        await eventually(lambda: "decode-9" not in router.router.feeds._subscriptions)


async def test_a_placement_is_lost_when_the_view_then_names_another_life(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 60.0)
    await cluster.kill("decode-0")
    async with cluster.router() as router:
        await eventually(lambda: "decode-0" not in router.router.store.view().instances)
        cluster.place_on = "decode-0"
        collecting = asyncio.create_task(collect(router.ask(request_id="lives")))
        feeds = router.router.feeds
        await eventually(lambda: "decode-0" in feeds._subscriptions and bool(feeds._subscriptions["decode-0"].ties))
        await cluster.add_decode("decode-0")
        responses = await collecting
        assert tokens_of(responses) == answer(PROMPT, 20)
        assert responses[-1].timing.attempts == 2


async def test_an_attempt_that_begins_after_its_abort_is_aborted_again(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_feeds, "CALL_TIMEOUT_S", 0.2)
    async with cluster.router() as router:
        await collect(router.ask(request_id="late"))
        late = cluster.taken()[0]
        late.params.max_tokens = 10**9
        decode = cluster.decodes["decode-0"]
        for _ in range(2):
            decode.start(late)
            await eventually(lambda: not decode.running)
        assert set(decode.aborted) == {("late", 1)}


async def test_an_abort_that_was_sent_again_is_remembered_as_new(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_feeds, "_ABORTED_COUNT", 2)
    decode = cluster.decodes["decode-0"]
    async with cluster.router() as router:
        feeds = router.router.feeds
        place = InstanceLife("decode-0", decode.incarnation)
        for request_id in ("a", "b", "a", "c"):
            feeds.abort(request_id, Ownership(Term(0, 1), feeds._stream_id), place)
        await eventually(lambda: len(decode.aborted) == 4)
        feeds.disown("a", Term(0, 1), "decode-0")
        feeds.disown("b", Term(0, 1), "decode-0")
        await eventually(lambda: len(decode.aborted) == 5)
        assert decode.aborted[4] == ("b", 1)


async def test_the_aborts_of_many_requests_reach_an_instance_in_few_messages(cluster: ScriptedCluster) -> None:
    """The death of a prefill instance aborts each of its requests at every decode instance."""
    async with cluster.router() as router:
        for number in range(500):
            router.router.feeds.abort(f"request {number}", Ownership(Term(0, 1), "router"), None)
        for decode in cluster.decodes.values():
            await eventually(lambda decode=decode: len(decode.aborted) == 500)  # type: ignore[misc]
            assert decode.abort_messages == [True]


async def test_an_answer_to_attach_that_is_of_no_use_loses_the_attempt_and_not_the_request(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = cluster.pausing()
    decode.thawed.clear()
    empty = feed_pb2.AttachResponse()
    monkeypatch.setattr(decode, "_attached", lambda max_tokens: empty)
    async with cluster.router() as router:
        call, responses = await read_once_placed(cluster, router, "early", "decode-0")
        entry = router.router.table.get("early")
        assert entry is not None
        decode.thawed.set()
        await eventually(lambda: len(cluster.taken()) == 2 and (decode.is_paused or isinstance(entry.state, Ended)))
        cluster.let_all_go()
        last = await finish(call, responses)
        assert last.timing.attempts == 2


@pytest.mark.parametrize("max_attempts", [1, 3])
async def test_an_answer_whose_last_token_came_before_its_stream_broke_is_complete(
    cluster: ScriptedCluster, max_attempts: int
) -> None:
    decode = cluster.decodes["decode-0"]
    decode.pause_at, decode.withholds_ends = 3, True
    async with cluster.router(max_attempts=max_attempts) as router:
        call, responses = await read_once_placed(cluster, router, "whole", "decode-0")
        await eventually(lambda: decode.is_paused)
        cluster.let_all_go()
        entry = router.router.table.get("whole")
        assert entry is not None
        await eventually(lambda: len(entry.answer.token_ids) == 20)
        await cluster.kill("decode-0")
        last = await finish(call, responses)
        assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        assert last.usage.completion_tokens == 20
        assert last.timing.attempts == len(cluster.taken()) == 1
