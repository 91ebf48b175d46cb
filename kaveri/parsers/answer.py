"""Parses a whole answer: first its reasoning, then tool calls in what follows."""

from collections.abc import Iterator
from dataclasses import dataclass

from kaveri.parsers.json_calls import MarkedCalls
from kaveri.parsers.parts import Content, Part, ToolParser
from kaveri.parsers.reasoning import THINK_BEGIN, THINK_END, ThinkParser
from kaveri.plugins.registry import PluginPoint

AUTO, NONE = "auto", "none"
"""Special values of --tool-parser and --reasoning-parser: detect the parser from the chat template; use no parser."""
_CALLS = "kaveri.parsers.json_calls"
TOOL_PARSERS = PluginPoint(
    kind="tool-parser",
    group="kaveri.tool_parsers",
    own={"hermes": f"{_CALLS}:MarkedCalls", "llama3_json": f"{_CALLS}:llama3_calls", "json": f"{_CALLS}:LeadingCalls"},
)
"""Makers of ToolParsers, by the name that --tool-parser takes; called with the names of the offered tools. Routers and
gateways load them."""
_XML_CALLS = ("<function=", "<parameter=", "<arg_key>")
"""Marks of templates whose calls are XML between MarkedCalls' markers: Qwen3-Coder, GLM."""
THINK = "think"
"""The reasoning parser, by the name that --reasoning-parser takes."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How to read an answer's text. Pieces of the text and an AnswerForm are all that a parser needs."""

    tool_parser: str = ""
    """One of TOOL_PARSERS; empty: calls are not looked for."""
    reasoning_parser: str = ""
    """THINK; empty: the answer has no reasoning."""
    reasoning_has_begun: bool = False
    """The prompt ends within the reasoning."""
    tool_names: tuple[str, ...] = ()
    """Names of the offered tools; empty: not known."""

    def parser(self) -> "AnswerParser":
        """Return a new parser. Raises ValueError for a tool parser that is not installed here."""
        return AnswerParser(self)


MARKERS = (MarkedCalls.BEGIN, MarkedCalls.END, THINK_BEGIN, THINK_END)
"""Markers of Kaveri's own parsers. In some vocabularies they are special tokens, which detokenizing must keep."""
PLAIN = AnswerForm()
"""Plain text: without reasoning or tool calls."""


class AnswerParser:
    """Parser of one answer's text."""

    def __init__(self, form: AnswerForm) -> None:
        self._tools: ToolParser | None = None
        if form.tool_parser:
            self._tools = TOOL_PARSERS.load(form.tool_parser)(form.tool_names)
        self._reasoning = ThinkParser(has_begun=form.reasoning_has_begun) if form.reasoning_parser else None

    def feed(self, text: str) -> Iterator[Part]:
        """Parse more text; yield the parts that later text cannot change."""
        if self._reasoning is None:
            yield from self._with_calls(Content(text))
            return
        for part in self._reasoning.feed(text):
            yield from self._with_calls(part)

    def close(self) -> Iterator[Part]:
        """End the answer; yield the text that was still held back."""
        if self._reasoning is not None:
            for part in self._reasoning.close():
                yield from self._with_calls(part)
        if self._tools is not None:
            yield from self._tools.close()

    def _with_calls(self, part: Part) -> Iterator[Part]:
        """Parse the tool calls in a part with content; yield a part with reasoning unchanged."""
        if isinstance(part, Content) and self._tools is not None:
            yield from self._tools.feed(part.text)
        elif not isinstance(part, Content) or part.text:
            yield part


def detected_tool_parser(template: str) -> str:
    """Return the tool parser of models with this chat template; empty if it takes no tools, or in an unknown form."""
    if "tools" not in template:
        return ""
    if MarkedCalls.BEGIN in template:
        return "" if any(mark in template for mark in _XML_CALLS) else "hermes"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters"' in template else ""


def detected_reasoning_parser(template: str) -> str:
    """Return the reasoning parser of models with this chat template; empty if it knows no reasoning."""
    return THINK if "</think>" in template else ""
