"""Finds stop texts in a text that comes in pieces. The work per character is bounded, whatever the stop texts are."""

import copy
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

_KEPT_TEXTS = 1024


class StopMatcher:
    """Decides text up to the first stop text, and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str], known_characters: int = 0) -> None:
        """stop: at least one, none of them empty. known_characters: no stop text ends within so many characters."""
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop))
        self._unmatched = max(0, known_characters - self._longest)
        """Characters that no match can reach into that ends behind the known ones."""
        self._matched = [0] * len(self._stop)
        """Of each stop text: how many of its characters the text ends with, but never all of them."""
        self._held = ""

    def push(self, piece: str, *, ignores: bool) -> tuple[str, str | None]:
        """The text that is decided with the next piece, and the stop text that it ends before. ignores: a stop text
        that is complete with this piece is text as any other."""
        if len(piece) <= self._unmatched:
            self._unmatched -= len(piece)
            return piece, None
        self._unmatched = 0
        text = self._held + piece
        if not ignores:
            # What is held back holds no whole stop text but those that were ignored.
            first = len(self._held) + 1
            starts = [(text.find(stop, max(0, first - len(stop))), stop) for stop in self._stop]
            # The match that ends first: the first one if the text arrived letter by letter.
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
        """The text that is held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def copy(self) -> Self:
        """Another one that goes on from here."""
        found = copy.copy(self)
        found._matched = list(self._matched)
        return found

    def _overlap(self, piece: str) -> int:
        """Length of the longest end of the text that could be the beginning of a stop text. Knuth, Morris and Pratt's
        algorithm, for each stop text."""
        longest = 0
        for number, stop in enumerate(self._stop):
            matched, borders, last = self._matched[number], _borders(stop), len(stop) - 1
            if len(piece) >= last:
                # What came before is of no interest.
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
    """The failure function of Knuth, Morris and Pratt: for each prefix, the length of its longest border.

    A border is a proper suffix that is also a prefix. One entry for each character of the text.
    """
    borders = array("H", [0]) * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[length] != text[position]:
            length = borders[length - 1]
        length += text[length] == text[position]
        borders[position] = length
    return borders
