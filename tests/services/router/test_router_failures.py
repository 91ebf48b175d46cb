"""Failures of instances: requests are placed again and answers continue with the same tokens, or fail clearly."""

import asyncio
import time

import grpc
import pytest
import structlog
from grpc import aio
from prometheus_client import REGISTRY

from kaveri.errors import InvalidArgument, NoCapacity, StaleAttempt
from kaveri.policy.placement import PlacementPolicy
from kaveri.text.tokenizer import ModelTokenizer
from services.router import token_feeds
from tests.services.router.cluster_script import ScriptedCluster, read_once_placed, scripted_cluster
from tests.services.router.scripted_answers import (
    PROMPT,
    answer,
    collect,
    eventually,
    finish,
    read_tokens,
    refused,
    rest_of,
)

CODES = grpc.StatusCode


def suspicions() -> float:
    return REGISTRY.get_sample_value("kaveri_router_suspicions_total") or 0.0


async def test_a_request_refused_by_one_prefill_instance_goes_to_another(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        for prefill in cluster.prefills.values():
            prefill.refusals = [NoCapacity("prefill", 0.1)]
        await finish(router.ask())
        first, second = sorted(cluster.taken(), key=lambda request: request.term.attempt)[:2]
        assert (first.term.attempt, second.term.attempt) == (1, 2)
        assert all(len(prefill.requests) >= 1 for prefill in cluster.prefills.values()), "not the same one again"


async def test_a_silent_prefill_instance_gets_no_request_while_there_is_another(cluster: ScriptedCluster) -> None:
    async with cluster.router(placement_policy=PlacementPolicy.ROUND_ROBIN) as router:
        router.router.feeds.silent_ids = frozenset({"prefill-0"})
        for number in range(2):
            await finish(router.ask(request_id=f"r{number}"))
    assert len(cluster.prefills["prefill-1"].requests) == 2


async def test_what_a_prefill_that_breaks_may_have_reserved_is_given_back_everywhere(cluster: ScriptedCluster) -> None:
    cluster.prefills["prefill-0"].break_before = "placed"
    async with cluster.router(placement_policy=PlacementPolicy.ROUND_ROBIN) as router:
        for number in range(2):
            await collect(router.ask((300 + number,), request_id=f"r{number}"))
        (lost,) = {request.request_id for request in cluster.taken() if request.term.attempt == 2}
        decodes = cluster.decodes.values()
        await eventually(lambda: all((lost, 1) in decode.aborted for decode in decodes))
        assert {request_id for decode in decodes for request_id, _ in decode.aborted} == {lost}


async def test_a_decode_instance_killed_in_mid_stream_is_followed_by_another_with_the_same_tokens(
    cluster: ScriptedCluster,
) -> None:
    decode = cluster.decodes["decode-0"]
    async with cluster.router() as router:
        decode.pause_at = 7
        call = router.ask(request_id="moved")
        responses = await read_tokens(call, 7)
        await cluster.kill("decode-0")
        last = await finish(call, responses)
        timing = last.timing
        assert (timing.attempts, timing.decode_instance_id) == (2, "decode-1")
        second = next(request for request in cluster.taken() if request.term.attempt == 2)
        assert list(second.token_ids) == [*PROMPT, *answer(PROMPT, 7)]
        assert second.generated_count == 7
        assert second.params.seed == cluster.taken()[0].params.seed


async def test_requests_of_a_frozen_decode_instance_go_on_elsewhere_within_a_second(cluster: ScriptedCluster) -> None:
    frozen = cluster.decodes["decode-0"]
    cluster.place_on = "decode-0"
    async with cluster.router() as router:
        frozen.pause_at = 7
        call = router.ask(request_id="moved")
        responses = await read_tokens(call, 7)
        running = router.router.feeds._silence
        before = suspicions()
        cluster.place_on = "decode-1"
        frozen.thawed.clear()
        frozen.silent = True
        frozen_at_s = running.elapsed_s
        responses.append(await call.read())
        # Counted while the router ran: a busy machine proves nothing.
        assert running.elapsed_s - frozen_at_s < 1.0
        assert suspicions() > before
        assert "decode-0" in router.router.store.view().instances, "its lease is intact"
        await finish(call, responses)
        (second,) = [request for request in cluster.taken() if request.term.attempt == 2]
        assert list(second.silent_decode_ids) == ["decode-0"], "prefill would place it there again"
        frozen.silent = False
        frozen.thawed.set()
        frozen.may_step.set()
        # On a busy machine it may be suspected once more.
        while cluster.taken()[-1].silent_decode_ids:
            await eventually(lambda: not router.router.feeds.silent_ids)
            await collect(router.ask())


async def test_a_stall_of_the_router_behind_a_suspicion_costs_no_attempt(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here the instance answers and sends heartbeats from the same process, which also stalls.
    monkeypatch.setattr(token_feeds, "REOPEN_GRACE_S", 1.0)
    async with scripted_cluster(tokenizer, 2, 2, lease_ttl_s=30.0) as cluster:
        decode = cluster.decodes["decode-0"]
        cluster.place_on = "decode-0"
        decode.keeps_running = True
        async with cluster.router(suspect_after_s=0.2) as router:
            decode.pause_at = 7
            call, responses = await read_once_placed(cluster, router, "kept", "decode-0")
            await eventually(lambda: decode.is_paused)
            before = suspicions()
            decode.silent = True
            await eventually(lambda: suspicions() > before)
            decode.silent = False
            # The answer to the new stream comes while the loop is blocked.
            time.sleep(1.5 * token_feeds.REOPEN_GRACE_S)  # noqa: ASYNC251
            await eventually(lambda: not router.router.feeds.silent_ids)
            running = router.router.feeds._silence
            until_s = running.elapsed_s + 2 * token_feeds.REOPEN_GRACE_S
            await eventually(lambda: running.elapsed_s > until_s)
            decode.may_step.set()
            last = await finish(call, responses)
            assert last.timing.attempts == 1


async def test_a_gap_in_the_tokens_is_a_lost_attempt_and_not_a_hole_in_the_answer(cluster: ScriptedCluster) -> None:
    cluster.decodes["decode-0"].skip_once = True
    async with cluster.router() as router:
        last = await finish(router.ask(request_id="gap"))
        assert last.timing.attempts == 2
        await eventually(lambda: ("gap", 1) in cluster.decodes["decode-0"].aborted)


async def test_prefill_may_die_once_decode_has_taken_over(cluster: ScriptedCluster) -> None:
    cluster.pausing()
    for prefill in cluster.prefills.values():
        prefill.hold.add("handed_over")
        prefill.break_after_hold = True
    async with cluster.router() as router:
        call = router.ask()
        responses = await cluster.read_until_paused(call)
        for prefill in cluster.prefills.values():
            prefill.release.set()
        await eventually(lambda: not any(prefill.open_requests for prefill in cluster.prefills.values()))
        cluster.let_all_go()
        last = await finish(call, responses)
        assert last.timing.attempts == 1


async def test_an_attempt_that_is_older_than_another_overtakes_it(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.refusals = [StaleAttempt("again", 1, 6)]
    async with cluster.router() as router:
        await finish(router.ask(request_id="again"))
        assert {request.term.attempt for request in cluster.taken()} <= {1, 7, 8}


async def test_an_attempt_number_beyond_the_limit_is_not_believed(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.refusals = [StaleAttempt("again", 1, 2**32 - 1)]
    async with cluster.router() as router:
        await refused(collect(router.ask(request_id="again")), CODES.ABORTED)
        for prefill in cluster.prefills.values():
            prefill.refusals.clear()
        await finish(router.ask())


@pytest.mark.parametrize(
    "broken", ["services.router.request_placer.choose_prefill", "kaveri.text.tokenizer.Detokenizer"]
)
async def test_a_bug_fails_its_request_with_one_sentence_and_a_traceback_in_the_log(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    async with cluster.router() as router:
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as entries:
            patched.setattr(broken, breaks)
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(router.ask(request_id="unlucky"))
        assert caught.value.code() is CODES.INTERNAL
        assert "unlucky" in (caught.value.details() or "")
        assert "Exception" not in (caught.value.details() or "")
        (entry,) = [entry for entry in entries if entry["event"] == "request_failed_unexpectedly"]
        assert (entry["request_id"], entry["exc_info"]) == ("unlucky", True)
        await finish(router.ask())


async def test_a_bad_answer_of_a_decode_instance_fails_its_own_request_only(cluster: ScriptedCluster) -> None:
    cluster.decodes["decode-0"].too_few_logprobs = "bad"
    cluster.pausing()
    async with cluster.router() as router:
        good = router.ask()
        await good.read()
        await eventually(lambda: cluster.decodes["decode-0"].is_paused)
        bad = asyncio.create_task(collect(router.ask(request_id="bad", logprobs=1)))
        await eventually(lambda: "bad" in cluster.decodes["decode-0"].running)
        cluster.let_all_go()
        await refused(bad, CODES.INTERNAL)
        assert (await rest_of(good))[-1].timing.attempts == 1
        await finish(router.ask())


async def test_attempts_are_bounded_and_the_last_error_is_told(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.break_before = "started"
    async with cluster.router(max_attempts=3) as router:
        await refused(collect(router.ask()), CODES.UNAVAILABLE, "scripted to break")
        assert len(cluster.taken()) == 3


async def test_a_refusal_that_would_be_the_same_anywhere_is_final(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.refusals = [InvalidArgument("prompt", 9, "less")]
    async with cluster.router() as router:
        await refused(collect(router.ask()), CODES.INVALID_ARGUMENT)
        assert len(cluster.taken()) == 1
