"""The account of a receiver's credit by itself: bounds, fairness, nothing lost."""

import random

import pytest

from kaveri.kv.transfer.credit import CreditBook

TOTAL_BYTES = 1000
LEAST_BYTES = 80


@pytest.fixture
def book() -> CreditBook[str]:
    return CreditBook(TOTAL_BYTES, LEAST_BYTES)


ENDLESS_BYTES = 1 << 40
"""Of a transfer that never comes to its end here."""


def granted(book: CreditBook[str]) -> dict[str, int]:
    return {sender: byte_count for sender, byte_count, _ in book.grants()}


def join(book: CreditBook[str], sender: str, expected_bytes: int = ENDLESS_BYTES) -> dict[str, int]:
    """A sender that begins with a transfer of so many bytes."""
    book.join(sender)
    book.expect(sender, expected_bytes)
    return granted(book)


def test_the_first_sender_leaves_some_for_the_next(book: CreditBook[str]) -> None:
    assert join(book, "first") == {"first": 250}
    assert join(book, "second") == {"second": 250}
    assert book.held_bytes == 500


def test_senders_that_push_nothing_take_no_share_of_those_that_do(book: CreditBook[str]) -> None:
    for i in range(50):
        assert join(book, f"idle {i}", 0) == {f"idle {i}": LEAST_BYTES}
    for i in range(4):
        assert join(book, f"pushes {i}") == {f"pushes {i}": 250}
    assert book.window_bytes == 250
    # Beside the least that the idle ones have, and that the others have of their own.
    assert book.held_bytes == 50 * LEAST_BYTES + 4 * 250
    book.check_integrity()


def test_a_sender_is_given_no_more_than_is_still_to_come_from_it(book: CreditBook[str]) -> None:
    assert join(book, "sender", 200) == {"sender": 200}
    for _ in range(4):
        assert book.spend("sender", 50)
        book.expect("sender", -50)
        book.settle("sender", 50)
        book.check_integrity()
    # All is here: it has the least again, for the first bytes of the next.
    assert granted(book) == {"sender": LEAST_BYTES}
    assert book.held_bytes == LEAST_BYTES
    book.expect("sender", 200)
    assert granted(book) == {"sender": 200 - LEAST_BYTES}
    # Given up: what was given stays given, and is used up first.
    book.expect("sender", -200)
    assert granted(book) == {}
    assert book.held_bytes == 200
    assert book.spend("sender", 150)
    book.settle("sender", 150)
    # With nothing to come half of the least is enough.
    assert granted(book) == {}
    assert book.spend("sender", 20)
    book.settle("sender", 20)
    assert granted(book) == {"sender": LEAST_BYTES - 30}


def test_what_is_expected_of_a_sender_that_has_left_is_nobodys(book: CreditBook[str]) -> None:
    join(book, "sender")
    book.leave("sender")
    book.expect("sender", -ENDLESS_BYTES)
    assert book.held_bytes == 0


def test_what_is_written_costs_credit_and_comes_home_when_it_is_taken_in(book: CreditBook[str]) -> None:
    join(book, "sender")
    assert book.spend("sender", 200)
    assert book.grants() == []
    assert not book.spend("sender", 51)
    assert book.spend("sender", 50)
    book.settle("sender", 30)
    # Less than a quarter of a window.
    assert book.grants() == []
    book.settle("sender", 40)
    assert book.grants() == [("sender", 70, 250)]
    assert book.arriving_bytes == 180


def test_a_newcomer_finds_credit_even_when_the_others_hold_it_all_and_stand_still(book: CreditBook[str]) -> None:
    for i in range(4):
        join(book, f"old {i}")
    assert book.held_bytes == TOTAL_BYTES
    given = [join(book, f"new {i}")[f"new {i}"] for i in range(20)]
    book.check_integrity()
    # What the old ones hold beyond the least is of the total; what is left of it goes to the first who come.
    assert given == sorted(given, reverse=True)
    assert given[-1] == LEAST_BYTES
    assert book.held_bytes == TOTAL_BYTES + 24 * LEAST_BYTES


def test_senders_that_always_have_something_to_write_are_given_about_the_same() -> None:
    book: CreditBook[int] = CreditBook(1200, 30)
    credit, given = dict.fromkeys(range(12), 0), dict.fromkeys(range(12), 0)
    for sender in credit:
        book.join(sender)
        book.expect(sender, ENDLESS_BYTES)
    # Each writes whatever it may at once, some in large writes and some in small ones. The receiver takes them in
    # in the order in which they came.
    arriving: list[tuple[int, int]] = []
    for _ in range(6000):
        for sender, byte_count, _ in book.grants():
            credit[sender] += byte_count
            given[sender] += byte_count
        for sender in credit:
            while credit[sender]:
                write_bytes = min(credit[sender], 10 if sender % 2 else 60)
                assert book.spend(sender, write_bytes)
                credit[sender] -= write_bytes
                arriving.append((sender, write_bytes))
        sender, byte_count = arriving.pop(0)
        book.settle(sender, byte_count)
        book.check_integrity()
    # Credit is given a quarter of a window at a time, so that small writes find a little less of theirs.
    assert max(given.values()) <= 1.25 * min(given.values()), given


@pytest.mark.parametrize("seed", range(20))
def test_random_senders_lose_no_credit_and_never_wait_for_ever(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    least = chance.choice((2, 16, 300))
    book: CreditBook[int] = CreditBook(chance.choice((8, 100, 5000)), least)
    credit: dict[int, int] = {}
    expected: dict[int, int] = {}
    arriving: dict[int, list[int]] = {}
    names = iter(range(10**6))

    def give() -> None:
        for sender, byte_count, _ in book.grants():
            credit[sender] += byte_count

    for _ in range(2000):
        sender = chance.choice([*credit, -1])
        if sender < 0 and len(credit) < 12:
            sender = next(names)
            book.join(sender)
            credit[sender], expected[sender], arriving[sender] = 0, 0, []
        elif sender >= 0 and chance.random() < 0.02:
            # Killed, with all that it has under way.
            book.leave(sender)
            del credit[sender], arriving[sender]
        elif sender >= 0 and chance.random() < 0.1:
            # A transfer begins, or one is given up.
            byte_count = chance.choice((chance.randint(0, 2000), -chance.randint(0, expected[sender])))
            expected[sender] += byte_count
            book.expect(sender, byte_count)
        elif sender >= 0 and arriving[sender] and chance.random() < 0.5:
            book.settle(sender, arriving[sender].pop(chance.randrange(len(arriving[sender]))))
        elif sender >= 0:
            byte_count = chance.randint(0, credit[sender])
            assert book.spend(sender, byte_count)
            assert not book.spend(sender, credit[sender] - byte_count + 1)
            credit[sender] -= byte_count
            arriving[sender].append(byte_count)
            # Of a transfer that is open, or of one that was given up.
            of_open_bytes = chance.choice((0, min(byte_count, expected[sender])))
            expected[sender] -= of_open_bytes
            book.expect(sender, -of_open_bytes)
        give()
        book.check_integrity()
    for sender, writes in arriving.items():
        for byte_count in writes:
            book.settle(sender, byte_count)
    give()
    book.check_integrity()
    assert book.held_bytes == sum(credit.values())
    # Two blocks are the least there is, and a sender that waits has less than one.
    assert all(byte_count > least // 2 for byte_count in credit.values())
    for sender in list(credit):
        book.leave(sender)
    assert book.held_bytes == 0
