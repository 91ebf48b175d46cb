"""How holds end, and what decode legs hear of them then."""

import pytest

from kaveri.errors import KaveriError, RequestCancelled, RequestNotFound
from services.prefill.hold_lifecycle import (
    AnswerPush,
    CallerAborted,
    EndRequest,
    HeldHere,
    HoldEnded,
    HoldEvent,
    HoldOutcome,
    LeaseOver,
    PushBroke,
    PushingHeld,
    PushLeft,
    ReleaseAsked,
    gone,
    step_hold,
)


def test_a_release_by_one_leg_leaves_the_push_of_another() -> None:
    assert step_hold(PushingHeld(9.0), ReleaseAsked(), 1.0, "r") == (PushingHeld(9.0), ())


@pytest.mark.parametrize(
    ("state", "event", "heard"),
    [
        (HeldHere(9.0), ReleaseAsked(), RequestNotFound),
        (PushingHeld(9.0), PushLeft(), RequestNotFound),
        (HeldHere(9.0), CallerAborted(), RequestCancelled),
        (PushingHeld(9.0), CallerAborted(), RequestCancelled),
    ],
)
def test_legs_end_with_the_abort_of_a_caller_and_compute_what_a_leg_gave_up(
    state: HeldHere | PushingHeld, event: HoldEvent, heard: type[KaveriError]
) -> None:
    ended, actions = step_hold(state, event, 1.0, "r")
    assert isinstance(ended, HoldEnded)
    assert EndRequest() in actions
    assert type(gone("r", ended.outcome)) is heard


def test_the_push_of_an_aborted_hold_is_answered() -> None:
    ended, actions = step_hold(PushingHeld(9.0), CallerAborted(), 1.0, "r")
    assert ended == HoldEnded(HoldOutcome.ABORTED)
    assert isinstance(actions[0], AnswerPush)
    assert isinstance(actions[0].error, RequestCancelled)


def test_a_hold_whose_time_ran_out_during_a_push_ends_when_that_breaks() -> None:
    """Also when the clock is a little behind the timer."""
    state, _ = step_hold(PushingHeld(9.0), LeaseOver(), 8.999, "r")
    ended, _ = step_hold(state, PushBroke("cut"), 8.9995, "r")
    assert ended == HoldEnded(HoldOutcome.EXPIRED)
