"""Credit-based flow control: bounds the bytes in flight from all senders to one receiver, and divides them.

A sender may write as many bytes as it has credit for, which returns when the receiver has taken them in (H. T. Kung, T.
Blackwell and A. Chapman, "Credit-Based Flow Control for ATM Networks", SIGCOMM 1994). A slow receiver gives no credit:
its data waits on the sending side, and data for other receivers proceeds.

    given: outstanding ── spend: arriving ── settle: returned
    └──────────── held ────────────────┘

Credit cannot be revoked, so it goes to senders that will use it soon: open transfers tell how many bytes are to come.
"""

import threading
from collections import deque
from dataclasses import dataclass

from kaveri.kv.transfer.transport import GiveCredit, LinkLost

_SHARES_MIN = 4
"""A sender holds at most 1 / this of the total, to leave credit for later ones: a stalled sender keeps what it has."""


class CreditBook:
    """Divides a receiver's credit (bytes that senders may have in flight) among them. Thread-safe.

    Every sender is guaranteed `least_bytes` (at least 2), so the first bytes of a transfer wait for no other sender.
    Senders with open transfers have equal windows, `total_bytes` over their number, up to the bytes still to come; the
    credit given out never exceeds total_bytes + least_bytes * senders. When another one begins to push, the others'
    windows shrink as they use credit, and returned credit is given round robin. Unused credit stays with its sender for
    the next transfer. The lock is taken within no other, and none within it.
    """

    def __init__(self, total_bytes: int, least_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.least_bytes = least_bytes
        self.lock = threading.Lock()
        self.senders: deque[SenderCredit] = deque()
        """In the round-robin order of the next grants."""

    def join(self, give: GiveCredit) -> "SenderCredit":
        """Add a sender and call `give` to grant its first credit; `give` is later called on any thread."""
        credit = SenderCredit(self, give)
        with self.lock:
            self.senders.append(credit)
        self.give()
        return credit

    def figures(self) -> tuple[int, int, int, int]:
        """Return (number of senders, window of each [bytes], bytes of credit given out, bytes of it now arriving)."""
        with self.lock:
            held_bytes = sum(sender.held_bytes for sender in self.senders)
            arriving_bytes = sum(sender.arriving_bytes for sender in self.senders)
            return len(self.senders), self._window_bytes(), held_bytes, arriving_bytes

    def give(self) -> None:
        """Give senders all free credit, but no grant below a quarter of a window, or half if the sender has enough
        credit for its open transfers: small grants cost more than they bring."""
        granted: list[tuple[SenderCredit, int, int]] = []
        with self.lock:
            window_bytes = self._window_bytes()
            free_bytes = self.total_bytes - sum(max(0, each.held_bytes - self.least_bytes) for each in self.senders)
            for _ in range(len(self.senders)):
                sender = self.senders[0]
                self.senders.rotate(-1)
                held_bytes = sender.held_bytes
                wanted_bytes = min(window_bytes, max(self.least_bytes, sender.due_bytes))
                reach_bytes = min(wanted_bytes, max(self.least_bytes, held_bytes) + free_bytes)
                # Arriving bytes are still due.
                has_enough = held_bytes >= sender.due_bytes
                if reach_bytes - held_bytes >= max(1, reach_bytes // (2 if has_enough else 4)):
                    free_bytes -= max(0, reach_bytes - self.least_bytes) - max(0, held_bytes - self.least_bytes)
                    sender.held_bytes = reach_bytes
                    granted.append((sender, reach_bytes - held_bytes, reach_bytes))
        for sender, byte_count, reach_bytes in granted:
            sender.grant(byte_count, reach_bytes)

    def check_integrity(self) -> None:
        """Assert that the senders' accounts are consistent and within total_bytes."""
        with self.lock:
            assert all(0 <= sender.arriving_bytes <= sender.held_bytes for sender in self.senders)
            shared_bytes = sum(max(0, sender.held_bytes - self.least_bytes) for sender in self.senders)
            assert shared_bytes <= self.total_bytes, "too much was given"

    def _window_bytes(self) -> int:
        pushing = sum(sender.due_bytes > 0 for sender in self.senders)
        return max(self.least_bytes, self.total_bytes // max(_SHARES_MIN, pushing))


@dataclass(eq=False, slots=True)
class SenderCredit:
    """Credit of one sender's connection; implements transport.Credit. Guarded by its CreditBook's lock."""

    _book: CreditBook
    grant: GiveCredit
    held_bytes: int = 0
    """Credit given and not returned: outstanding or arriving."""
    arriving_bytes: int = 0
    due_bytes: int = 0
    """Bytes of its open transfers that have not arrived yet."""

    def spend(self, byte_count: int) -> None:
        with self._book.lock:
            has_credit = byte_count <= self.held_bytes - self.arriving_bytes
            if has_credit:
                self.arriving_bytes += byte_count
        if not has_credit:
            raise LinkLost(f"protocol error: {byte_count} bytes beyond the sender's credit")

    def settle(self, byte_count: int) -> None:
        with self._book.lock:
            assert byte_count <= self.arriving_bytes, "settled before it was spent"
            self.arriving_bytes -= byte_count
            self.held_bytes -= byte_count
        self._book.give()

    def expect(self, byte_count: int) -> None:
        if byte_count:
            with self._book.lock:
                self.due_bytes += byte_count
            self._book.give()

    def arrived(self, byte_count: int) -> None:
        with self._book.lock:
            self.due_bytes -= byte_count

    def close(self) -> None:
        with self._book.lock:
            is_open = self in self._book.senders
            if is_open:
                self._book.senders.remove(self)
        if is_open:
            self._book.give()
