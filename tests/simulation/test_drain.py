"""Instances that drain: what has not begun goes elsewhere, what has begun goes on, and nothing counts as a failure."""

from collections.abc import Callable

import pytest

from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind, Plan
from tests.simulation.cluster.schedule import ScheduleResult

Run = Callable[[Plan], ScheduleResult]


def _lines(result: ScheduleResult, *parts: str) -> list[str]:
    return [line for line in result.lines if all(part in line for part in parts)]


@pytest.mark.parametrize("prefills", [1, 2])
def test_a_draining_prefill_instance_gives_back_what_it_has_not_begun_if_there_is_another(
    run: Run, prefills: int
) -> None:
    # A prompt of 5 steps each; most of them wait when the drain begins.
    requests = [request(f"r{number}", 0.001 * number, prompt_tokens=160, max_tokens=2) for number in range(40)]
    drain = Fault(kind=FaultKind.DRAIN, at_s=0.2, target="prefill-0", lasts_s=20.0)
    instances = cluster(prefills=prefills, decodes=2, step_s=0.02, chunk_tokens=32)
    result = run(story(instances, requests, [drain], drain_timeout_s=30.0))
    assert result.counts["outcome:length"] == 40 + 2
    assert not _lines(result, "attempt_lost")
    given_back = _lines(result, "request_ended", "outcome=given_back")
    assert len(given_back) > 5 if prefills == 2 else not given_back
    computed = _lines(result, "request_ended", "outcome=handed_over")
    assert len(computed) == 40 + 2, "a prompt was computed twice"


@pytest.mark.parametrize("target", ["router-0", "prefill-0", "decode-0", "colocated-0"])
def test_a_drained_instance_lives_on_without_new_requests_and_takes_them_again(run: Run, target: str) -> None:
    requests = [request(f"r{number}", 0.05 * number, max_tokens=20) for number in range(60)]
    undrain = Fault(kind=FaultKind.UNDRAIN, at_s=1.0, target=target, lasts_s=1.0)
    result = run(story(cluster(routers=2, prefills=2, decodes=2, colocated=1), requests, [undrain]))
    assert result.counts["outcome:length"] == 60 + 4
    assert not _lines(result, "attempt_lost")
    assert len(_lines(result, f"{target}#1", "drain_started")) == 1
    assert len(_lines(result, f"{target}#1", "drain_ended")) == 1


def test_two_drains_of_a_cluster_with_one_of_each_are_waited_for(run: Run) -> None:
    requests = [request(f"r{number}", 0.05 * number, max_tokens=20) for number in range(40)]
    undrains = [
        Fault(kind=FaultKind.UNDRAIN, at_s=0.5, target=target, lasts_s=0.5) for target in ("prefill-0", "decode-0")
    ]
    result = run(story(cluster(), requests, undrains))
    assert result.counts["outcome:length"] == 40 + 2


def test_a_client_that_is_gone_after_its_router_has_sent_it_away_is_not_computed_for(run: Run) -> None:
    """The former router lives on, so the request is no orphan."""
    long = request("long", max_tokens=280)
    # Their router reports its load all the time, so the draining one knows at once that it lives.
    others = [request(f"r{number}", 1.2 + 0.02 * number, max_tokens=2, router="router-1") for number in range(12)]
    deaf = Fault(kind=FaultKind.CUT_ONE_WAY, at_s=1.1, target="router-0", other="client-0", lasts_s=3.0)
    gone = Fault(kind=FaultKind.CLIENT, at_s=1.5, target="client-0")
    undrain = Fault(kind=FaultKind.UNDRAIN, at_s=1.0, target="router-0", lasts_s=3.0)
    faults = [deaf, undrain, gone]
    result = run(story(cluster(routers=2, step_s=0.03), [long, *others], faults, max_model_len=320))
    assert result.counts["fault:client"] == 1
    assert _lines(result, "request_moved", "long")
    assert _lines(result, "decode-0", "request_ended", "long", "outcome=aborted")


@pytest.mark.parametrize("kind", [FaultKind.DRAIN, FaultKind.UNDRAIN])
@pytest.mark.parametrize("decodes", [2, 3])
def test_requests_of_a_draining_decode_instance_go_on_from_their_replicas(
    run: Run, kind: FaultKind, decodes: int
) -> None:
    requests = [request("before", max_tokens=2)]
    requests += [request(f"r{number}", 0.5, prompt_tokens=100, max_tokens=150) for number in range(4)]
    drain = Fault(kind=kind, at_s=2.0, target="decode-0", lasts_s=10.0)
    plan = story(
        cluster(decodes=decodes, step_s=0.02),
        requests,
        [drain],
        max_model_len=320,
        replication=ReplicationMode.RING,
        replica_min_tokens=32,
        divergent=True,
        drain_timeout_s=30.0,
    )
    result = run(plan)
    assert result.counts["outcome:length"] == 5 + 2
    assert not _lines(result, "attempt_lost")
    owned = _lines(result, "decode-1", "replica_held", "owner_id=decode-0")
    changed = _lines(result, "owner_changed")
    assert owned, "nothing was on the instance that drains"
    assert len(changed) >= 1
    assert all("outcome=resumed" in line and "former_instance_id=decode-0" in line for line in changed)
    for line in changed:
        assert int(line.partition("recomputed_tokens=")[2].split()[0]) <= 32 + 8
    handed_over = _lines(result, "request_ended", "outcome=handed_over")
    assert len(handed_over) == 5 + 2, "a prompt was computed twice"


@pytest.mark.parametrize("replica_min_tokens", [32, 1000])
@pytest.mark.parametrize("mode", [ReplicationMode.RING, ReplicationMode.SPREAD])
def test_a_draining_decode_instance_lets_its_requests_go_with_all_their_kv(
    run: Run, mode: ReplicationMode, replica_min_tokens: int
) -> None:
    """Those that are not worth a copy get one first."""
    requests = [request("before", max_tokens=2)]
    requests += [request(f"r{number}", 0.5, prompt_tokens=20 * number + 3, max_tokens=200) for number in range(5)]
    drain = Fault(kind=FaultKind.DRAIN, at_s=1.6, target="decode-0", lasts_s=10.0)
    plan = story(
        cluster(decodes=3, step_s=0.02),
        requests,
        [drain],
        max_model_len=320,
        replication=mode,
        replica_min_tokens=replica_min_tokens,
        divergent=True,
        drain_timeout_s=30.0,
    )
    result = run(plan)
    assert result.counts["outcome:length"] == 6 + 2
    assert not _lines(result, "attempt_lost")
    assert not _lines(result, "resume_refused")
    let_go = _lines(result, "decode-0", "request_let_go")
    assert let_go, "nothing was on the instance that drains"
    changed = _lines(result, "owner_changed")
    assert len(changed) == len(let_go)
    # The newest token, which no instance has computed, and no other.
    assert all("outcome=resumed" in line and "recomputed_tokens=1 " in f"{line} " for line in changed), changed
    assert len(_lines(result, "request_ended", "outcome=handed_over")) == 6 + 2, "a prompt was computed twice"


def test_a_request_whose_holder_is_lost_while_it_is_let_go_goes_on(run: Run) -> None:
    requests = [request("before", max_tokens=2)]
    requests += [request(f"r{number}", 0.5, prompt_tokens=100, max_tokens=200) for number in range(4)]
    faults = [
        Fault(kind=FaultKind.DRAIN, at_s=1.6, target="decode-0", lasts_s=10.0),
        Fault(kind=FaultKind.CUT, at_s=1.62, target="decode-0", other="decode-1", lasts_s=4.0),
        Fault(kind=FaultKind.CUT, at_s=1.62, target="decode-0", other="decode-2", lasts_s=4.0),
    ]
    plan = story(
        cluster(decodes=3, step_s=0.02),
        requests,
        faults,
        max_model_len=320,
        replication=ReplicationMode.RING,
        replica_min_tokens=32,
        divergent=True,
        drain_timeout_s=30.0,
    )
    result = run(plan)
    assert result.counts["outcome:length"] == 5 + 2
    assert len(_lines(result, "request_ended", "outcome=handed_over")) == 5 + 2, "a prompt was computed twice"


def test_prompts_that_an_instance_has_not_begun_when_it_stops_prefill_are_computed_elsewhere(run: Run) -> None:
    switch = Fault(kind=FaultKind.SWITCH, at_s=0.6, target="prefill-0", other="decode", lasts_s=6.0)
    requests = [request(f"r{number}", 0.5, prompt_tokens=150, max_tokens=5) for number in range(8)]
    result = run(story(cluster(prefills=2, step_s=0.1), requests, [switch], max_model_len=320))
    assert result.counts["outcome:length"] == 8 + 2
    assert _lines(result, "request_ended", "outcome=given_back"), "none was waiting there"
    assert not _lines(result, "attempt_lost")


def test_requests_whose_holder_has_no_room_stay_where_they_are(run: Run) -> None:
    requests = [request(f"r{number}", 0.5, prompt_tokens=100, max_tokens=220) for number in range(6)]
    drain = Fault(kind=FaultKind.UNDRAIN, at_s=1.5, target="decode-0", lasts_s=6.0)
    instances = cluster(decodes=2, step_s=0.02, block_count=42)
    result = run(
        story(
            instances,
            requests,
            [drain],
            max_model_len=320,
            replication=ReplicationMode.RING,
            replica_min_tokens=32,
            drain_timeout_s=30.0,
        )
    )
    assert result.counts["outcome:length"] == 6 + 2
    assert not _lines(result, "attempt_lost")
    assert not _lines(result, "resume_refused")


@pytest.mark.parametrize("replica_min_tokens", [32, 1000])
def test_owner_and_holder_that_drain_together_compute_no_prompt_again(run: Run, replica_min_tokens: int) -> None:
    """The holder dropped the copies of requests that had just been let go to it."""
    # The last one is there so that the load lasts until the second drain.
    requests = [request("before", max_tokens=2), request("last", 4.0, max_tokens=2)]
    requests += [request(f"r{number}", 0.5, prompt_tokens=20 * number + 3, max_tokens=200) for number in range(5)]
    drains = [
        Fault(kind=FaultKind.DRAIN, at_s=1.6, target="decode-0", lasts_s=10.0),
        Fault(kind=FaultKind.DRAIN, at_s=0.0, after="log info request_let_go", target="decode-1", lasts_s=10.0),
    ]
    plan = story(
        cluster(decodes=3, step_s=0.02),
        requests,
        drains,
        max_model_len=320,
        replication=ReplicationMode.RING,
        replica_min_tokens=replica_min_tokens,
        divergent=True,
        drain_timeout_s=30.0,
    )
    result = run(plan)
    assert result.counts["fault:drain"] == 2
    assert result.counts["outcome:length"] == 7 + 2
    assert len(_lines(result, "request_ended", "outcome=handed_over")) == 7 + 2, "a prompt was computed twice"


def test_a_request_whose_owner_dies_while_its_holder_drains_is_not_computed_again(run: Run) -> None:
    requests = [request("before", max_tokens=2), request("moved", 0.5, prompt_tokens=100, max_tokens=150)]
    held = "log info replica_held request_id=moved"
    plan = story(
        cluster(decodes=3, step_s=0.02),
        requests,
        [
            Fault(kind=FaultKind.DRAIN, after=held, at_s=1.0, target="decode-1", lasts_s=10.0),
            Fault(kind=FaultKind.KILL, after=held, at_s=1.02, target="decode-0"),
        ],
        max_model_len=320,
        replication=ReplicationMode.RING,
        replica_min_tokens=32,
        divergent=True,
        drain_timeout_s=30.0,
    )
    result = run(plan)
    assert _lines(result, "decode-1", "replica_held", "request_id=moved", "owner_id=decode-0"), "another one owned it"
    assert _lines(result, "decode-1", "request_resumed", "request_id=moved")
    assert len(_lines(result, "request_ended", "outcome=handed_over")) == 2 + 2, "a prompt was computed twice"
