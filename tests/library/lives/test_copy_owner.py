"""State machine of a request's KV copy, on the instance that decodes the request."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.domain.replica import ReplicaLocation
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.lives.copy_owner import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Action,
    Alone,
    AskHolder,
    AwaitResumed,
    BareEvent,
    BeginCopy,
    CloseCopy,
    Copied,
    CopyGrew,
    CopyLost,
    EndAsMoved,
    Event,
    Holder,
    HolderChosen,
    MoveDone,
    Opening,
    ReleaseInEngine,
    RequestEnded,
    RoomGranted,
    SendLocation,
    State,
    step,
)

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
TICKET = Ticket(bytes(16), bytes(16), 1, (KvEndpoint("tcp", "h:1"),), (0,), 4, 60.0, LAYOUT, is_open=True)
ONE, OTHER = Holder("d1", 1, "h:1"), Holder("d2", 1, "h:2")
LOST = CopyLost(jitter=1.0)


def after(*events: Event) -> tuple[State, list[Action]]:
    copy: State = Alone()
    done: list[Action] = []
    for event in events:
        copy, actions = step(copy, event, 0.0)
        done += actions
    return copy, done


def test_a_copy_that_grows_is_told_to_the_router() -> None:
    copy, done = after(HolderChosen(ONE), RoomGranted(TICKET, 1), CopyGrew(16), CopyGrew(16), CopyGrew(32))
    assert copy == Copied(ONE, 0, 32)
    assert done == [
        AskHolder(ONE),
        BeginCopy(TICKET),
        SendLocation(ReplicaLocation("d1", 1, 16)),
        SendLocation(ReplicaLocation("d1", 1, 32)),
    ]


def test_the_life_that_granted_the_room_is_the_holder_not_the_one_of_the_view() -> None:
    copy, done = after(HolderChosen(ONE), RoomGranted(TICKET, 7), CopyGrew(16))
    assert isinstance(copy, Copied)
    assert copy.holder.incarnation == 7
    assert done[-1] == SendLocation(ReplicaLocation("d1", 7, 16))


def test_a_request_is_moved_once_the_engine_has_let_it_go() -> None:
    copied = (HolderChosen(ONE), RoomGranted(TICKET, 1), CopyGrew(16))
    _, done = after(*copied, BareEvent.MOVE_REQUESTED, CopyGrew(32), MoveDone(37))
    assert done[-4:] == [
        ReleaseInEngine(),
        SendLocation(ReplicaLocation("d1", 1, 32)),
        EndAsMoved(ReplicaLocation("d1", 1, 37)),
        AwaitResumed(ONE),
    ]
    for ended in (RequestEnded(), RequestEnded(is_given_up=True)):
        _, done = after(*copied, BareEvent.MOVE_REQUESTED, MoveDone(37), ended)
        assert not any(isinstance(action, CloseCopy) for action in done), "the request goes on from that copy"


def test_a_request_that_could_not_be_let_go_keeps_its_copy_or_looks_for_another() -> None:
    copied = (HolderChosen(ONE), RoomGranted(TICKET, 1), CopyGrew(16), BareEvent.MOVE_REQUESTED)
    copy, _ = after(*copied, BareEvent.MOVE_FAILED)
    assert copy == Copied(ONE, 0, 16)
    copy, _ = after(*copied, LOST, BareEvent.MOVE_FAILED)
    assert isinstance(copy, Alone)
    assert copy.former == ONE


def test_a_request_that_is_given_up_while_it_is_let_go_leaves_no_copy() -> None:
    moving = (HolderChosen(ONE), RoomGranted(TICKET, 1), BareEvent.MOVE_REQUESTED)
    _, done = after(*moving, RequestEnded(is_given_up=True), MoveDone(37))
    assert done[-1] == CloseCopy(ONE)


def test_a_request_that_ends_by_its_last_token_while_it_is_let_go_leaves_its_copy_for_a_moment() -> None:
    moving = (HolderChosen(ONE), RoomGranted(TICKET, 1), BareEvent.MOVE_REQUESTED)
    copy, done = after(*moving, RequestEnded(), MoveDone(37))
    assert done[-1] == ReleaseInEngine(), "the router may need it if this instance dies before the end has arrived"
    assert copy == Alone()


def test_a_holder_that_is_unwanted_drops_its_copy_before_another_one_is_asked() -> None:
    copied = (HolderChosen(ONE), RoomGranted(TICKET, 1), CopyGrew(16), BareEvent.HOLDER_UNWANTED)
    copy, done = after(*copied)
    assert done[-1] == CloseCopy(ONE)
    # The message may be lost.
    assert after(*copied, BareEvent.HOLDER_UNWANTED) == (copy, [*done, CloseCopy(ONE)])
    assert after(*copied, HolderChosen(OTHER), CopyGrew(32), BareEvent.MOVE_REQUESTED) == (copy, done)
    copy, _ = after(*copied, LOST)
    assert copy == Alone(), "another one is looked for at once"
    for ended in (RequestEnded(), RequestEnded(is_given_up=True)):
        assert after(*copied, ended) == (Alone(), done)


def test_a_former_holder_is_closed_once_another_one_has_granted_room() -> None:
    copied = (HolderChosen(ONE), RoomGranted(TICKET, 1), LOST, HolderChosen(OTHER))
    _, before = after(*copied)
    assert not any(isinstance(action, CloseCopy) for action in before), "its copy may still be resumed from"
    _, done = after(*copied, RoomGranted(TICKET, 1))
    assert done[-2:] == [CloseCopy(ONE), BeginCopy(TICKET)]


def test_a_former_holder_that_grants_room_again_is_not_closed() -> None:
    _, done = after(HolderChosen(ONE), RoomGranted(TICKET, 1), LOST, HolderChosen(ONE), RoomGranted(TICKET, 1))
    assert not any(isinstance(action, CloseCopy) for action in done)


@pytest.mark.parametrize("asked", [(), (HolderChosen(OTHER),)])
def test_a_request_that_is_given_up_between_two_holders_closes_the_former_copy(asked: tuple[Event, ...]) -> None:
    between = (HolderChosen(ONE), RoomGranted(TICKET, 1), LOST, *asked)
    _, done = after(*between, RequestEnded(is_given_up=True))
    assert done[-1] == CloseCopy(ONE)
    _, done = after(*between, RequestEnded())
    assert CloseCopy(ONE) not in done, "the router may need it if this instance dies before the end has arrived"


def test_the_copy_of_a_request_that_ends_is_left_to_the_engine_unless_it_is_given_up() -> None:
    _, done = after(HolderChosen(ONE), RoomGranted(TICKET, 1), RequestEnded(is_given_up=True))
    assert done[-1] == CloseCopy(ONE._replace(incarnation=1))
    _, done = after(HolderChosen(ONE), RoomGranted(TICKET, 1), RequestEnded())
    assert not any(isinstance(action, CloseCopy) for action in done), "its engine has given the copy up"


def test_pauses_double_until_a_copy_grows_and_have_a_limit() -> None:
    pauses = []
    copy: State = Alone()
    for _ in range(12):
        copy, _ = step(copy, HolderChosen(ONE), 0.0)
        copy, _ = step(copy, LOST, 0.0)
        assert isinstance(copy, Alone)
        pauses.append(copy.until_s)
    assert pauses[0] == FIRST_PAUSE_S
    assert all(late >= early for early, late in itertools.pairwise(pauses))
    assert pauses[-1] == LONGEST_PAUSE_S
    for event in (HolderChosen(ONE), RoomGranted(TICKET, 1), CopyGrew(16), LOST):
        copy, _ = step(copy, event, 0.0)
    assert isinstance(copy, Alone)
    assert copy.until_s == FIRST_PAUSE_S


EVENTS: list[Event] = [
    HolderChosen(ONE),
    HolderChosen(OTHER),
    RoomGranted(TICKET, 1),
    RoomGranted(TICKET, 2),
    LOST,
    CopyGrew(16),
    CopyGrew(32),
]


@given(st.lists(st.sampled_from(EVENTS), max_size=20))
def test_every_copy_that_was_begun_is_with_the_present_holder_or_was_closed(events: list[Event]) -> None:
    copy: State = Alone()
    asked: list[Holder] = []
    begun: set[tuple[str, int]] = set()
    for event in [*events, LOST, RequestEnded(is_given_up=True)]:
        copy, actions = step(copy, event, 0.0)
        for action in actions:
            match action:
                case AskHolder(holder):
                    assert isinstance(copy, Opening)
                    asked.append(holder)
                case BeginCopy():
                    assert isinstance(copy, Copied)
                    # A holder, and a new life of it, forgets the copies before.
                    begun = {each for each in begun if each[0] != copy.holder.instance_id}
                    begun.add(copy.holder[:2])
                case CloseCopy(holder):
                    begun.discard(holder[:2])
    assert not begun
