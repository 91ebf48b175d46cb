"""Separates the reasoning at the beginning of an answer, between two markers."""

from collections.abc import Iterator

from kaveri.parsers.markers import after_space, held_length
from kaveri.parsers.parts import Content, Part, Reasoning

THINK_BEGIN, THINK_END = "<think>", "</think>"


class ThinkParser:
    """Parser of <think> ... </think>. What follows is Content; so is an answer that does not begin with <think>."""

    def __init__(self, *, has_begun: bool) -> None:
        """has_begun: the prompt ends within the reasoning, so the answer has no <think>."""
        self._state = "inside" if has_begun else "before"
        self._held = ""

    def feed(self, text: str) -> Iterator[Part]:
        """Parse more text; yield the parts that later text cannot change."""
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = after_space(text, 0)
            beginning = text[start : start + len(THINK_BEGIN)]
            if beginning == THINK_BEGIN:
                self._state, text = "inside", text[start + len(THINK_BEGIN) :]
            elif THINK_BEGIN.startswith(beginning):
                self._held = text
                return
            else:
                self._state = "after"
        if self._state == "inside":
            thought, marker, rest = text.partition(THINK_END)
            if marker:
                self._state = "after"
            else:
                held = held_length(text, THINK_END)
                thought, self._held = text[: len(text) - held], text[len(text) - held :]
            if thought:
                yield Reasoning(thought)
            text = rest
        if text:
            yield Content(text)

    def close(self) -> Iterator[Part]:
        """End the answer; yield the text that was still held back."""
        held, self._held = self._held, ""
        if held:
            yield Reasoning(held) if self._state == "inside" else Content(held)
