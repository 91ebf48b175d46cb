"""What happened in a run, in order: a hash always, readable lines where they are asked for."""

import hashlib
from collections import Counter
from collections.abc import Callable

from tests.simulation.cluster.loop import SimulatedLoop


class Trace:
    """One run's trace. Two runs are equal when their hashes are."""

    def __init__(self, loop: SimulatedLoop, lines: bool = False) -> None:
        """lines: keep them as text too."""
        self._loop = loop
        self._hash = hashlib.blake2b(digest_size=16)
        self._keep = lines
        self.lines: list[str] = []
        """Empty unless they were asked for."""
        self.counts: Counter[str] = Counter()
        """How often each kind of event happened."""
        self._watched: list[tuple[str, Callable[[], object]]] = []

    @property
    def keeps_lines(self) -> bool:
        """Whether details are worth making."""
        return self._keep

    def watch(self, text: str, seen: Callable[[], object]) -> None:
        """Calls seen() with each event whose "kind what" contains the text."""
        self._watched.append((text, seen))

    def note(self, kind: str, what: str, data: bytes = b"", details: Callable[[], object] | None = None) -> None:
        """Adds an event. kind: counted, and hashed with the rest. details: for people only, asked for at once."""
        loop = self._loop
        self.counts[kind] += 1
        self._hash.update(f"{loop.now:.9f}|{loop.current}|{kind}|{what}|".encode())
        if data:
            self._hash.update(data)
        if self._watched:
            line = f"{kind} {what}"
            for text, seen in self._watched:
                if text in line:
                    seen()
        if self._keep:
            shown = f"  {details()}" if details is not None else ""
            self.lines.append(f"{loop.elapsed_s:10.6f}  {loop.current!s:<14} {kind:<10} {what}{shown}")

    def hexdigest(self) -> str:
        """Of everything so far."""
        return self._hash.hexdigest()
