"""Deficit round robin: order of service, and bytes served."""

import random

import pytest

from kaveri.kv.transfer.outgoing import Turns

QUANTUM_BYTES = 100


def test_members_with_pieces_of_all_sizes_share_by_bytes() -> None:
    turns: Turns[str] = Turns(QUANTUM_BYTES)
    piece_bytes = {"one huge transfer": 170, "small writes": 3, "middling": 60}
    taken = dict.fromkeys(piece_bytes, 0)
    for member in piece_bytes:
        turns.join(member)
    for _ in range(5000):
        member = turns.next(lambda member: True)
        assert member is not None
        turns.charge(member, piece_bytes[member])
        taken[member] += piece_bytes[member]
        assert max(taken.values()) - min(taken.values()) <= 3 * 170


@pytest.mark.parametrize("seed", range(20))
def test_whoever_has_work_waits_for_a_bounded_number_of_bytes(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    turns: Turns[int] = Turns(QUANTUM_BYTES)
    # Bytes that the others were charged since the member last was, or came.
    waited: dict[int, int] = {}
    for step in range(3000):
        if chance.random() < 0.1:
            member = chance.randrange(8)
            if member in waited and chance.random() < 0.5:
                turns.leave(member)
                del waited[member]
            elif member not in waited:
                turns.join(member)
                waited[member] = 0
        served = turns.next(lambda member: True)
        assert (served is None) == (not waited)
        assert len(turns) == len(waited)
        if served is not None:
            byte_count = chance.randint(1, 150)
            turns.charge(served, byte_count)
            for member in waited:
                waited[member] = 0 if member == served else waited[member] + byte_count
            # A round of each of the seven others; one that overdrew its balance waits one more.
            assert max(waited.values()) <= 2 * 7 * (QUANTUM_BYTES + 150), step


def test_those_that_are_not_ready_are_passed_over_and_none_is_when_all_are_not() -> None:
    turns: Turns[str] = Turns(QUANTUM_BYTES)
    turns.join("blocked")
    turns.join("ready")
    for _ in range(10):
        assert turns.next(lambda member: member == "ready") == "ready"
        turns.charge("ready", 70)
    assert turns.next(lambda member: False) is None
    # What it was passed over for is not made up for: it has its one quantum, and then they alternate.
    assert turns.next(lambda member: member == "blocked") == "blocked"


def test_the_newcomer_comes_last_and_leaving_twice_is_nothing() -> None:
    turns: Turns[str] = Turns(QUANTUM_BYTES)
    turns.join("first")
    turns.join("second")
    turns.join("first")
    assert turns.next(lambda member: True) == "first"
    turns.leave("first")
    turns.leave("first")
    turns.join("first")
    assert turns.next(lambda member: True) == "second"
