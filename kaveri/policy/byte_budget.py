"""Limits the bytes of request data held in a process, in total and per API key."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kaveri.errors import InvalidArgument, NoCapacity

KEY_SHARE = 4
"""A key's requests may hold at most 1/KEY_SHARE of the budget, so no key starves the others."""
_RETRY_AFTER_S = 1.0


class ByteBudget:
    """Limit on the bytes of request data held in a process. Not thread-safe."""

    def __init__(self, role: str, most_bytes: int, changed: Callable[[int], object] = lambda held_bytes: None) -> None:
        """role: the process's role, named in errors. most_bytes: max bytes of all requests (--max-bodies-bytes).
        changed: called with the total of held bytes after each change."""
        self._role = role
        self._most_bytes = most_bytes
        self._changed = changed
        self._held_bytes = 0
        self._by_key: dict[str, int] = {}
        """Held bytes by key name; keys that hold nothing are absent."""

    @contextlib.contextmanager
    def hold(self, key_name: str = "", size_bytes: int = 0) -> Iterator["HeldBytes"]:
        """Context manager that counts one request's bytes until its exit. key_name: name of the request's API key,
        empty without one. size_bytes: counted at entry. Raises as HeldBytes.add()."""
        held = HeldBytes(self, key_name)
        try:
            if size_bytes:
                self.take(size_bytes, held)
            yield held
        finally:
            self._add(-held.size_bytes, key_name)

    def take(self, size_bytes: int, held: "HeldBytes") -> None:
        """Count `size_bytes` more for the request of `held`. Raises as HeldBytes.add()."""
        key_name = held.key_name
        # Check the key's share first: its error names the key.
        limits = [("all requests", self._held_bytes, self._most_bytes)]
        if key_name:
            of_key = self._by_key.get(key_name, 0)
            limits.insert(0, (f"the requests of the API key {key_name}", of_key, self._most_bytes // KEY_SHARE))
        for whose, held_bytes, most_bytes in limits:
            limit = f"at most {most_bytes} bytes for {whose} together (--max-bodies-bytes)"
            if held.size_bytes + size_bytes > most_bytes:
                raise InvalidArgument("the request", f"{held.size_bytes + size_bytes} bytes large", limit)
            if held_bytes + size_bytes > most_bytes:
                reason = f"{limit}; they hold {held_bytes}, and this one needs {size_bytes} more"
                raise NoCapacity(self._role, _RETRY_AFTER_S, reason)
        held.size_bytes += size_bytes
        self._add(size_bytes, key_name)

    def _add(self, size_bytes: int, key_name: str) -> None:
        self._held_bytes += size_bytes
        if key_name:
            self._by_key[key_name] = self._by_key.get(key_name, 0) + size_bytes
            if not self._by_key[key_name]:
                del self._by_key[key_name]
        self._changed(self._held_bytes)


@dataclass(eq=False, slots=True)
class HeldBytes:
    """Bytes counted for one request during ByteBudget.hold()."""

    budget: ByteBudget
    key_name: str
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Count more bytes. Raises NoCapacity if others hold too much, InvalidArgument if they can never fit."""
        self.budget.take(size_bytes, self)
