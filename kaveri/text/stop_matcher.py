"""Finds stop texts in text that arrives in pieces. The work per character is bounded for any stop texts."""

import copy
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

_KEPT_TEXTS = 1024


class StopMatcher:
    """Incremental search for stop texts: returns text up to the first one, holds back a possible beginning of one."""

    def __init__(self, stop: Sequence[str], known_characters: int = 0) -> None:
        """stop: at least one, none empty. known_characters: length of a start in which no stop text ends."""
        self.stop = tuple(stop)
        self._longest = max(map(len, self.stop))
        self._unmatched = max(0, known_characters - self._longest)
        """Characters that still precede any match, as known_characters says."""
        self._matched = [0] * len(self.stop)
        """For each stop text, the length of its longest proper prefix that the text ends with."""
        self._held = ""

    def push(self, piece: str, *, ignores: bool) -> tuple[str, str | None]:
        """Append a piece. Returns the text that is now final, and the stop text found after it, or None. ignores: treat
        a stop text that this piece completes as ordinary text."""
        if len(piece) <= self._unmatched:
            self._unmatched -= len(piece)
            return piece, None
        self._unmatched = 0
        text = self._held + piece
        if not ignores:
            # Held text contains no whole stop text but ignored ones.
            first = len(self._held) + 1
            starts = [(text.find(stop, max(0, first - len(stop))), stop) for stop in self.stop]
            # Take the match that ends first, as if the text arrived letter by letter.
            ends = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
            if ends:
                _, start, found = min(ends)
                self._held = ""
                return text[:start], found
        held = self._overlap(piece)
        decided = len(text) - held
        self._held = text[decided:]
        return text[:decided], None

    def flush(self) -> str:
        """Return the text held back. Call after the last piece."""
        rest, self._held = self._held, ""
        return rest

    def copy(self) -> Self:
        """Return an independent copy in the same state."""
        found = copy.copy(self)
        found._matched = list(self._matched)
        return found

    def _overlap(self, piece: str) -> int:
        """Return the length of the text's longest end that may begin a stop text (Knuth-Morris-Pratt for each)."""
        longest = 0
        for number, stop in enumerate(self.stop):
            matched, borders, last = self._matched[number], _borders(stop), len(stop) - 1
            if len(piece) >= last:
                # Earlier text cannot be part of a match.
                matched = 0
            for character in piece[max(0, len(piece) - last) :]:
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched > last:
                    matched = borders[last]
            self._matched[number] = matched
            longest = max(longest, matched)
        return longest


@lru_cache(_KEPT_TEXTS)
def _borders(text: str) -> Sequence[int]:
    """Knuth-Morris-Pratt's failure function: per prefix, the length of its longest proper prefix that is a suffix."""
    borders = array("H", [0]) * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        length += text[length] == text[position]
        borders[position] = length
    return borders
