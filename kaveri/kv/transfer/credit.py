"""How many bytes all senders together may have under way to one receiver, and how that is divided. Pure: keeps the
account; who tells the senders, and under which lock, is the receiver's.

A sender writes on credit, and what it has written comes home when the receiver has taken it in (H. T. Kung,
T. Blackwell and A. Chapman, "Credit-Based Flow Control for ATM Networks", SIGCOMM 1994). A receiver that is slow gives
no credit: what is for it waits on the sending side, and what is for others goes on.

    given: outstanding ── spend: arriving ── settle: home
    └──────────── held ────────────────┘

Credit that was given cannot be called back, so it goes to senders that are about to use it: a receiver knows from the
transfers that are open how many bytes each sender will still write.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

SenderT = TypeVar("SenderT", bound=Hashable)

_SHARES_MIN = 4
"""No sender holds more than this part of it all, so that the first one does not take what the next ones need: a sender
that stands still keeps what it has."""


@dataclass(slots=True)
class _SenderAccount:
    outstanding_bytes: int = 0
    arriving_bytes: int = 0
    # Of its open transfers, what has not arrived yet.
    due_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        return self.outstanding_bytes + self.arriving_bytes


class CreditBook(Generic[SenderT]):
    """The credit of one receiver. Not safe to use from several threads.

    Every sender has `least_bytes`, whatever the others do, so the first bytes of a transfer never wait for other
    senders. Those with transfers open have the same window, `total_bytes` over their number, as far as there is
    something to come; what they hold beyond least_bytes they share: no more than total_bytes + least_bytes * senders is
    ever held. When one more begins to push, the windows of the others shrink as they use them; what comes home then is
    given round robin. A sender that has pushed all it had keeps what it did not need: least_bytes, and more where a
    transfer was given up, until the next one uses it or the connection ends.
    """

    def __init__(self, total_bytes: int, least_bytes: int) -> None:
        """least_bytes: at least 2."""
        self.total_bytes = total_bytes
        self.least_bytes = least_bytes
        self._accounts: dict[SenderT, _SenderAccount] = {}
        # Who is asked next whether it wants some.
        self._ring: deque[SenderT] = deque()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Given to senders and not home."""
        return self._held_bytes

    @property
    def sender_count(self) -> int:
        """Those that have joined and not left."""
        return len(self._accounts)

    @property
    def window_bytes(self) -> int:
        """What each sender that pushes may hold, once the others have come down to as much."""
        pushing = sum(account.due_bytes > 0 for account in self._accounts.values())
        return max(self.least_bytes, self.total_bytes // max(_SHARES_MIN, pushing))

    @property
    def arriving_bytes(self) -> int:
        """Spent and not settled."""
        return sum(account.arriving_bytes for account in self._accounts.values())

    def join(self, sender: SenderT) -> None:
        """One sender more. It holds nothing yet: see grants()."""
        assert sender not in self._accounts, "joined twice"
        self._accounts[sender] = _SenderAccount()
        self._ring.append(sender)

    def leave(self, sender: SenderT) -> None:
        """The sender cannot write any more: all that it holds is home."""
        self._held_bytes -= self._accounts.pop(sender).held_bytes
        self._ring.remove(sender)

    def expect(self, sender: SenderT, byte_count: int) -> None:
        """So many bytes more are to come from the sender; fewer where negative: they are here, or will never come.
        Ignored when it has left."""
        account = self._accounts.get(sender)
        if account is not None:
            account.due_bytes += byte_count

    def spend(self, sender: SenderT, byte_count: int) -> bool:
        """So many bytes of the sender are here, or arriving. False, and nothing happens, when it has no credit for
        them."""
        account = self._accounts[sender]
        if byte_count > account.outstanding_bytes:
            return False
        account.outstanding_bytes -= byte_count
        account.arriving_bytes += byte_count
        return True

    def settle(self, sender: SenderT, byte_count: int) -> None:
        """So many of the arriving bytes are taken in, or thrown away."""
        account = self._accounts[sender]
        assert byte_count <= account.arriving_bytes, "settled before it was spent"
        account.arriving_bytes -= byte_count
        self._held_bytes -= byte_count

    def grants(self) -> list[tuple[SenderT, int, int]]:
        """Gives what can be given: (sender, bytes, its window now), for each that gets some. At least a quarter of a
        window at a time, half of it where the sender has enough for all that is to come: small change costs more than
        it brings."""
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
            # What is arriving is still due.
            has_enough = account.held_bytes >= account.due_bytes
            if given_bytes >= max(1, reach_bytes // (2 if has_enough else 4)):
                free_bytes += self._shared_bytes(account)
                account.outstanding_bytes += given_bytes
                free_bytes -= self._shared_bytes(account)
                self._held_bytes += given_bytes
                granted.append((sender, given_bytes, reach_bytes))
        return granted

    def check_integrity(self) -> None:
        """Asserts that the account is right in itself, and within its bounds."""
        accounts = self._accounts.values()
        assert all(account.outstanding_bytes >= 0 and account.arriving_bytes >= 0 for account in accounts)
        assert self._held_bytes == sum(account.held_bytes for account in accounts), "credit was lost or made"
        assert sum(map(self._shared_bytes, accounts)) <= self.total_bytes, "too much was given"
        assert sorted(map(id, self._ring)) == sorted(map(id, self._accounts)), "a sender is forgotten"

    def _shared_bytes(self, account: _SenderAccount) -> int:
        """What the sender holds of the total, beyond what it has in any case."""
        return max(0, account.held_bytes - self.least_bytes)
