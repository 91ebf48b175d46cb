"""Plans for planted bugs that drawn plans meet rarely: each leads straight to the decision that the bug changes."""

from dataclasses import replace

from kaveri.domain.sampling import SamplingParams
from kaveri.policy.replication import ReplicationMode
from tests.simulation.cluster.directed import cluster, request, story
from tests.simulation.cluster.plan import Fault, FaultKind, Plan

_RESERVED = "start /kaveri.v1.DecodeService/Reserve"
_ALL_WRITTEN = "kv FinishPush"


def _slow(target: str, other: str, amount: float, lasts_s: float, **when: object) -> Fault:
    fields = {"at_s": 0.0} | when
    return Fault(kind=FaultKind.SLOW, target=target, other=other, amount=amount, lasts_s=lasts_s, **fields)  # type: ignore[arg-type]


def _reset(target: str, other: str, **when: object) -> Fault:
    return Fault(kind=FaultKind.RESET, target=target, other=other, **when)  # type: ignore[arg-type]


def _cut(kind: FaultKind, target: str, other: str, at_s: float, lasts_s: float, after: str = "") -> Fault:
    return Fault(kind=kind, target=target, other=other, at_s=at_s, lasts_s=lasts_s, after=after)


_LONG = request("long", max_tokens=200)
_BEFORE = request("before", max_tokens=2)

_LATE_S = 0.4
"""How late a report of prefill comes. Less than a router's suspect_after_s: then it would ask the instance again."""

_COPIED = "log info replica_held request_id=moved"
"""The owner of the request has found a holder."""


def _replicated(decodes: int, faults: list[Fault], orphan_grace_s: float = 2.0, drain_timeout_s: float = 2.0) -> Plan:
    """decode-0 owns the request, and decode-1 holds its copy."""
    return story(
        cluster(decodes=decodes, step_s=0.02),
        [_BEFORE, request("moved", 0.5, prompt_tokens=100, max_tokens=120)],
        faults,
        max_model_len=320,
        replication=ReplicationMode.RING,
        divergent=True,
        orphan_grace_s=orphan_grace_s,
        drain_timeout_s=drain_timeout_s,
    )


_TWICE = (request("same", max_tokens=150), request("same", 0.5, max_tokens=150, router="router-1"))
"""Two requests with one id. Both are in flight only where the store has lost the first one's claim."""


PLANS: dict[str, Plan] = {
    "index_ignored": story(
        cluster(step_s=0.05),
        [_BEFORE, request("late", 0.5, prompt_tokens=150, max_tokens=30)],
        # Tokens of decode overtake the one that prefill drew.
        [_slow("prefill-0", "router-0", 1.0, 4.0, at_s=0.1, after=_RESERVED)],
        max_model_len=320,
    ),
    "failed_push_unnoticed": story(
        cluster(step_s=0.05),
        [_BEFORE, request("late", 0.5, prompt_tokens=200, max_tokens=30)],
        [_reset("prefill-0", "decode-0", at_s=0.6 + 0.02 * number) for number in range(8)],
        max_model_len=320,
    ),
    "replica_not_sealed_at_resume": _replicated(
        2,
        [
            # The owner draws on and copies, and its tokens reach no router. The holder takes long to land the copy.
            _slow("decode-1", "decode-1", 0.4, 4.0, at_s=0.5, after=_COPIED),
            _cut(FaultKind.CUT, "decode-0", "router-0", 0.6, 5.0, _COPIED),
        ],
    ),
    "old_holder_not_closed": _replicated(
        3,
        [_reset("decode-0", "decode-1", at_s=0.5 + 0.01 * number, after=_COPIED) for number in range(6)],
        orphan_grace_s=60.0,
    ),
    "watermark_one_block_too_far": _replicated(2, []),
    "mark_answered_before_its_digest": _replicated(
        2,
        [Fault(kind=FaultKind.DAMAGE, target="decode-0", other="decode-1", at_s=0.2, lasts_s=2.0, after=_COPIED)],
    ),
    "tail_sent_unfinished": _replicated(
        2,
        [Fault(kind=FaultKind.DRAIN, target="decode-0", at_s=0.8, lasts_s=5.0, after=_COPIED)],
        drain_timeout_s=30.0,
    ),
    "hint_trusted_without_incarnation": story(
        cluster(),
        [_BEFORE, request("late", 0.6, max_tokens=100), request("after", 1.5, max_tokens=100)],
        [
            # The name of the place comes late, and the place has restarted by then. It serves another request, so it is
            # not silent.
            _slow("prefill-0", "router-0", _LATE_S, 0.3, after=_RESERVED, after_count=2),
            Fault(kind=FaultKind.RESTART, after=_RESERVED, after_count=2, at_s=0.15, target="decode-0", lasts_s=0.05),
        ],
    ),
    "tail_not_sent": story(
        cluster(decodes=3, step_s=0.02),
        [_BEFORE, *(request(f"r{number}", 0.5, prompt_tokens=20 * number + 3, max_tokens=200) for number in range(5))],
        [Fault(kind=FaultKind.DRAIN, at_s=1.6, target="decode-0", lasts_s=10.0)],
        max_model_len=320,
        replication=ReplicationMode.RING,
        replica_min_tokens=32,
        drain_timeout_s=30.0,
    ),
    "orphaned_replicas_kept": story(
        cluster(decodes=2, step_s=0.02),
        [_BEFORE, replace(request("moved", 0.5, prompt_tokens=100, max_tokens=120), cancel_after_s=0.91)],
        [Fault(kind=FaultKind.KILL, at_s=1.4, target=name) for name in ("router-0", "decode-0")],
        max_model_len=320,
        replication=ReplicationMode.RING,
    ),
    "orphans_never_end": story(
        cluster(step_s=0.04),
        # Its client does not come back.
        [replace(_LONG, cancel_after_s=0.5)],
        [Fault(kind=FaultKind.KILL, at_s=0.4, target="router-0")],
        max_model_len=320,
    ),
    "attempt_check_removed": story(
        cluster(prefills=2, decodes=2, step_s=0.1),
        [request("twice", max_tokens=60)],
        [
            # The abort comes late, and the first instance draws on.
            *(_slow("router-0", decode, 2.0, 4.0) for decode in ("decode-0", "decode-1")),
            *(
                Fault(kind=FaultKind.RESTART, after=_ALL_WRITTEN, at_s=0.0, target=prefill, lasts_s=0.05)
                for prefill in ("prefill-0", "prefill-1")
            ),
        ],
        seed=12,
        max_model_len=320,
        divergent=True,
    ),
    "two_instances_in_one_attempt": story(
        cluster(decodes=2, step_s=0.1),
        [_LONG],
        [
            _cut(FaultKind.CUT, "prefill-0", "decode-1", 0.0, 14.0, _ALL_WRITTEN),
            _reset("router-0", "decode-1", at_s=12.0),
        ],
        max_model_len=320,
        divergent=True,
    ),
    "prompts_die_with_their_router": story(
        cluster(routers=2, step_s=0.1, chunk_tokens=16),
        [request("a", prompt_tokens=120, max_tokens=20)],
        [Fault(kind=FaultKind.KILL, at_s=0.4, target="router-0")],
    ),
    "text_offset_forgotten": story(
        cluster(routers=2, step_s=0.05),
        [request("a", max_tokens=60)],
        [Fault(kind=FaultKind.KILL, at_s=1.0, target="router-0")],
    ),
    "later_session_draws_another_seed": story(
        cluster(routers=2, step_s=0.05),
        [replace(request("a"), params=SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True))],
        [
            Fault(kind=FaultKind.KILL, at_s=1.0, target="router-0"),
            Fault(kind=FaultKind.RESTART, at_s=1.0, target="decode-0", lasts_s=0.1),
        ],
    ),
    "defaults_left_behind": story(
        cluster(routers=2, step_s=0.05),
        [replace(request("a"), params=SamplingParams(max_tokens=60, seed=5, ignore_eos=True))],
        [
            Fault(kind=FaultKind.KILL, at_s=1.0, target="router-0"),
            Fault(kind=FaultKind.RESTART, at_s=1.0, target="decode-0", lasts_s=0.1),
            Fault(kind=FaultKind.RESTART, at_s=1.0, target="prefill-0", lasts_s=0.1),
        ],
    ),
    "defaults_of_a_found_request_ignored": story(
        cluster(routers=2, step_s=0.1, chunk_tokens=16),
        [replace(request("a", prompt_tokens=120), params=SamplingParams(max_tokens=60, seed=5, ignore_eos=True))],
        [
            Fault(kind=FaultKind.KILL, at_s=0.4, target="router-0"),
            Fault(kind=FaultKind.RESTART, at_s=4.0, target="decode-0", lasts_s=0.1),
        ],
    ),
    "abort_ignores_sessions": story(
        cluster(routers=2, step_s=0.05),
        [request("a", max_tokens=100)],
        [_slow("router-0", "decode-0", 0.5, 3.0, at_s=0.5), _reset("client-0", "router-0", at_s=1.0)],
    ),
    "quarantine_skipped": story(
        cluster(prefills=2, block_count=20, step_s=0.05, chunk_tokens=32),
        [
            replace(request("first", prompt_tokens=150, max_tokens=50), cancel_after_s=0.3),
            request("next", 0.05, prompt_tokens=170, max_tokens=50),
        ],
        [_slow("prefill-0", "decode-0", 0.6, 4.0, after="kv PushOpened")],
        seed=6,
        max_model_len=320,
    ),
    "freed_seat_stays_empty": story(
        cluster(max_batch=1),
        [replace(_LONG, cancel_after_s=0.6), request("next", 0.2, max_tokens=10)],
        [],
        max_model_len=320,
    ),
    "abort_of_a_running_request_unanswered": story(
        cluster(decodes=2),
        [_LONG],
        [
            *(_slow(decode, "prefill-0", 4.0, 4.0, after=_ALL_WRITTEN) for decode in ("decode-0", "decode-1")),
            Fault(kind=FaultKind.ENGINE, after=_ALL_WRITTEN, at_s=0.05, target="prefill-0", lasts_s=1.0),
        ],
        max_model_len=320,
    ),
    "replaced_owner_not_told": story(
        cluster(routers=2),
        _TWICE,
        [Fault(kind=FaultKind.STORE_EMPTIED, at_s=0.3)],
    ),
    "secrets_ignored": story(cluster(routers=2), _TWICE, [Fault(kind=FaultKind.STORE_EMPTIED, at_s=0.3)]),
    "streams_repeat_for_any_router": story(
        cluster(routers=2),
        _TWICE,
        [
            Fault(kind=FaultKind.STORE_EMPTIED, at_s=0.3),
            # What decode-0 says to the first one's router is lost with the stream.
            _cut(FaultKind.CUT_ONE_WAY, "decode-0", "router-0", 0.48, 0.45),
            _reset("router-0", "decode-0", at_s=0.85),
        ],
    ),
    "stream_goes_on_where_it_broke": story(
        cluster(step_s=0.05),
        [_BEFORE, request("cut", 0.4, max_tokens=12)],
        [
            _cut(FaultKind.CUT_ONE_WAY, "decode-0", "router-0", 0.6, 0.45),
            _reset("router-0", "decode-0", at_s=0.95),
        ],
    ),
    "late_placement_not_attached": story(
        cluster(),
        [_BEFORE, request("late", 0.35, max_tokens=20)],
        [
            _slow("prefill-0", "router-0", _LATE_S, 0.3, at_s=0.3),
            # The tokens are lost with the stream, and there is another one when the name of the place comes.
            _cut(FaultKind.CUT_ONE_WAY, "decode-0", "router-0", 0.3, 0.4),
            _reset("router-0", "decode-0", at_s=0.65),
        ],
    ),
    "claims_of_dead_routers_kept": replace(
        story(
            cluster(routers=2, step_s=0.02),
            [
                request("same", 0.3, max_tokens=150),
                replace(request("same", 5.0, router="router-1"), client="client-1"),
            ],
            [
                Fault(kind=FaultKind.CLIENT, at_s=0.6, target="client-0"),
                Fault(kind=FaultKind.KILL, at_s=0.599, target="router-0"),
            ],
        ),
        clients=("client-0", "client-1"),
    ),
    "partners_of_former_lives_count": story(
        cluster(decodes=2, step_s=0.02),
        [request("late", 4.0, max_tokens=4)],
        [Fault(kind=FaultKind.RESTART, at_s=1.0, target="decode-0", lasts_s=0.1)],
        replication=ReplicationMode.PAIR,
    ),
    "refused_writes_end_leases": story(
        cluster(decodes=2),
        [request(f"r{number}", 0.1 * number, max_tokens=80) for number in range(20)],
        [Fault(kind=FaultKind.STORE_REFUSES, at_s=0.4, lasts_s=3.0)],
    ),
    "refused_connections_cost_attempts": story(
        cluster(decodes=2),
        [request(f"r{number}", 0.1 * number, max_tokens=40) for number in range(16)],
        [Fault(kind=FaultKind.RESTART, at_s=0.5, target="prefill-0", lasts_s=5.0)],
        lease_ttl_s=3.0,
    ),
    "loss_of_the_first_token_ignored": story(
        cluster(),
        [_BEFORE, request("first", 0.35, max_tokens=20)],
        [_cut(FaultKind.CUT_ONE_WAY, "prefill-0", "router-0", 0.3, 17.0)],
    ),
    "suspicion_forgotten": story(
        cluster(prefills=2, decodes=2),
        [_LONG],
        [Fault(kind=FaultKind.DEATH, at_s=0.0, target="long", amount=9.0)],
        max_model_len=320,
    ),
    "suspect_not_blamed": story(
        cluster(prefills=2, decodes=2),
        [_LONG],
        [Fault(kind=FaultKind.DEATH, at_s=0.0, target="long", amount=9.0)],
        max_model_len=320,
    ),
    "suspects_together": story(
        # All are recomputed at one prefill instance.
        cluster(decodes=2, step_s=0.02, chunk_tokens=128),
        [*(request(f"r{number}", 0.02 * number, max_tokens=60) for number in range(12)), request("deadly", 0.2)],
        [Fault(kind=FaultKind.DEATH, at_s=0.0, target="deadly", amount=5.0)],
        seed=1,
        max_model_len=320,
    ),
    "reports_not_repeated": story(
        cluster(step_s=0.05),
        [_BEFORE, request("cut", 0.4, prompt_tokens=150, max_tokens=12)],
        [
            _cut(FaultKind.CUT_ONE_WAY, "prefill-0", "router-0", 0.42, 0.27),
            _reset("router-0", "prefill-0", at_s=0.67),
        ],
        max_model_len=320,
    ),
    "direct_answers_offered_too_early": story(
        cluster(decodes=2, step_s=0.02),
        [request("long", max_tokens=200), request("tail", 3.0, max_tokens=2)],
        [
            Fault(kind=FaultKind.RESET, after=_ALL_WRITTEN, at_s=0.0, target="prefill-0", other="decode-1"),
            Fault(kind=FaultKind.RESET, after=_ALL_WRITTEN, at_s=0.0003, target="prefill-0", other="decode-1"),
            Fault(
                kind=FaultKind.CUT_ONE_WAY,
                after=_ALL_WRITTEN,
                at_s=0.0,
                target="prefill-0",
                other="decode-1",
                lasts_s=2.0,
            ),
        ],
        max_model_len=320,
        divergent=True,
        seed=0,
        direct_clients=("client-0",),
    ),
    "former_owners_believed": story(
        tuple(
            replace(each, step_s=0.4, chunk_tokens=16) if each.name == "prefill-1" else each
            for each in cluster(routers=2, prefills=2)
        ),
        [request("long", prompt_tokens=100, max_tokens=200)],
        [
            _cut(FaultKind.CUT, "router-0", "prefill-1", 0.05, 5.0),
            Fault(kind=FaultKind.KILL, at_s=1.2, target="router-0"),
            Fault(kind=FaultKind.RESTART, at_s=1.2, target="decode-0", lasts_s=0.05),
            Fault(kind=FaultKind.RESTART, at_s=1.2, target="prefill-0", lasts_s=0.5),
        ],
        max_model_len=320,
    ),
    "copy_of_other_tokens_used": story(
        cluster(routers=2, decodes=3, step_s=0.04),
        [request("moved", prompt_tokens=100, max_tokens=200)],
        [
            # decode-2 draws other tokens than decode-0, whose copy is at decode-1. The store does not hear of that.
            *(_cut(FaultKind.CUT, "router-0", other, 0.95, 9.0) for other in ("store", "decode-0", "decode-1")),
            Fault(kind=FaultKind.KILL, at_s=6.0, target="router-0"),
            *(Fault(kind=FaultKind.RESTART, at_s=6.0, target=lost, lasts_s=0.05) for lost in ("decode-2", "prefill-0")),
        ],
        max_model_len=320,
        divergent=True,
        orphan_grace_s=8.0,
        replication=ReplicationMode.RING,
    ),
    "claims_of_others_closed": story(
        cluster(routers=2, step_s=0.05),
        [request("same", max_tokens=100), request("same", 1.5, max_tokens=20)],
        [_reset("client-0", "router-0", at_s=0.6)],
    ),
    "late_abort_obeyed": story(
        cluster(prefills=2, step_s=0.05),
        [request("twice", max_tokens=100)],
        [
            # The Abort of the first attempt comes when decode-0 has the second one.
            _slow("router-0", "decode-0", 1.0, 4.0),
            Fault(kind=FaultKind.RESTART, after=_ALL_WRITTEN, at_s=0.0, target="prefill-0", lasts_s=0.05),
            Fault(kind=FaultKind.RESTART, after=_ALL_WRITTEN, at_s=0.0, target="prefill-1", lasts_s=0.05),
        ],
        max_model_len=320,
    ),
    "late_attach_obeyed": story(
        cluster(routers=2, step_s=0.05),
        [request("a", max_tokens=150)],
        [
            # router-1 asks late, when the client has come back to router-0.
            _slow("router-1", "decode-0", 0.6, 4.0, at_s=0.8),
            _reset("client-0", "router-0", at_s=1.0),
            _reset("client-0", "router-1", at_s=1.2),
        ],
        max_model_len=320,
    ),
    "late_attach_of_a_prompt_obeyed": story(
        cluster(routers=2, step_s=0.1, chunk_tokens=16),
        [request("a", prompt_tokens=150, max_tokens=20)],
        [
            _slow("router-1", "prefill-0", 0.4, 4.0),
            _reset("client-0", "router-0", at_s=0.1),
            _reset("client-0", "router-1", at_s=0.3),
        ],
        max_model_len=320,
    ),
    "claims_of_former_lives_kept": story(
        cluster(routers=2),
        [
            # router-0 dies before it has closed the claim, and another life of it is there at once.
            replace(request("same", max_tokens=100), cancel_after_s=0.28),
            request("same", 0.6, max_tokens=100, router="router-1"),
        ],
        [Fault(kind=FaultKind.RESTART, at_s=0.3, target="router-0", lasts_s=0.05)],
    ),
    "tokens_of_a_client_not_compared": story(
        cluster(routers=2, decodes=2, step_s=0.05),
        [_LONG],
        [
            # decode-1 draws on, and does not hear that decode-0 has the request.
            _cut(FaultKind.CUT, "router-0", "decode-1", 1.0, 9.0),
            Fault(kind=FaultKind.KILL, at_s=4.0, target="router-0"),
            Fault(kind=FaultKind.RESTART, at_s=4.0, target="decode-0", lasts_s=0.05),
        ],
        max_model_len=320,
        divergent=True,
        orphan_grace_s=30.0,
    ),
    "placed_by_any": story(
        tuple(
            replace(each, step_s=0.4, chunk_tokens=16) if each.name.startswith("prefill") else each
            for each in cluster(routers=2, prefills=2, step_s=0.05)
        ),
        [request("a", prompt_tokens=100, max_tokens=100)],
        [
            # prefill-1 does not hear that decode-0 has the request from prefill-0, where router-1 cannot ask for it.
            _cut(FaultKind.CUT, "router-0", "prefill-1", 0.05, 7.0),
            _cut(FaultKind.CUT, "prefill-1", "decode-0", 0.7, 7.0),
            _cut(FaultKind.CUT, "router-1", "prefill-0", 1.9, 7.0),
            Fault(kind=FaultKind.KILL, at_s=2.0, target="router-0"),
        ],
        max_model_len=320,
        divergent=True,
        orphan_grace_s=30.0,
    ),
}
"""By the name of the planted bug. None of them shows a violation without it."""
