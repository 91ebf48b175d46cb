"""State machine of a held KV copy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.owner import Ownership, Term
from kaveri.lives.copy_holder import (
    Action,
    BareEvent,
    Checked,
    Complete,
    DrainBegun,
    Drop,
    Ended,
    EndRequested,
    Event,
    Growing,
    Orphan,
    OwnerLost,
    RecordOrphan,
    ResumeBegun,
    ResumeDone,
    ResumeFailed,
    Resuming,
    Seal,
    State,
    step,
)
from kaveri.timeouts import COMPLETE_COPY_S

GRACE_S = 10.0
OWNER, NEWER = (Ownership(Term(0, attempt), "router-0", bytes(16)) for attempt in (2, 3))
LOST = OwnerLost("it was killed")


def after(*events: Event, now_s: float = 0.0) -> tuple[State, list[Action]]:
    state: State = Growing()
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, now_s, GRACE_S)
        done += actions
    return state, done


def test_the_copy_of_a_lost_owner_waits_for_a_router_and_is_dropped_after_the_grace() -> None:
    orphan, done = after(LOST)
    assert (orphan, done) == (Orphan(GRACE_S), [RecordOrphan("it was killed")])
    assert step(orphan, Checked(), GRACE_S - 0.1, GRACE_S) == (orphan, ())
    assert step(orphan, Checked(), GRACE_S, GRACE_S) == (Ended(), (Drop("orphaned"),))


def test_the_copy_of_a_complete_answer_is_kept_for_a_moment_while_there_is_memory() -> None:
    complete, _ = after(BareEvent.OWNER_GAVE_UP)
    assert complete == Complete(COMPLETE_COPY_S)
    assert step(complete, Checked(), COMPLETE_COPY_S - 0.1, GRACE_S) == (complete, ())
    assert step(complete, Checked(is_memory_scarce=True), 0.0, GRACE_S)[0] == Ended()
    assert step(complete, Checked(), COMPLETE_COPY_S, GRACE_S)[0] == Ended()


def test_a_copy_that_grows_is_dropped_only_when_it_is_unused_or_its_request_is_over() -> None:
    assert after(Checked(is_memory_scarce=True)) == (Growing(), [])
    assert after(Checked(is_unused=True)) == (Ended(), [Drop("unused")])
    assert after(Checked(is_expired=True)) == (Ended(), [Drop("deadline")])


def test_a_copy_without_room_for_its_next_block_is_shut_and_kept() -> None:
    assert after(BareEvent.BLOCK_MISSED) == (Orphan(GRACE_S), [Seal()])


def test_a_holder_that_drains_keeps_what_a_router_may_ask_for_no_longer_than_its_grace() -> None:
    assert after(DrainBegun(0)) == (Ended(), [Drop("draining")])
    assert after(DrainBegun(16)) == (Orphan(GRACE_S), [Seal()])
    orphan, _ = after(LOST)
    assert step(orphan, DrainBegun(16), 0.0, 1.0) == (Orphan(1.0), ())
    assert step(Complete(0.5), DrainBegun(16), 0.0, 1.0) == (Complete(0.5), ())
    assert step(Resuming(OWNER), DrainBegun(16), 0.0, 1.0) == (Resuming(OWNER), ())


@pytest.mark.parametrize("begun", [Growing(), Orphan(1.0), Complete(1.0)])
def test_a_copy_that_is_resumed_goes_when_its_request_has_landed(begun: State) -> None:
    resuming, done = step(begun, ResumeBegun(OWNER), 0.0, GRACE_S)
    assert (resuming, done) == (Resuming(OWNER), ())
    assert step(resuming, Checked(is_expired=True, is_memory_scarce=True), 99.0, GRACE_S) == (resuming, ())
    assert step(resuming, ResumeDone(OWNER), 0.0, GRACE_S) == (
        Ended(),
        (Drop("resumed"),),
    )


def test_a_resume_that_fails_leaves_the_copy_for_another_one() -> None:
    assert after(ResumeBegun(OWNER), ResumeFailed(OWNER)) == (Orphan(GRACE_S), [])


@pytest.mark.parametrize("late", [ResumeFailed(OWNER), ResumeDone(OWNER)])
def test_a_newer_owner_that_resumes_is_not_disturbed_by_the_end_of_an_older_resume(late: Event) -> None:
    assert after(ResumeBegun(OWNER), ResumeBegun(NEWER), late) == (Resuming(NEWER), [])


@pytest.mark.parametrize("late", [LOST, BareEvent.OWNER_GAVE_UP, BareEvent.BLOCK_MISSED])
def test_the_former_owner_changes_nothing_once_the_copy_is_resumed(late: Event) -> None:
    assert after(ResumeBegun(OWNER), late) == (Resuming(OWNER), [])


RESUMES = [ResumeBegun, ResumeFailed, ResumeDone]
EVENTS = st.one_of(
    st.sampled_from([LOST, BareEvent.OWNER_GAVE_UP, BareEvent.BLOCK_MISSED, EndRequested("closed")]),
    st.builds(DrainBegun, st.sampled_from([0, 16])),
    st.builds(Checked, st.booleans(), st.booleans(), st.booleans()),
    st.builds(lambda kind, owner: kind(owner), st.sampled_from(RESUMES), st.sampled_from([OWNER, NEWER])),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 5)), max_size=20))
def test_in_any_order_of_events_a_copy_is_dropped_once_and_never_given_back_to_its_owner(
    events: list[tuple[Event, float]],
) -> None:
    state: State = Growing()
    now_s, drops = 0.0, 0
    for event, seconds in events:
        now_s += seconds
        former = state
        state, actions = step(state, event, now_s, GRACE_S)
        drops += sum(isinstance(action, Drop) for action in actions)
        assert drops == isinstance(state, Ended), "every copy that is gone was dropped once"
        if not isinstance(former, Growing):
            assert not isinstance(state, Growing)
            assert Seal() not in actions, "it was shut already"
        if isinstance(state, Orphan | Complete):
            assert state.until_s <= now_s + GRACE_S, "it is not kept longer than the grace"
