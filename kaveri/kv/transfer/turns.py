"""Fair turns on a shared link: deficit round robin. Pure; counts bytes, moves none."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MemberT = TypeVar("MemberT", bound=Hashable)


class Turns(Generic[MemberT]):
    """Members that have work, served in a ring by bytes: as many for one huge transfer as for many small ones together
    would be unfair, so each member gets a quantum a round (M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using
    Deficit Round Robin", SIGCOMM 1995).

    A piece is never cut to fit: a member continues while its balance is above zero, and any excess is deducted from its
    next round. While two members have work, the bytes that they were charged differ by at most three times the larger
    of the quantum and a piece.
    """

    def __init__(self, quantum_bytes: int) -> None:
        """quantum_bytes: at least 1."""
        self._quantum_bytes = quantum_bytes
        self._ring: deque[MemberT] = deque()
        self._balances: dict[MemberT, int] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def join(self, member: MemberT) -> None:
        """Add a member that has work: its turn comes after all others'. No effect if it has some already."""
        if member not in self._balances:
            self._balances[member] = self._quantum_bytes
            self._ring.append(member)

    def leave(self, member: MemberT) -> None:
        """Remove a member that has no work. No effect if it has none already."""
        if self._balances.pop(member, None) is not None:
            self._ring.remove(member)

    def next(self, is_ready: Callable[[MemberT], bool]) -> MemberT | None:
        """Return the member whose turn it is; None if none is ready. One that is not ready keeps its balance."""
        passed_count = 0
        while passed_count < len(self._ring):
            member = self._ring[0]
            if not is_ready(member):
                passed_count += 1
            elif self._balances[member] > 0:
                return member
            else:
                passed_count = 0
                self._balances[member] += self._quantum_bytes
            self._ring.rotate(-1)
        return None

    def charge(self, member: MemberT, byte_count: int) -> None:
        """Charge the member whose turn it is for the bytes that it takes."""
        self._balances[member] -= byte_count
