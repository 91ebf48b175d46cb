"""The credit of a receiver's connections: one shared account, and the view that each connection has of it."""

import threading
from collections.abc import Callable

from kaveri.kv.transfer.credit import CreditBook
from kaveri.kv.transfer.transport import GiveCredit, LinkLost


class SharedCredit:
    """The account of one receiver, and the callback of each of its connections. Any thread. Its lock is taken within no
    other, and none within it."""

    def __init__(self, total_bytes: int, least_bytes: int) -> None:
        """See CreditBook."""
        self._lock = threading.Lock()
        self._book: CreditBook[SenderCredit] = CreditBook(total_bytes, least_bytes)

    def admit(self, give: GiveCredit) -> "SenderCredit":
        """See TransferIntake.admit."""
        credit = SenderCredit(self, give)
        self.change(lambda book: book.join(credit))
        return credit

    def spend(self, credit: "SenderCredit", byte_count: int) -> bool:
        """Return True if the connection had this much credit."""
        with self._lock:
            return self._book.spend(credit, byte_count)

    def expect(self, credit: "SenderCredit", byte_count: int) -> None:
        """Expect this many more bytes over the connection. Gives no credit."""
        with self._lock:
            self._book.expect(credit, byte_count)

    def change(self, change: "Callable[[CreditBook[SenderCredit]], None]") -> None:
        """Change the account, then give the credit that can be given."""
        with self._lock:
            change(self._book)
            granted = self._book.grants()
        for credit, byte_count, window_bytes in granted:
            credit.give(byte_count, window_bytes)

    def figures(self) -> tuple[int, int, int, int]:
        """Senders, the window of each, and the bytes that are held and arriving."""
        with self._lock:
            book = self._book
            return book.sender_count, book.window_bytes, book.held_bytes, book.arriving_bytes

    def check_integrity(self) -> None:
        """See CreditBook.check_integrity."""
        with self._lock:
            self._book.check_integrity()


class SenderCredit:
    """The credit of one connection; see Credit."""

    def __init__(self, shared: SharedCredit, give: GiveCredit) -> None:
        self.give = give
        self._shared = shared
        self._is_closed = False

    def spend(self, byte_count: int) -> None:
        """See Credit.spend."""
        if not self._shared.spend(self, byte_count):
            raise LinkLost(f"protocol error: {byte_count} bytes beyond the sender's credit")

    def settle(self, byte_count: int) -> None:
        """See Credit.settle."""
        self._shared.change(lambda book: book.settle(self, byte_count))

    def expect(self, byte_count: int) -> None:
        """See Credit.expect."""
        if byte_count:
            self._shared.change(lambda book: book.expect(self, byte_count))

    def arrived(self, byte_count: int) -> None:
        """See Credit.arrived."""
        self._shared.expect(self, -byte_count)

    def close(self) -> None:
        """See Credit.close."""
        if not self._is_closed:
            self._is_closed = True
            self._shared.change(lambda book: book.leave(self))
