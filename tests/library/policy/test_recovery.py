from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import FIRST_ORDER, InstanceState, InstanceStatus, Phase
from kaveri.policy import replication
from kaveri.policy.replication import is_worth_a_resume
from tests.library.policy.views import DECODE, MODEL, instance, view_of

REPLICA = ReplicaLocation("decode-1", 7, 960)
CONTEXT = 1_000
HOLDER = instance("decode-1", DECODE, incarnation=7)


def prefill(number: int = 0, queued: int = 0) -> InstanceStatus:
    return instance(f"prefill-{number}", queued_prefill_tokens=queued)


@pytest.mark.parametrize(
    "holder",
    [
        None,
        instance("decode-1", DECODE, incarnation=8),
        instance("decode-1", DECODE, incarnation=7, model="other"),
        instance("decode-1", DECODE, incarnation=7, phases=(Phase.PREFILL,), phase_order=FIRST_ORDER),
    ],
    ids=["gone", "restarted", "other model", "other phase"],
)
def test_a_holder_that_cannot_go_on_is_not_asked(holder: InstanceStatus | None) -> None:
    statuses = [prefill()] if holder is None else [prefill(), holder]
    assert not is_worth_a_resume(REPLICA, CONTEXT, view_of(*statuses), MODEL)


def test_a_holder_that_drains_is_asked_since_it_pushes_the_replica_on() -> None:
    holder = instance("decode-1", DECODE, incarnation=7, state=InstanceState.DRAINING)
    assert is_worth_a_resume(REPLICA, CONTEXT, view_of(prefill(), holder), MODEL)


def test_a_small_replica_is_used_when_prefill_is_busy_or_away() -> None:
    small = replace(REPLICA, token_count=16)
    assert not is_worth_a_resume(small, CONTEXT, view_of(HOLDER, prefill()), MODEL)
    assert not is_worth_a_resume(small, CONTEXT, view_of(HOLDER, prefill(0, 5_000), prefill(1)), MODEL)
    assert is_worth_a_resume(small, CONTEXT, view_of(HOLDER, prefill(0, 5_000), prefill(1, 5_000)), MODEL)
    assert is_worth_a_resume(small, CONTEXT, view_of(HOLDER), MODEL)


tokens = st.integers(0, 100_000)


@given(held=tokens, more=tokens, context=st.integers(1, 100_000), queued=tokens, longer=tokens)
def test_more_held_tokens_and_longer_queues_never_speak_against_a_resume(
    held: int, more: int, context: int, queued: int, longer: int
) -> None:
    def decide(held: int, queued: int) -> bool:
        view = view_of(HOLDER, prefill(0, queued), prefill(1, queued))
        return is_worth_a_resume(replace(REPLICA, token_count=held), context, view, MODEL)

    assert decide(held, queued) <= decide(held + more, queued)
    assert decide(held, queued) <= decide(held, queued + longer)


@given(context=st.integers(1, 100_000), block_tokens=st.sampled_from([16, 32, 64]), lacking_blocks=st.integers(0, 2))
def test_a_replica_that_lacks_two_blocks_of_a_context_worth_a_copy_is_used(
    context: int, block_tokens: int, lacking_blocks: int
) -> None:
    held = ((context - 1) // block_tokens - lacking_blocks) * block_tokens
    replica = replace(REPLICA, token_count=max(0, held))
    used = is_worth_a_resume(replica, context, view_of(HOLDER, prefill()), MODEL)
    if context >= 512:
        assert used
    if held <= 0:
        assert not used


@given(held=tokens, context=st.integers(1, 100_000), lacking=st.floats(0.1, 10), copied=st.floats(0, 0.1))
def test_a_resume_never_costs_more_than_the_other_way(held: int, context: int, lacking: float, copied: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication, "_LACKING_COST", lacking)
        patch.setattr(replication, "_HELD_COST", copied)
        resumes = is_worth_a_resume(replace(REPLICA, token_count=held), context, view_of(HOLDER, prefill()), MODEL)
    if resumes:
        held = min(held, context - 1)
        assert held > 0
        assert (context - held) * lacking + held * copied <= context
