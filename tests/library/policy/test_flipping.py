from dataclasses import replace

import pytest

from kaveri.domain.view import (
    BOTH_PHASES,
    FIRST_ORDER,
    ClusterView,
    InstanceState,
    InstanceStatus,
    Phase,
    PhaseOrder,
)
from kaveri.errors import InvalidArgument
from kaveri.policy.flipping import OrderedPhases, check_order
from tests.library.policy.views import instance, view_of

P, D = Phase.PREFILL, Phase.DECODE


def able(instance_id: str, *phases: Phase, **load: object) -> InstanceStatus:
    """An instance of both phases that serves these."""
    return instance(instance_id, BOTH_PHASES, **{"phases": phases, "phase_order": FIRST_ORDER, **load})


def refusal(view: ClusterView, phases: tuple[Phase, ...], under_way: dict[str, OrderedPhases] | None = None) -> str:
    with pytest.raises(InvalidArgument) as refused:
        check_order(view, "a", phases, under_way or {})
    assert refused.value.field == "phases"
    return str(refused.value)


def test_the_last_instance_that_takes_requests_of_a_phase_does_not_leave_it() -> None:
    assert "no other instance serves it" in refusal(view_of(able("a", P), able("b", D)), (D,))
    drains = able("b", P, D, state=InstanceState.DRAINING)
    assert "no other instance serves it" in refusal(view_of(able("a", P, D), drains), (P,))
    ends = able("b", P, D, ending_phases=(D,))
    assert "no other instance serves it" in refusal(view_of(able("a", P, D), ends), (P,))
    check_order(view_of(able("a", P), able("b", P), able("c", D)), "a", (D,), {})
    check_order(view_of(able("a", P, D), able("b", P, D)), "a", (), {})
    check_order(view_of(able("a"), able("b", D)), "a", (P,), {})


def test_an_instance_whose_heartbeats_are_late_serves_no_phase() -> None:
    gone = replace(able("b", P), heartbeat_age_s=3.0)
    check_order(view_of(able("a", D), gone), "a", (P, D), {})
    check_order(view_of(able("a", D), able("c", D), gone), "a", (P,), {})
    only = replace(able("b", D), heartbeat_age_s=3.0)
    assert "no other instance serves it" in refusal(view_of(able("a", D), only, able("c", P)), (P,))
    assert "no other instance serves it" in refusal(
        view_of(replace(able("a", D), heartbeat_age_s=3.0), able("c", P)), (P,)
    )


def test_an_order_that_is_under_way_counts_as_carried_out_until_the_load_shows_it() -> None:
    seen = view_of(able("a", D), able("b", D), able("c", P))
    newest = {"b": OrderedPhases(1, PhaseOrder(3, 1), (P,))}
    assert "no other instance serves it" in refusal(seen, (P,), newest)
    check_order(seen, "a", (P,), {"b": OrderedPhases(2, PhaseOrder(3, 1), (P,))})
    went_back = able("b", D, phase_order=PhaseOrder(3, 1))
    check_order(view_of(able("a", D), went_back, able("c", P)), "a", (P,), newest)


def test_a_prefill_instance_keeps_one_that_takes_its_kv() -> None:
    assert "push their KV" in refusal(view_of(able("a", D), able("b", P)), (P, D))
    check_order(view_of(able("a", D), able("b", P), able("c", D)), "a", (P, D), {})
    check_order(view_of(able("a", D), able("b", P, D)), "a", (P, D), {})


def test_an_instance_is_ordered_what_its_engine_can_do_only() -> None:
    assert "which a can serve" in refusal(view_of(instance("a", (P,)), instance("b", (P, D))), (P, D))
