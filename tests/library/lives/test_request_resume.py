"""A request that lost its decode instance and has a replica: the holder resumes it, or it is placed again."""

import pytest

from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.sampling import FinishReason
from kaveri.errors import KaveriError, NoCapacity, RequestNotFound, Unavailable
from kaveri.lives import request_values as lives
from kaveri.lives.request import step
from kaveri.policy.retry import Setback
from tests.library.lives.test_request import appended

PREFILL, OWNER, HOLDER = (
    lives.InstanceLife("prefill-0", 1),
    lives.InstanceLife("decode-0", 11),
    lives.InstanceLife("decode-1", 12),
)
FIRST, SECOND = lives.Attempt(1, PREFILL, 0, 20), lives.Attempt(2, lives.NO_LIFE, 3, 20)
THIRD = lives.Attempt(3, PREFILL, 3, 20)
GONE = Unavailable("gone")
REPLICA = ReplicaLocation(*HOLDER, 32)
OWNED = lives.Decoding(FIRST, 3, OWNER, lives.PrefillLeg.COMPLETE, REPLICA)
ASKED = lives.ResumeRequested(SECOND, HOLDER)
OWNER_GONE, HOLDER_GONE = (
    lives.GivenUp(1, OWNER, GONE, has_ended=False),
    lives.GivenUp(2, HOLDER, GONE, has_ended=False),
)
END_OF_OWNER, END_OF_HOLDER = lives.Abort(1, OWNER), lives.Abort(2, HOLDER)


def run(state: lives.State, *events: lives.Event) -> tuple[lives.State, list[lives.Action]]:
    actions: list[lives.Action] = []
    for event in events:
        state, more = step(state, event, 100.0)
        actions += more
    return state, actions


def aborts(actions: list[lives.Action]) -> list[lives.Action]:
    return [action for action in actions if isinstance(action, lives.Abort | lives.Disown)]


def lost() -> lives.State:
    return run(OWNED, OWNER_GONE)[0]


def resuming() -> lives.State:
    return run(lost(), ASKED)[0]


def drawn(
    attempt: int, source: lives.InstanceLife, first_index: int, *token_ids: int, finish: FinishReason | None = None
) -> lives.TokensReceived:
    return lives.TokensReceived(attempt, source, first_index, token_ids, (), finish)


def test_a_lost_request_with_a_replica_is_resumed_by_its_holder_without_prefill() -> None:
    state, actions = run(OWNED, OWNER_GONE)
    assert state == lives.Lost(FIRST, 3, GONE, Setback.LOST, OWNER, lives.PrefillLeg.COMPLETE, REPLICA, (END_OF_OWNER,))
    assert actions == [lives.LeaveAttempt()], "the holder is asked before the former instance is aborted"
    state, actions = run(state, ASKED)
    assert (state, actions) == (
        lives.Resuming(SECOND, 3, HOLDER, (END_OF_OWNER,)),
        [lives.Follow(2, HOLDER, is_there=False)],
    )
    state, actions = run(state, lives.ResumeAnswered())
    assert state == lives.Decoding(SECOND, 3, HOLDER, lives.PrefillLeg.COMPLETE)
    assert actions == [END_OF_OWNER, lives.Follow(2, HOLDER)]
    _, actions = run(state, drawn(2, HOLDER, 3, 8, 9, finish=FinishReason.LENGTH))
    assert appended(actions) == [8, 9]


def test_tokens_of_the_holder_may_come_before_its_answer() -> None:
    state, actions = run(resuming(), drawn(2, HOLDER, 3, 8))
    assert state == lives.Decoding(SECOND, 4, HOLDER, lives.PrefillLeg.COMPLETE)
    assert (appended(actions), aborts(actions)) == ([8], [END_OF_OWNER])
    for answer in (lives.ResumeAnswered(), lives.ResumeAnswered(GONE, may_have_begun=True)):
        assert run(state, answer) == (state, [lives.Follow(2, HOLDER)]), "it draws, whatever has happened to its answer"


def test_late_tokens_of_the_former_instance_are_dropped_in_every_phase() -> None:
    late = drawn(1, OWNER, 3, 80)
    for state in (lost(), resuming()):
        assert run(state, late, drawn(1, OWNER, 4, 81, finish=FinishReason.LENGTH)) == (state, [])
    resumed, _ = run(resuming(), lives.ResumeAnswered())
    assert run(resumed, late) == (resumed, [lives.Disown(1, OWNER)])


def test_tokens_of_the_resumed_attempt_from_elsewhere_are_dropped_and_an_announcement_is_none() -> None:
    state, foreign = resuming(), HOLDER._replace(incarnation=1)
    assert run(state, drawn(2, OWNER, 3, 80), drawn(2, foreign, 3, 80), drawn(2, HOLDER, 0)) == (state, [])


def test_a_gap_behind_a_resume_loses_the_attempt_and_ends_both_instances() -> None:
    state, actions = run(resuming(), drawn(2, HOLDER, 5, 8))
    assert isinstance(state, lives.Lost)
    assert (state.replica, state.withheld) == (None, ())
    assert aborts(actions) == [END_OF_OWNER, END_OF_HOLDER]


@pytest.mark.parametrize(
    ("error", "may_have_begun", "ended"),
    [
        (RequestNotFound("r"), False, [END_OF_OWNER]),
        (NoCapacity("decode", 0.1), False, [END_OF_OWNER]),
        (GONE, True, [END_OF_OWNER, END_OF_HOLDER]),
    ],
)
def test_a_refused_resume_is_placed_again_and_costs_no_attempt(
    error: KaveriError, may_have_begun: bool, ended: list[lives.Action]
) -> None:
    state, actions = run(resuming(), lives.ResumeAnswered(error, may_have_begun))
    assert state == lives.Lost(SECOND, 3, error, Setback.REFUSED, HOLDER, lives.PrefillLeg.COMPLETE)
    assert (actions[0], aborts(actions)) == (lives.LeaveAttempt(), ended)
    assert run(state, lives.Sent(THIRD)) == (lives.Prefilling(THIRD, 3), [])


def test_the_death_of_the_holder_while_it_is_asked_loses_the_attempt() -> None:
    state, actions = run(resuming(), HOLDER_GONE)
    assert state == lives.Lost(SECOND, 3, GONE, Setback.LOST, HOLDER, lives.PrefillLeg.COMPLETE)
    assert aborts(actions) == [END_OF_OWNER, END_OF_HOLDER]
    state, actions = run(resuming(), lives.GivenUp(2, HOLDER, GONE))
    assert isinstance(state, lives.Lost)
    assert aborts(actions) == [END_OF_OWNER], "the holder has ended it by itself"
    state = resuming()
    assert run(state, lives.GivenUp(1, OWNER, GONE)) == (state, []), "the former instance does not matter any more"


def test_a_resumed_request_may_be_resumed_again_at_its_next_holder() -> None:
    other = lives.InstanceLife("decode-2", 13)
    state, _ = run(
        resuming(), lives.ResumeAnswered(), lives.ReplicaNamed(2, HOLDER, ReplicaLocation(*other, 48)), HOLDER_GONE
    )
    assert isinstance(state, lives.Lost)
    assert (state.replica, state.withheld) == (ReplicaLocation(*other, 48), (END_OF_HOLDER,))
    state, _ = run(resuming(), lives.ResumeAnswered(), HOLDER_GONE)
    assert isinstance(state, lives.Lost)
    assert state.replica is None, "the holder's own copy is used up"


@pytest.mark.parametrize(
    ("end", "first"),
    [(FinishReason.CANCELLED, [lives.CompleteAnswer()]), (FinishReason.STOP, [lives.CompleteAnswer()]), (GONE, [])],
    ids=["cancel", "stop", "error"],
)
def test_what_ends_a_lost_request_ends_it_wherever_it_may_be(
    end: FinishReason | KaveriError, first: list[lives.Action]
) -> None:
    state, actions = run(lost(), lives.EndRequested(end))
    assert isinstance(state, lives.Ended)
    assert actions == [*first, END_OF_OWNER]
    state, actions = run(resuming(), lives.EndRequested(end))
    assert isinstance(state, lives.Ended)
    assert actions == [*first, lives.LeaveAttempt(), END_OF_OWNER, END_OF_HOLDER]
    late = (lives.ResumeAnswered(), lives.ResumeAnswered(GONE, may_have_begun=True), drawn(2, HOLDER, 3, 8))
    assert run(state, *late) == (state, [])


def test_a_later_session_finds_the_request_where_it_is() -> None:
    for state in (lost(), resuming()):
        ended, actions = run(state, lives.Superseded(GONE))
        assert isinstance(ended, lives.Ended)
        assert not aborts(actions)


def test_a_replica_that_is_forgone_frees_the_former_instance() -> None:
    state, actions = run(lost(), lives.ReplicaForgone())
    assert actions == [END_OF_OWNER]
    assert state == lives.Lost(FIRST, 3, GONE, Setback.LOST, OWNER, lives.PrefillLeg.COMPLETE)
    assert run(lost(), lives.Sent(THIRD)) == (lives.Prefilling(THIRD, 3), [END_OF_OWNER])


def test_an_instance_that_gives_a_request_up_leaves_its_replica_and_is_not_told_to_end_it() -> None:
    state, actions = run(OWNED, lives.GivenUp(1, OWNER, GONE))
    assert isinstance(state, lives.Lost)
    assert (state.replica, state.withheld, actions) == (REPLICA, (), [lives.LeaveAttempt()])


def test_only_the_owner_names_a_replica_and_the_last_word_counts() -> None:
    foreign = lives.ReplicaNamed(1, HOLDER, ReplicaLocation(*OWNER, 8))
    assert run(OWNED, foreign, lives.ReplicaNamed(2, OWNER, None)) == (OWNED, [])
    grown = lives.ReplicaNamed(1, OWNER, ReplicaLocation(*HOLDER, 48))
    assert run(OWNED, grown)[0] == OWNED._replace(replica=ReplicaLocation(*HOLDER, 48))
    assert run(OWNED, lives.ReplicaNamed(1, OWNER, None))[0] == OWNED._replace(replica=None)


def test_a_replica_may_be_named_before_the_first_token_and_ends_with_the_place() -> None:
    placed = lives.Placed(FIRST, 0, OWNER)
    state, _ = run(placed, lives.ReplicaNamed(1, OWNER, REPLICA))
    assert isinstance(state, lives.Placed)
    assert state.replica == REPLICA
    state, _ = run(state, OWNER_GONE)
    assert isinstance(state, lives.Lost)
    assert state.replica == REPLICA
    for before in (lives.Unplaced(), lost(), resuming()):
        assert run(before, lives.ReplicaNamed(1, OWNER, REPLICA)) == (before, [])


def test_a_replica_that_is_named_before_its_place_counts_once_the_place_is_known() -> None:
    grown = ReplicaLocation(*HOLDER, 48)
    early = [
        lives.ReplicaNamed(1, OWNER, REPLICA),
        lives.ReplicaNamed(1, HOLDER, None),
        lives.ReplicaNamed(1, OWNER, grown),
    ]
    state, actions = run(lives.Prefilling(FIRST, 0), *early, lives.DecodeNamed(OWNER))
    assert isinstance(state, lives.Placed)
    assert (state.replica, actions) == (grown, [lives.Follow(1, OWNER)])
    assert len(state.held.events) == 1, "the last word of each instance is kept"
    many = [lives.ReplicaNamed(1, lives.InstanceLife("decode-0", number), REPLICA) for number in range(100)]
    state, _ = run(lives.Prefilling(FIRST, 0), *many)
    assert isinstance(state, lives.Prefilling)
    assert len(state.held.events) == FIRST.most_tokens


@pytest.mark.parametrize("received", [0, 3])
def test_a_whole_answer_and_a_replica_may_come_before_the_answer_to_an_attach(received: int) -> None:
    whole = drawn(2, OWNER, received, *range(received, 20), finish=FinishReason.LENGTH)
    seeking = lives.SeekingOwner(lives.Attempt(2, lives.NO_LIFE, received, 20), received)
    taken = lives.TookOver(lives.Attempt(2, PREFILL, received, 20), (), OWNER)
    state, actions = run(seeking, lives.ReplicaNamed(2, OWNER, REPLICA), whole, taken)
    assert state == lives.Ended(FinishReason.LENGTH, taken.attempt)
    assert appended(actions) == list(range(received, 20))


@pytest.mark.parametrize("first", [OWNER, HOLDER])
def test_two_instances_may_send_a_whole_answer_before_the_answers_to_attach(first: lives.InstanceLife) -> None:
    instances = sorted((OWNER, HOLDER), key=lambda life: life != first)
    answers = [drawn(2, life, 0, *range(20), finish=FinishReason.LENGTH) for life in instances]
    taken = lives.TookOver(lives.Attempt(2, PREFILL, 0, 20), (), HOLDER)
    state, actions = run(lives.SeekingOwner(lives.Attempt(2, lives.NO_LIFE, 0, 20), 0), *answers, taken)
    assert state == lives.Ended(FinishReason.LENGTH, taken.attempt)
    assert appended(actions) == list(range(20))


def test_a_replica_leaves_room_for_all_tokens_of_a_place_that_is_named_late() -> None:
    foreign, own = lives.ReplicaNamed(1, HOLDER, ReplicaLocation(*OWNER, 8)), lives.ReplicaNamed(1, OWNER, REPLICA)
    rest = drawn(1, OWNER, 1, *range(1, 20), finish=FinishReason.LENGTH)
    state, actions = run(
        lives.Prefilling(FIRST, 0), lives.FirstTokenReported((0,)), foreign, own, rest, lives.DecodeNamed(OWNER)
    )
    assert isinstance(state, lives.Finishing)
    assert appended(actions) == list(range(20))


def test_a_place_that_is_named_again_keeps_its_replica_and_another_one_does_not() -> None:
    state, _ = run(lives.Placed(FIRST, 0, OWNER), lives.ReplicaNamed(1, OWNER, REPLICA), lives.DecodeNamed(OWNER))
    assert isinstance(state, lives.Placed)
    assert state.replica == REPLICA
    state, _ = run(state, lives.DecodeNamed(HOLDER))
    assert isinstance(state, lives.Placed)
    assert state.replica is None


def test_a_request_of_an_earlier_session_is_resumed_at_the_holder_that_a_hint_names() -> None:
    state, actions = run(lives.Unplaced(3), ASKED)
    assert (state, actions) == (lives.Resuming(SECOND, 3, HOLDER), [lives.Follow(2, HOLDER, is_there=False)])
