"""Parses a whole answer: first its reasoning, then tool calls in what follows."""

from collections.abc import Callable, Iterator, Mapping

from kaveri.parsers.json_calls import LeadingCalls, MarkedCalls
from kaveri.parsers.parts import Content, Part, ToolParser
from kaveri.parsers.reasoning import ThinkParser

NONE = "none"
TOOL_PARSERS: Mapping[str, Callable[[], ToolParser]] = {
    "hermes": MarkedCalls,
    "llama3_json": lambda: LeadingCalls("<|python_tag|>"),
    "json": LeadingCalls,
}
"""By the name that --tool-parser takes."""
REASONING_PARSERS = ("think",)
"""By the name that --reasoning-parser takes."""


class AnswerParser:
    """Parser of one answer's text.

    tool_parser: one of TOOL_PARSERS; empty: no calls are looked for. reasoning_parser: one of REASONING_PARSERS; empty:
    no reasoning is looked for. reasoning_has_begun: the prompt ends within the reasoning.
    """

    def __init__(self, tool_parser: str = "", reasoning_parser: str = "", *, reasoning_has_begun: bool = False) -> None:
        self._tools = TOOL_PARSERS[tool_parser]() if tool_parser else None
        self._reasoning = ThinkParser(has_begun=reasoning_has_begun) if reasoning_parser else None

    def feed(self, text: str) -> Iterator[Part]:
        """Take further text; yield the parts that it decides."""
        if self._reasoning is None:
            yield from self._behind(Content(text))
            return
        for part in self._reasoning.feed(text):
            yield from self._behind(part)

    def close(self) -> Iterator[Part]:
        """Yield what was held back, at the end of the answer."""
        if self._reasoning is not None:
            for part in self._reasoning.close():
                yield from self._behind(part)
        if self._tools is not None:
            yield from self._tools.close()

    def _behind(self, part: Part) -> Iterator[Part]:
        if isinstance(part, Content) and self._tools is not None:
            yield from self._tools.feed(part.text)
        elif not isinstance(part, Content) or part.text:
            yield part


def detected_tool_parser(template: str) -> str:
    """Return the tool parser of models with this chat template; empty if it takes no tools, or in an unknown form."""
    if "tools" not in template:
        return ""
    if MarkedCalls.BEGIN in template:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters"' in template else ""


def detected_reasoning_parser(template: str) -> str:
    """Return the reasoning parser of models with this chat template; empty if it knows no reasoning."""
    return "think" if "</think>" in template else ""
