"""Credit of a receiver's senders: bounds, fairness, and none is lost."""

import random

import pytest

from kaveri.kv.transfer.credit import CreditBook, SenderCredit
from kaveri.kv.transfer.transport import LinkLost

TOTAL_BYTES = 1000
LEAST_BYTES = 80
ENDLESS_BYTES = 1 << 40
"""Of a transfer that never comes to its end here."""


class Sender:
    def __init__(self, book: CreditBook, expected_bytes: int = ENDLESS_BYTES) -> None:
        self.unused_bytes = self.given_bytes = 0
        self.window_bytes = 0
        self.credit = SenderCredit(book, self._give, due_bytes=expected_bytes)
        book.senders.append(self.credit)
        book.give()

    def write(self, byte_count: int) -> None:
        self.credit.spend(byte_count)
        self.unused_bytes -= byte_count

    def _give(self, byte_count: int, window_bytes: int) -> None:
        assert byte_count > 0
        self.unused_bytes += byte_count
        self.given_bytes += byte_count
        self.window_bytes = window_bytes


@pytest.fixture
def book() -> CreditBook:
    return CreditBook(TOTAL_BYTES, LEAST_BYTES)


def held_bytes(book: CreditBook) -> int:
    return book.figures()[2]


def test_the_first_sender_leaves_some_for_the_next(book: CreditBook) -> None:
    assert Sender(book).given_bytes == 250
    assert Sender(book).given_bytes == 250
    assert held_bytes(book) == 500


def test_senders_that_push_nothing_take_no_share_of_those_that_do(book: CreditBook) -> None:
    assert [Sender(book, 0).given_bytes for _ in range(50)] == [LEAST_BYTES] * 50
    assert [Sender(book).given_bytes for _ in range(4)] == [250] * 4
    # In addition to every sender's guaranteed credit.
    assert book.figures()[1:3] == (250, 50 * LEAST_BYTES + 4 * 250)
    book.check_integrity()


def test_a_sender_is_given_no_more_than_is_still_to_come_from_it(book: CreditBook) -> None:
    sender = Sender(book, 200)
    assert sender.given_bytes == 200
    for _ in range(4):
        sender.write(50)
        sender.credit.arrived(50)
        sender.credit.settle(50)
        book.check_integrity()
    # Everything has arrived: it has the guaranteed credit again.
    assert sender.unused_bytes == held_bytes(book) == LEAST_BYTES
    sender.credit.expect(200)
    assert sender.unused_bytes == 200
    # After an abort, unused credit stays with the sender and is used up first.
    sender.credit.expect(-200)
    assert sender.unused_bytes == held_bytes(book) == 200
    sender.write(150)
    sender.credit.settle(150)
    # Without an open transfer, half of the guaranteed credit is enough.
    assert sender.unused_bytes == 50
    sender.write(20)
    sender.credit.settle(20)
    assert sender.unused_bytes == LEAST_BYTES


def test_what_is_expected_of_a_sender_that_has_left_is_nobodys(book: CreditBook) -> None:
    sender, other = Sender(book), Sender(book)
    sender.credit.close()
    sender.credit.expect(-ENDLESS_BYTES)
    sender.credit.close()
    assert held_bytes(book) == other.unused_bytes
    other.credit.close()
    assert book.figures() == (0, 250, 0, 0)


def test_what_is_written_costs_credit_and_comes_home_when_it_is_taken_in(book: CreditBook) -> None:
    sender = Sender(book)
    sender.write(200)
    with pytest.raises(LinkLost, match="51 bytes beyond"):
        sender.credit.spend(51)
    sender.write(50)
    sender.credit.settle(30)
    assert sender.unused_bytes == 0
    sender.credit.settle(40)
    assert (sender.unused_bytes, sender.window_bytes) == (70, 250)
    assert book.figures()[3] == 180


def test_a_newcomer_finds_credit_even_when_the_others_hold_it_all_and_stand_still(book: CreditBook) -> None:
    for _ in range(4):
        Sender(book)
    assert held_bytes(book) == TOTAL_BYTES
    given = [Sender(book).given_bytes for _ in range(20)]
    book.check_integrity()
    # What the old ones hold beyond the least is of the total; what is left of it goes to the first who come.
    assert given == sorted(given, reverse=True)
    assert given[-1] == LEAST_BYTES
    assert held_bytes(book) == TOTAL_BYTES + 24 * LEAST_BYTES


def test_senders_that_always_have_something_to_write_are_given_about_the_same() -> None:
    book = CreditBook(1200, 30)
    senders = [Sender(book) for _ in range(12)]
    # Each writes whatever it may at once, some in large writes and some in small ones. The receiver takes them in
    # in the order in which they came.
    arriving: list[tuple[Sender, int]] = []
    for _ in range(6000):
        for number, sender in enumerate(senders):
            while sender.unused_bytes:
                write_bytes = min(sender.unused_bytes, 10 if number % 2 else 60)
                sender.write(write_bytes)
                arriving.append((sender, write_bytes))
        sender, byte_count = arriving.pop(0)
        sender.credit.settle(byte_count)
        book.check_integrity()
    given = [sender.given_bytes for sender in senders]
    # Credit is given a quarter of a window at a time, so that small writes find a little less of theirs.
    assert max(given) <= 1.25 * min(given), given


@pytest.mark.parametrize("seed", range(20))
def test_random_senders_lose_no_credit_and_never_wait_for_ever(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    least = chance.choice((2, 16, 300))
    book = CreditBook(chance.choice((8, 100, 5000)), least)
    expected: dict[Sender, int] = {}
    arriving: dict[Sender, list[int]] = {}
    for _ in range(2000):
        sender = chance.choice([*arriving, None])
        if sender is None:
            if len(arriving) < 12:
                sender = Sender(book, 0)
                expected[sender], arriving[sender] = 0, []
        elif chance.random() < 0.02:
            sender.credit.close()
            del arriving[sender]
        elif chance.random() < 0.1:
            byte_count = chance.choice((chance.randint(0, 2000), -chance.randint(0, expected[sender])))
            expected[sender] += byte_count
            sender.credit.expect(byte_count)
        elif arriving[sender] and chance.random() < 0.5:
            sender.credit.settle(arriving[sender].pop(chance.randrange(len(arriving[sender]))))
        else:
            with pytest.raises(LinkLost):
                sender.credit.spend(sender.unused_bytes + 1)
            byte_count = chance.randint(0, sender.unused_bytes)
            sender.write(byte_count)
            arriving[sender].append(byte_count)
            of_open_bytes = chance.choice((0, min(byte_count, expected[sender])))
            expected[sender] -= of_open_bytes
            sender.credit.arrived(of_open_bytes)
        book.check_integrity()
    for sender, writes in arriving.items():
        for byte_count in writes:
            sender.credit.settle(byte_count)
    book.check_integrity()
    assert held_bytes(book) == sum(sender.unused_bytes for sender in arriving)
    # Two blocks are the least there is, and a sender that waits has less than one.
    assert all(sender.unused_bytes > least // 2 for sender in arriving)
    for sender in arriving:
        sender.credit.close()
    assert held_bytes(book) == 0
