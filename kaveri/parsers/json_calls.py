"""Reads tool calls that are written as JSON objects with the tool's name and its arguments."""

import json
import re
from collections.abc import Iterator, Sequence

from kaveri.parsers.markers import MOST_SPACE, bare_length, held_length, space_length
from kaveri.parsers.parts import Content, Part, Tool, ToolCall
from kaveri.parsers.tools import call_rules

_STRUCTURE = re.compile(r'["\\{}\[\]]')
_KEYS = {"name", "arguments", "parameters", "id", "type"}


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _read_call(value: object) -> ToolCall | None:
    """Convert a decoded JSON value to a call; None if it is not one. Accepts "arguments" or "parameters" as the key."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value.keys() <= _KEYS:
        # An object with other fields is an answer that happens to have a name.
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        # As OpenAI writes them: JSON within JSON.
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _read_calls(text: str) -> list[ToolCall] | None:
    """Parse a JSON text that is one call or a list of calls; None if it is anything else."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    calls = [_read_call(each) for each in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call is not None] if calls and None not in calls else None


class MarkedCalls:
    """Parser of calls between <tool_call> and </tool_call>, anywhere in the answer: Hermes, Qwen 2.5 and 3."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        """The possible beginning of a marker, with the white space before it."""
        self._call: list[str] | None = None
        """Pieces of the call under way, from its marker on."""
        self._space = ""
        """White space before the call under way: dropped if the call is whole."""

    def feed(self, text: str) -> Iterator[Part]:
        text, self._held = self._held + text, ""
        while text:
            if self._call is None:
                before, marker, rest = text.partition(self.BEGIN)
                if not marker:
                    shown = bare_length(text[: len(text) - held_length(text, self.BEGIN)])
                    yield from _content(text[:shown])
                    self._held = text[shown:]
                    return
                shown = bare_length(before)
                yield from _content(before[:shown])
                self._space, self._call, text = before[shown:], [], rest
                continue
            inside, marker, rest = text.partition(self.END)
            if not marker:
                held = held_length(text, self.END)
                self._call.append(text[: len(text) - held])
                self._held = text[len(text) - held :]
                return
            self._call.append(inside)
            whole, self._call, text = "".join(self._call), None, rest
            calls = _read_calls(whole)
            if calls is None:
                yield Content(f"{self._space}{self.BEGIN}{whole}{self.END}")
            else:
                yield from calls

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        marked = f'"{self.BEGIN}\\n" call "\\n{self.END}"'
        calls = 'calls: call_marked ("\\n" call_marked)*' if several else "calls: call_marked"
        return f"{calls}\ncall_marked: {marked}\n{call_rules(tools, 'arguments')}"

    def close(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if self._call is not None:
            held = "".join((self._space, self.BEGIN, *self._call, held))
        # White space at the end is kept.
        yield from _content(held)


class LeadingCalls:
    """Parser of answers that begin with calls: JSON objects separated by semicolons, or a JSON list of objects.
    `prefix` may precede the first one, such as <|python_tag|> in Llama 3.x. Text after the calls is Content."""

    _separator = ";"

    def __init__(self, prefix: str = "", arguments_key: str = "arguments") -> None:
        """arguments_key: name of the arguments in grammar(). feed() accepts "arguments" and "parameters" alike."""
        self._prefix = prefix
        self._arguments_key = arguments_key
        self._before = ""
        """Undecided text before the next value: white space, and the prefix or a separator."""
        self._value: list[str] = []
        """Pieces of the value under way."""
        self._scan = _ValueScan()
        self._is_over = False
        """Everything further is Content."""
        self._has_calls = False

    def feed(self, text: str) -> Iterator[Part]:
        while text and not self._is_over:
            if not self._value:
                text = self._before + text
                start = self._start(text)
                if start is None:
                    self._before = text
                    return
                if start < 0:
                    self._is_over, self._before = True, ""
                    break
                self._before, text = text[:start], text[start:]
            end = self._scan.end(text)
            if end is None:
                self._value.append(text)
                return
            value = "".join((*self._value, text[:end]))
            text = text[end:]
            self._value, self._scan = [], _ValueScan()
            calls = _read_calls(value)
            if calls is None:
                self._is_over, text, self._before = True, self._before + value + text, ""
            else:
                self._before, self._has_calls = "", True
                yield from calls
        yield from _content(text)

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        calls = f'calls: call ("{self._separator} " call)*' if several else "calls: call"
        return f"{calls}\n{call_rules(tools, self._arguments_key)}"

    def close(self) -> Iterator[Part]:
        held = "".join((self._before, *self._value))
        self._before, self._value = "", []
        # Drop white space and a separator after the last call: they belong to the markup.
        if not self._has_calls or held.strip().strip(self._separator).strip():
            yield from _content(held)

    def _start(self, text: str) -> int | None:
        """Return the index at which the next JSON value begins; None: not known yet; -1: there is none."""
        if space_length(text) > MOST_SPACE:
            return -1
        skipped = self._separator if self._has_calls else self._prefix
        rest = text.lstrip()
        if skipped and rest.startswith(skipped):
            rest = rest.removeprefix(skipped)
            if space_length(rest) > MOST_SPACE:
                return -1
            rest = rest.lstrip()
        elif skipped and len(rest) < len(skipped) and skipped.startswith(rest):
            return None
        if not rest:
            return None
        return len(text) - len(rest) if rest[0] in ("{" if self._has_calls else "{[") else -1


class _ValueScan:
    """Finds the end of a JSON object or list that comes in pieces, and looks at each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._skips_next = False
        """A backslash was the last character."""

    def end(self, text: str) -> int | None:
        """Return where the value ends in this piece of it; None if it goes on."""
        skipped = 0 if self._skips_next else -1
        self._skips_next = False
        for found in _STRUCTURE.finditer(text):
            position, character = found.start(), found.group()
            if position == skipped:
                continue
            if self._in_text and character == "\\":
                skipped = position + 1
                self._skips_next = skipped == len(text)
            elif character == '"':
                self._in_text = not self._in_text
            elif not self._in_text and character in "{[":
                self._depth += 1
            elif not self._in_text and character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


def _content(text: str) -> Iterator[Part]:
    if text:
        yield Content(text)


def llama3_calls() -> LeadingCalls:
    """Return the parser of Llama 3.x, whose calls have "parameters"."""
    return LeadingCalls("<|python_tag|>", "parameters")
