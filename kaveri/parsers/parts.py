"""Values that parsers return, and the interface of tool parsers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text, which precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Answer text outside reasoning and tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call of a tool."""

    name: str
    arguments: str
    """A JSON object."""


Part = Reasoning | Content | ToolCall


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that a model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON Schema of the arguments."""


class ToolParser(Protocol):
    """Parser of the text that follows one answer's reasoning."""

    def feed(self, text: str) -> Iterator[Part]:
        """Parse more text; yield the Content and ToolCalls that later text cannot change. Text that may still become a
        call is held back. Malformed calls are Content, unchanged."""

    def close(self) -> Iterator[Part]:
        """End the answer; yield the text that was still held back."""

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a Lark grammar, with llguidance's %json, of answers that consist of calls of these tools. Its rule
        "calls" matches the whole answer; rule names begin with "call". A rule that is one literal in angle brackets,
        `call_begin: "<tool_call>"`, is that token where the vocabulary has it. several: allow more than one call."""
