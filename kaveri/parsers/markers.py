"""Searches a marker in text that comes in pieces."""

MOST_SPACE = 64
"""Most white space around a marker that counts as markup, in characters: bounds the text that is scanned again."""


def bare_length(text: str) -> int:
    """Return the length of `text` without the white space at its end, of which at most MOST_SPACE are left out."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def after_space(text: str, start: int) -> int:
    """Return the index after the white space at `start`, of which at most MOST_SPACE is skipped."""
    space = text[start : start + MOST_SPACE]
    return start + len(space) - len(space.lstrip())


def held_length(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
