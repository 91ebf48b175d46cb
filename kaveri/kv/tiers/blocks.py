"""Allocates the blocks of a pool and tracks their owners. No memory, no I/O."""

import threading
from collections.abc import Hashable, Iterable

from kaveri.errors import NoCapacity


class BlockAllocator:
    """Blocks [0, total), each either free or held by exactly one owner. Thread-safe."""

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        # Popped from the end; reversed so that a fresh pool allocates low ids first.
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[Hashable, list[int]] = {}
        self.total = total

    @property
    def free_count(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, owner: Hashable, count: int) -> list[int]:
        """Allocate `count` more blocks to `owner` and return just those. Raises NoCapacity, having allocated none."""
        with self._lock:
            if count > len(self._free):
                reason = f"{count} blocks wanted, {len(self._free)} of {self.total} free"
                raise NoCapacity("kv pool", retry_after_s=0.1, reason=reason)
            split = len(self._free) - count
            blocks = self._free[split:][::-1]
            del self._free[split:]
            self._held.setdefault(owner, []).extend(blocks)
            return blocks

    def release(self, owner: Hashable) -> int:
        """Free all blocks of `owner` and return their number; 0 for an unknown owner."""
        with self._lock:
            blocks = self._held.pop(owner, [])
            self._free.extend(reversed(blocks))
            return len(blocks)

    def release_last(self, owner: Hashable, count: int) -> None:
        """Free the last `count` blocks allocated to `owner`."""
        with self._lock:
            blocks = self._held[owner]
            assert 0 < count <= len(blocks), f"{count} of {len(blocks)} blocks"
            self._free.extend(reversed(blocks[-count:]))
            del blocks[-count:]

    def move(self, owner: Hashable, new_owner: Hashable) -> None:
        """Transfer all blocks of `owner` to `new_owner`, for quarantine for example. Both keep their order."""
        with self._lock:
            blocks = self._held.pop(owner, [])
            if blocks:
                self._held.setdefault(new_owner, []).extend(blocks)

    def blocks_of(self, owner: Hashable) -> tuple[int, ...]:
        """The blocks of `owner`, in allocation order."""
        with self._lock:
            return tuple(self._held.get(owner, ()))

    def owners(self) -> tuple[Hashable, ...]:
        """All owners of blocks."""
        with self._lock:
            return tuple(self._held)

    def check_integrity(self, expected_owners: Iterable[Hashable] | None = None) -> None:
        """Assert that every block is free or held exactly once, and that only `expected_owners` hold any.

        Does not check the blocks' contents.
        """
        with self._lock:
            seen = self._free + [block for blocks in self._held.values() for block in blocks]
            assert sorted(seen) == list(range(self.total)), "a block is leaked or held twice"
            if expected_owners is not None:
                strangers = set(self._held) - set(expected_owners)
                assert not strangers, f"blocks are held by {strangers}"
