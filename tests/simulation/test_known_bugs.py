"""Bugs that the simulated cluster shows, each as one story. All of them failed on 8b9dbe2, before their fixes."""

import dataclasses
import random
from collections.abc import Callable

import pytest

from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.draw import draw_plan
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.schedule import ScheduleResult

Run = Callable[[Plan], ScheduleResult]

RESERVED = "start /kaveri.v1.DecodeService/Reserve"


def test_a_request_goes_on_when_its_prefill_stream_breaks_before_prefill_hears_that_decode_accepted(run: Run) -> None:
    """Prefill's Abort ended the running request, and the router did not hear of it: the answer stopped."""
    all_blocks_written = "kv FinishPush"
    late_answers = [
        Fault(
            kind=FaultKind.SLOW,
            after=all_blocks_written,
            at_s=0,
            target=decode,
            other="prefill-0",
            amount=4.0,
            lasts_s=4.0,
        )
        for decode in ("decode-0", "decode-1")
    ]
    broken = Fault(kind=FaultKind.RESET, after=all_blocks_written, at_s=0.3, target="router-0", other="prefill-0")
    long = request("long", max_tokens=200)
    result = run(story(cluster(decodes=2), [long], [*late_answers, broken], max_model_len=320))
    assert result.counts["fault:reset"] == 1
    assert result.counts["outcome:length"] == 1 + 2  # and the probes


def test_a_late_placement_that_names_a_dead_decode_instance_does_not_tie_the_request_to_its_next_life(run: Run) -> None:
    """The request hung until its deadline: the new life knew nothing of it."""
    late = Fault(
        kind=FaultKind.SLOW,
        after=RESERVED,
        after_count=2,
        at_s=0,
        target="prefill-0",
        other="router-0",
        amount=2.0,
        lasts_s=0.3,
    )
    dies = Fault(kind=FaultKind.RESTART, after=RESERVED, after_count=2, at_s=0.3, target="decode-0", lasts_s=0.05)
    first = request("first", max_tokens=2)
    result = run(story(cluster(), [first, request("late", 0.6, max_tokens=100)], [late, dies]))
    assert result.counts["fault:restart"] == 1
    assert result.counts["outcome:length"] == 2 + 2


def test_a_request_whose_first_token_is_lost_with_the_prefill_stream_is_placed_again(run: Run) -> None:
    """Decode had sent tokens already, so the router held the loss of prefill for none: the tokens waited forever."""
    late = Fault(
        kind=FaultKind.SLOW,
        after=RESERVED,
        after_count=2,
        at_s=0,
        target="prefill-0",
        other="router-0",
        amount=2.0,
        lasts_s=1.0,
    )
    broken = Fault(kind=FaultKind.RESET, after=RESERVED, after_count=2, at_s=0.2, target="router-0", other="prefill-0")
    first = request("first", max_tokens=2)
    result = run(story(cluster(), [first, request("late", 0.5, max_tokens=60)], [late, broken]))
    assert result.counts["fault:reset"] == 1
    assert result.counts["outcome:length"] == 2 + 2


def test_a_request_that_is_cancelled_before_its_placement_is_known_does_not_run_on(run: Run) -> None:
    """Prefill had handed it over before the cancellation came. Decode did not hear of it and ran to the last token."""
    late = Fault(kind=FaultKind.SLOW, at_s=0.3, target="router-0", other="prefill-0", amount=0.5, lasts_s=3.0)
    given_up = dataclasses.replace(request("given-up", 0.5, max_tokens=280), cancel_after_s=0.2)
    first = request("first", max_tokens=2)
    run(story(cluster(step_s=0.02), [first, given_up, request("last", 3.5)], [late], max_model_len=320))


def test_a_request_that_waits_for_its_turn_at_decode_is_freed_when_its_router_never_heard_of_its_placement(
    run: Run,
) -> None:
    """It kept its blocks until it drew its first token, seconds after its client had gone. Seed 105138 found it."""
    deaf = Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.45, target="prefill-0", other="router-0", lasts_s=0.8)
    long = request("long", max_tokens=200)
    given_up = dataclasses.replace(request("given-up", 0.5), cancel_after_s=0.3)
    run(story(cluster(step_s=0.02, max_batch=1), [long, given_up], [deaf], max_model_len=320))


def test_the_ids_of_a_dead_routers_requests_can_be_used_at_another_router(run: Run) -> None:
    """They were refused until the deadline of the request that had died."""
    given_up = dataclasses.replace(request("same", max_tokens=100), cancel_after_s=0.4)
    again = request("same", 0.6, max_tokens=100, router="router-1")
    death = Fault(kind=FaultKind.KILL, at_s=0.3, target="router-0")
    result = run(story(cluster(routers=2), [given_up, again], [death]))
    assert result.counts["outcome:length"] == 1 + 4


def test_a_client_goes_on_through_another_router_when_its_own_dies(run: Run) -> None:
    sent = request("a", prompt_tokens=40, max_tokens=100)
    death = Fault(kind=FaultKind.KILL, at_s=0.5, target="router-0")
    result = run(story(cluster(routers=2), [sent], [death]))
    assert result.counts["outcome:length"] == 1 + 4


@pytest.mark.parametrize("kind", [FaultKind.STORE_REFUSES, FaultKind.STORE_AWAY, FaultKind.STORE_LOST])
def test_no_request_fails_while_the_store_cannot_be_used(run: Run, kind: FaultKind) -> None:
    """A store that answered but refused writes ended every lease within a second."""
    requests = [request(f"r{number}", 0.1 * number, max_tokens=80) for number in range(20)]
    result = run(story(cluster(decodes=2), requests, [Fault(kind=kind, at_s=0.4, lasts_s=3.0)]))
    assert result.counts["outcome:length"] == 20 + 2


def test_the_same_id_at_two_routers_leaves_neither_request_waiting(run: Run) -> None:
    """After the store had lost its state the first request's answer stopped until its deadline."""
    first = request("same", max_tokens=150)
    second = request("same", 0.5, max_tokens=150, router="router-1")
    result = run(story(cluster(routers=2), [first, second], [Fault(kind=FaultKind.STORE_EMPTIED, at_s=0.3)]))
    assert result.counts["fault:store_emptied"] == 1
    assert result.counts["outcome:length"] >= 1 + 4


def test_requests_wait_for_the_only_prefill_instance_to_come_back(run: Run) -> None:
    """Attempts ran out long before the dead instance's lease ended."""
    requests = [request(f"r{number}", 0.1 * number, max_tokens=40) for number in range(16)]
    restart = Fault(kind=FaultKind.RESTART, at_s=0.5, target="prefill-0", lasts_s=5.0)
    result = run(story(cluster(decodes=2), requests, [restart], lease_ttl_s=3.0))
    assert result.counts["outcome:length"] == 16 + 2


def test_a_full_queue_loses_no_attempt(run: Run) -> None:
    """500 requests at once logged 1,601 lost attempts."""
    requests = [request(f"r{number}", 0.001 * number, max_tokens=2) for number in range(200)]
    result = run(story(cluster(), requests, [], max_queue=16))
    assert result.counts["outcome:length"] == 200 + 2
    assert not [line for line in result.lines if "attempt_lost" in line]


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_a_router_that_ends_hear_that_it_is_unavailable(run: Run, seed: int) -> None:
    """They got an error that said their requests were cancelled."""
    requests = [request(f"r{number}", 0.1 * number, max_tokens=200) for number in range(10)]
    drain = Fault(kind=FaultKind.DRAIN, at_s=0.5, target="router-0", lasts_s=0.5)
    result = run(story(cluster(), requests, [drain], seed, drain_timeout_s=0.5, max_model_len=320))
    assert result.counts["outcome:Unavailable"] >= 5
    assert not result.counts["outcome:RequestCancelled"]


def test_a_request_whose_tokens_decode_has_dropped_is_placed_again(run: Run) -> None:
    """Decode finished while its router had no stream, and gave the tokens up after the time of grace. Then a late
    placement tied the request to the router's new stream, on which nothing came: it hung until its deadline."""
    placed_late = Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.25, target="prefill-0", other="router-0", lasts_s=5.0)
    stream_late = Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.3, target="decode-0", other="router-0", lasts_s=3.0)
    broken = Fault(kind=FaultKind.RESET, at_s=0.32, target="router-0", other="decode-0")
    requests = [request("before", max_tokens=2), request("late", 0.35, max_tokens=20)]
    result = run(story(cluster(), requests, [placed_late, stream_late, broken]))
    assert result.counts["fault:reset"] == 1
    assert result.counts["outcome:length"] == 2 + 2


@pytest.mark.parametrize("decode", ["decode-0", "decode-1"])
def test_an_answer_is_drawn_by_one_decode_instance_at_a_time(run: Run, decode: str) -> None:
    """Prefill did not hear that its push was accepted, and placed the attempt elsewhere too. When the first instance
    was gone, the router put the tokens of the second one behind those of the first: with rounding, a wrong answer."""
    after = "kv FinishPush"
    cut = Fault(kind=FaultKind.CUT, after=after, at_s=0.0, target="prefill-0", other=decode, lasts_s=14.0)
    gone = Fault(kind=FaultKind.RESET, at_s=12.0, target="router-0", other=decode)
    plan = story(
        cluster(decodes=2, step_s=0.1),
        [request("long", max_tokens=200)],
        [cut, gone],
        max_model_len=320,
        divergent=True,
    )
    result = run(plan)
    assert result.counts["fault:reset"] == 1
    assert result.counts["outcome:length"] == 1 + 2


def test_requests_wait_for_the_view_of_a_router_that_is_cut_off_from_the_store_while_an_instance_restarts(
    run: Run,
) -> None:
    """Prefill placed them on the new life. The router knew only the former one, lost eight attempts at once, and the
    request failed."""
    faults = [
        Fault(kind=FaultKind.CUT, at_s=0.5, target="router-0", other="store", lasts_s=4.0),
        Fault(kind=FaultKind.RESTART, at_s=0.8, target="decode-0", lasts_s=0.1),
    ]
    requests = [request("first", max_tokens=2), request("late", 3.0, max_tokens=20)]
    result = run(story(cluster(), requests, faults))
    assert result.counts["fault:restart"] == 1
    assert result.counts["outcome:length"] == 2 + 2
    assert not [line for line in result.lines if "attempt_lost" in line and "request_id=late" in line]


def test_a_client_whose_answer_ended_just_before_its_instance_was_switched_gets_it_from_there(run: Run) -> None:
    """The router asked only instances that decode. With prefill restarted, the prompt was computed again."""
    ended = "outcome=finished"
    switched = Fault(kind=FaultKind.SWITCH, after=ended, after_count=2, at_s=0.0, target="decode-1", other="prefill")
    faults = [
        Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.6, target="router-0", other="client-0", lasts_s=6.0),
        dataclasses.replace(switched, lasts_s=5.0),
        Fault(kind=FaultKind.RESTART, after=ended, after_count=2, at_s=0.0, target="prefill-0", lasts_s=0.01),
        Fault(kind=FaultKind.KILL, after=ended, after_count=2, at_s=0.3, target="router-0"),
    ]
    requests = [
        request("first", max_tokens=2),
        request("asked", 0.5, max_tokens=30),
        # So that the load lasts until the switch.
        request("last", 4.0, max_tokens=2, router="router-1"),
    ]
    result = run(story(cluster(routers=2, decodes=2, step_s=0.02), requests, faults))
    assert [line for line in result.lines if "decode-1" in line and "request_id=asked" in line], "another one had it"
    asked = [line for line in result.lines if "PrefillService/Submit " in line and 'request_id: "asked"' in line]
    assert len([line for line in asked if "start" in line]) == 1


def test_a_stream_of_prefill_that_is_opened_again_does_not_repeat_what_an_earlier_attempt_has_drawn(run: Run) -> None:
    """Client and router lost their connection while prefill hung. The answer was computed again there, and the stream
    was opened again before the new attempt was read: it repeated the first token in the middle of the answer. Seed
    29633698 found it."""
    hangs = Fault(kind=FaultKind.FREEZE, at_s=0.6, target="prefill-0", lasts_s=0.8)
    gone = Fault(kind=FaultKind.RESET, at_s=0.6, target="router-0", other="client-0")
    result = run(story(cluster(), [request("long", max_tokens=200)], [hangs, gone], max_model_len=320))
    assert result.counts["outcome:length"] == 1 + 2


@pytest.mark.parametrize("seed", range(4))
def test_a_client_that_has_more_than_a_prefill_instance_that_was_cut_off_is_placed_again(run: Run, seed: int) -> None:
    """The slow one still computed the first attempt when all that had the second died. It answered that no tokens were
    generated, and the client got that as its error."""
    instances = {each.name: each for each in cluster(routers=2, prefills=2)}
    instances["prefill-1"] = dataclasses.replace(instances["prefill-1"], step_s=0.4, chunk_tokens=16)
    cut = Fault(kind=FaultKind.CUT, at_s=0.05, target="router-0", other="prefill-1", lasts_s=5.0)
    died = [
        Fault(kind=FaultKind.KILL, at_s=1.2, target="router-0"),
        Fault(kind=FaultKind.RESTART, at_s=1.2, target="decode-0", lasts_s=0.05),
        Fault(kind=FaultKind.RESTART, at_s=1.2, target="prefill-0", lasts_s=0.5),
    ]
    long = request("long", prompt_tokens=100, max_tokens=200)
    result = run(story(tuple(instances.values()), [long], [cut, *died], max_model_len=320, seed=seed))
    assert result.counts["outcome:length"] == 1 + 4


@pytest.mark.parametrize("seed", [3, 9])
@pytest.mark.parametrize("again_s", [0.0003, 0.0006])
def test_a_client_reads_no_answer_at_an_instance_that_prefill_may_still_replace(
    run: Run, seed: int, again_s: float
) -> None:
    """Prefill did not hear that its push was accepted, and placed the attempt elsewhere. The client already read at the
    first instance, and got the second one's tokens behind those of the first."""
    pushed = {"after": "kv FinishPush", "target": "prefill-0", "other": "decode-1"}
    deaf = [
        Fault(kind=FaultKind.RESET, at_s=0.0, **pushed),
        Fault(kind=FaultKind.RESET, at_s=again_s, **pushed),
        Fault(kind=FaultKind.CUT_ONE_WAY, at_s=0.0, lasts_s=2.0, **pushed),
    ]
    requests = [request("long", max_tokens=200), request("tail", 3.0, max_tokens=2)]
    plan = story(cluster(decodes=2, step_s=0.02), requests, deaf, seed, max_model_len=320, divergent=True)
    result = run(dataclasses.replace(plan, direct_clients=plan.clients))
    assert result.counts["outcome:length"] == 2 + 2


@pytest.mark.parametrize("seed", range(4))
def test_a_client_has_no_token_that_ends_its_answer_without_knowing_that_it_has_ended(run: Run, seed: int) -> None:
    """The router sent the stop token, and waited with the end for prefill's account of the hand-over. Then it died with
    the decode instance, and the answer went on behind the stop token."""
    long = request("long", max_tokens=200)
    stops = tuple(random.Random(seed).sample(range(1, 44), 12))
    stopped = dataclasses.replace(long, params=dataclasses.replace(long.params, stop_token_ids=stops))
    late = {"kind": FaultKind.SLOW, "target": "prefill-0", "other": "router-0", "amount": 0.3, "lasts_s": 3.0}
    ended = "log info request_ended request_id=long attempt=1 session=0 outcome=finished"
    faults = [
        Fault(after="kv FinishPush", at_s=0.0, **late),
        Fault(kind=FaultKind.KILL, after=ended, at_s=0.01, target="router-0"),
        Fault(kind=FaultKind.RESTART, after=ended, at_s=0.01, target="decode-0", lasts_s=0.05),
    ]
    tail = request("tail", 2.0, max_tokens=2, router="router-1")
    result = run(story(cluster(routers=2, step_s=0.005), [stopped, tail], faults, seed, max_model_len=320))
    assert result.counts["outcome:stop"] == 1


@pytest.mark.parametrize("seed", [0, 3, 7])
@pytest.mark.parametrize("dead", ["colocated-0", "colocated-1"])
def test_a_request_goes_on_while_an_instance_keeps_the_answer_of_an_earlier_one_with_its_id(
    run: Run, seed: int, dead: str
) -> None:
    """The id was used again. When the second request lost its owner and its router, the first one's instance said that
    its secret was wrong."""
    instances = cluster(routers=2, prefills=0, decodes=0, colocated=2, step_s=0.02)
    again = request("same", 0.3, max_tokens=150, prompt_tokens=30)
    tail = request("tail", 3.0, max_tokens=2, router="router-1")
    faults = [
        Fault(kind=FaultKind.KILL, at_s=1.0, target="router-0"),
        Fault(kind=FaultKind.RESTART, at_s=1.0, target=dead, lasts_s=1.0),
    ]
    result = run(story(instances, [request("same", max_tokens=4), again, tail], faults, seed, max_model_len=320))
    assert result.counts["outcome:length"] == 3 + 4


@pytest.mark.parametrize(("seed", "decode"), [(0, "decode-1"), (1, "decode-0")])
def test_a_client_is_sent_back_to_where_its_tokens_came_from_when_prefill_names_another_instance_too_late(
    run: Run, seed: int, decode: str
) -> None:
    """Prefill did not hear that its push was accepted, and named a second instance when the first one already drew.
    The client was told of the second one, re-attached there, and was refused for its tokens."""
    other = "decode-0" if decode == "decode-1" else "decode-1"
    pushed = {"after": "kv FinishPush", "target": "prefill-0", "other": decode}
    faults = [
        Fault(kind=FaultKind.CUT, at_s=0.0, lasts_s=7.0, **pushed),
        Fault(kind=FaultKind.RESET, at_s=0.3, **pushed),
        Fault(kind=FaultKind.RESET, at_s=0.30001, **pushed),
        Fault(kind=FaultKind.SLOW, at_s=0.2, target="client-0", other="router-0", amount=0.06, lasts_s=8.0),
        Fault(kind=FaultKind.SLOW, at_s=0.2, target=other, other="router-0", amount=0.3, lasts_s=3.0),
    ]
    requests = [request("long", max_tokens=200), request("tail", 3.0, max_tokens=2)]
    plan = story(cluster(decodes=2, step_s=0.02), requests, faults, seed, max_model_len=320, divergent=True)
    result = run(dataclasses.replace(plan, direct_clients=plan.clients))
    assert result.counts["outcome:length"] == 2 + 2


def test_a_search_that_its_client_ends_expects_no_reports_of_the_instances_that_have_answered(run: Run) -> None:
    """One prefill instance had answered, another one was cut off: the reports of the first were awaited for ever. Seed
    910675 of the simulation found it."""
    run(draw_plan(910675))


def test_a_search_suspects_no_instance_whose_reports_have_ended(run: Run) -> None:
    """A router waited for an instance that was cut off, and suspected another one of being dead, which was silent only
    because it had sent all its reports. Seed 7401423 of the simulation found it."""
    run(draw_plan(7401423))


def test_a_request_that_raises_is_not_sent_to_a_restarted_instance_that_its_router_cannot_follow(run: Run) -> None:
    """Redis was away, so the router did not know that the instance had restarted. Four times it sent the request to the
    new process, which crashed; it was not reading that process's reports. Seed 7503280 of the simulation found it."""
    run(draw_plan(7503280))


def test_a_search_finds_no_prompt_of_an_earlier_attempt(run: Run) -> None:
    """A holder had no room to resume the request, so its router looked for it everywhere. An instance that had computed
    the prompt before refused to be asked in the same session. Seed 7304177 of the simulation found it."""
    run(draw_plan(7304177))
