"""Bounds the bytes that all senders together may have in flight to one receiver, and divides them.

A sender writes on credit, and the credit returns when the receiver has taken in what was written (H. T. Kung, T.
Blackwell and A. Chapman, "Credit-Based Flow Control for ATM Networks", SIGCOMM 1994). A slow receiver gives no credit:
its data waits on the sending side, and that of other receivers proceeds.

    given: outstanding ── spend: arriving ── settle: home
    └──────────── held ────────────────┘

Credit cannot be revoked, so it goes to senders that are about to use it: a receiver knows from the open transfers how
many bytes each sender will still write.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kaveri.kv.transfer.transport import GiveCredit, LinkLost

SenderT = TypeVar("SenderT", bound=Hashable)

_SHARES_MIN = 4
"""A sender holds at most 1 / this of the total, so that the first one leaves room for the next ones: a sender that
stands still keeps what it has."""


@dataclass(slots=True)
class _SenderAccount:
    held_bytes: int = 0
    """Outstanding and arriving."""
    arriving_bytes: int = 0
    due_bytes: int = 0
    """Bytes of its open transfers that have not arrived yet."""


class CreditBook(Generic[SenderT]):
    """The credit of one receiver. Pure: keeps the account, and notifies no sender. Not thread-safe.

    Every sender is guaranteed `least_bytes`, so the first bytes of a transfer never wait for other senders. Senders
    with open transfers have equal windows, `total_bytes` over their number, up to the bytes still to come; they share
    the credit beyond least_bytes: at most total_bytes + least_bytes * senders is ever held. When another one begins to
    push, the windows of the others shrink as they use them; the returned credit is given round robin. A sender that has
    pushed everything keeps its unused credit: least_bytes, and more if a transfer was given up, until the next one uses
    it or the connection ends.
    """

    def __init__(self, total_bytes: int, least_bytes: int) -> None:
        """least_bytes: at least 2."""
        self.total_bytes = total_bytes
        self.least_bytes = least_bytes
        self._accounts: dict[SenderT, _SenderAccount] = {}
        # Round-robin order of the next grants.
        self._ring: deque[SenderT] = deque()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes given to senders and not returned."""
        return self._held_bytes

    @property
    def sender_count(self) -> int:
        """Number of senders that have joined and not left."""
        return len(self._accounts)

    @property
    def window_bytes(self) -> int:
        """Bytes that each pushing sender may hold, once the others have come down to as much."""
        pushing = sum(account.due_bytes > 0 for account in self._accounts.values())
        return max(self.least_bytes, self.total_bytes // max(_SHARES_MIN, pushing))

    @property
    def arriving_bytes(self) -> int:
        """Bytes spent and not settled."""
        return sum(account.arriving_bytes for account in self._accounts.values())

    def join(self, sender: SenderT) -> None:
        """Add a sender. It holds nothing yet: see grants()."""
        assert sender not in self._accounts, "joined twice"
        self._accounts[sender] = _SenderAccount()
        self._ring.append(sender)

    def leave(self, sender: SenderT) -> None:
        """Remove a sender that cannot write any more: all that it holds returns."""
        self._held_bytes -= self._accounts.pop(sender).held_bytes
        self._ring.remove(sender)

    def expect(self, sender: SenderT, byte_count: int) -> None:
        """Expect this many more bytes from the sender. Negative: fewer, as they have arrived or will never come.
        Ignored after the sender has left."""
        account = self._accounts.get(sender)
        if account is not None:
            account.due_bytes += byte_count

    def spend(self, sender: SenderT, byte_count: int) -> bool:
        """Record that bytes of the sender arrive. False, and nothing changes, if it has no credit for them."""
        account = self._accounts[sender]
        if byte_count > account.held_bytes - account.arriving_bytes:
            return False
        account.arriving_bytes += byte_count
        return True

    def settle(self, sender: SenderT, byte_count: int) -> None:
        """Record that arriving bytes have been taken in or discarded."""
        account = self._accounts[sender]
        assert byte_count <= account.arriving_bytes, "settled before it was spent"
        account.arriving_bytes -= byte_count
        account.held_bytes -= byte_count
        self._held_bytes -= byte_count

    def grants(self) -> list[tuple[SenderT, int, int]]:
        """Give all credit that can be given; return (sender, bytes, its window now) for each that gets some. At least a
        quarter of a window at a time, half of it where the sender has enough for all that is to come: small grants cost
        more than they bring."""
        window_bytes = self.window_bytes
        free_bytes = self.total_bytes - sum(map(self._shared_bytes, self._accounts.values()))
        granted: list[tuple[SenderT, int, int]] = []
        for _ in range(len(self._ring)):
            sender = self._ring[0]
            self._ring.rotate(-1)
            account = self._accounts[sender]
            wanted_bytes = min(window_bytes, max(self.least_bytes, account.due_bytes))
            reach_bytes = min(wanted_bytes, max(self.least_bytes, account.held_bytes) + free_bytes)
            given_bytes = reach_bytes - account.held_bytes
            # Arriving bytes are still due.
            has_enough = account.held_bytes >= account.due_bytes
            if given_bytes >= max(1, reach_bytes // (2 if has_enough else 4)):
                free_bytes += self._shared_bytes(account)
                account.held_bytes += given_bytes
                free_bytes -= self._shared_bytes(account)
                self._held_bytes += given_bytes
                granted.append((sender, given_bytes, reach_bytes))
        return granted

    def check_integrity(self) -> None:
        """Assert that the account is consistent and within its bounds."""
        accounts = self._accounts.values()
        assert all(0 <= account.arriving_bytes <= account.held_bytes for account in accounts)
        assert self._held_bytes == sum(account.held_bytes for account in accounts), "credit was lost or made"
        assert sum(map(self._shared_bytes, accounts)) <= self.total_bytes, "too much was given"
        assert sorted(map(id, self._ring)) == sorted(map(id, self._accounts)), "a sender is forgotten"

    def _shared_bytes(self, account: _SenderAccount) -> int:
        """Bytes of the total that the sender holds beyond its guaranteed minimum."""
        return max(0, account.held_bytes - self.least_bytes)


class SharedCredit:
    """The account of one receiver, and the callback of each of its connections. Any thread. Its lock is taken within no
    other, and none within it."""

    def __init__(self, total_bytes: int, least_bytes: int) -> None:
        self.lock = threading.Lock()
        self.book: CreditBook[SenderCredit] = CreditBook(total_bytes, least_bytes)

    def change(self, change: "Callable[[CreditBook[SenderCredit]], None]") -> None:
        """Change the account, then give the credit that can be given."""
        with self.lock:
            change(self.book)
            granted = self.book.grants()
        for credit, byte_count, window_bytes in granted:
            credit.give(byte_count, window_bytes)

    def figures(self) -> tuple[int, int, int, int]:
        """Senders, the window of each, and the bytes that are held and arriving."""
        with self.lock:
            book = self.book
            return book.sender_count, book.window_bytes, book.held_bytes, book.arriving_bytes

    def check_integrity(self) -> None:
        with self.lock:
            self.book.check_integrity()


@dataclass(eq=False, slots=True)
class SenderCredit:
    """The credit of one connection; see Credit."""

    _shared: SharedCredit
    give: GiveCredit
    _is_closed: bool = False

    def spend(self, byte_count: int) -> None:
        with self._shared.lock:
            has_credit = self._shared.book.spend(self, byte_count)
        if not has_credit:
            raise LinkLost(f"protocol error: {byte_count} bytes beyond the sender's credit")

    def settle(self, byte_count: int) -> None:
        self._shared.change(lambda book: book.settle(self, byte_count))

    def expect(self, byte_count: int) -> None:
        if byte_count:
            self._shared.change(lambda book: book.expect(self, byte_count))

    def arrived(self, byte_count: int) -> None:
        with self._shared.lock:
            self._shared.book.expect(self, -byte_count)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._shared.change(lambda book: book.leave(self))
