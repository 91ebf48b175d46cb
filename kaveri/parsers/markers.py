"""Searches a marker in text that comes in pieces."""


def held_length(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
