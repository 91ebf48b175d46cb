"""Reads tool calls that are written as JSON objects with the tool's name and its arguments."""

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence

from kaveri.parsers.markers import after_space, bare_length, held_length
from kaveri.parsers.parts import Content, Part, Tool, ToolCall
from kaveri.parsers.tools import call_rules

_STOPS = re.compile(r'\\.?|["{}\[\]<\x00-\x1f]', re.DOTALL)
_NOT_SPACE = re.compile(r"\S")
_KEYS = {"name", "arguments", "parameters", "id", "type"}


def _finite(text: str) -> float:
    """Convert a number. Raises ValueError for those that JSON cannot have: 1e999, NaN."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


def _read_call(value: object) -> ToolCall | None:
    """Convert a decoded JSON value to a call; None if it is not one. Accepts "arguments" or "parameters" as the key.
    Raises like _decode."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value.keys() <= _KEYS:
        # An object with other fields is an answer that happens to have a name.
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        # As OpenAI writes them: JSON within JSON.
        arguments = _decode(arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _read_calls(text: str) -> list[ToolCall] | None:
    """Parse a JSON text that is one call or a list of calls; None if it is anything else."""
    try:
        value = _decode(text)
        calls = [_read_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return None
    return [call for call in calls if call is not None] if calls and None not in calls else None


class MarkedCalls:
    """Parser of calls between <tool_call> and </tool_call>, anywhere in the answer: Hermes, Qwen 2.5 and 3."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        """tool_names: not used. Calls of unknown tools are calls too: clients answer them with an error."""
        self._held = ""
        """The possible beginning of a marker, and before a call the white space that precedes it."""
        self._scan: _JsonScan | None = None
        """Scan of the call under way; None: no call has begun."""
        self._call: list[str] = []
        """Earlier pieces of the call under way, after its marker."""
        self._space = ""
        """White space before the call under way: dropped if the call is whole."""

    def feed(self, text: str) -> Iterator[Part]:
        text, self._held = self._held + text, ""
        start = 0
        while start < len(text):
            if self._scan is None:
                begin = text.find(self.BEGIN, start)
                before = text[start:] if begin < 0 else text[start:begin]
                held = held_length(before, self.BEGIN) if begin < 0 else 0
                shown = bare_length(before[: len(before) - held])
                yield from _content(before[:shown])
                if begin < 0:
                    self._held = before[shown:]
                    return
                self._space, self._scan = before[shown:], _JsonScan()
                start = begin + len(self.BEGIN)
                continue
            end = self._end(self._scan, text, start)
            if end is None:
                self._call.append(text[start : len(text) - len(self._held)])
                return
            calls = _read_calls("".join((*self._call, text[start:end]))) if end >= 0 else None
            if calls is None:
                # Only the marker is content: calls may follow it. No text is scanned more than twice: a scan passes a
                # begin marker only inside a string, and the scan from that marker is inside strings where it is not.
                yield Content(self._space + self.BEGIN)
                if self._call:
                    text = "".join((*self._call, text))
            else:
                yield from calls
                start = end + len(self.END)
            self._call, self._scan = [], None

    def _end(self, scan: "_JsonScan", text: str, start: int) -> int | None:
        """Return where the call's end marker is; -1: the call is malformed; None: neither yet. Sets _held."""
        if not scan.has_begun and (first := _NOT_SPACE.search(text, start)):
            scan.has_begun = True
            if first[0] not in "{[<":
                return -1
        for index in scan.stops(text, start):
            marker = text[index : index + len(self.END)]
            if marker == self.END:
                return index
            if self.END.startswith(marker):
                self._held = marker
                return None
            if marker[0] not in "{}[]":
                return -1
        return None

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        marked = 'call_begin "\\n" call "\\n" call_end'
        markers = f'call_begin: "{self.BEGIN}"\ncall_end: "{self.END}"'
        calls = 'calls: call_marked ("\\n" call_marked)*' if several else "calls: call_marked"
        return f"{calls}\ncall_marked: {marked}\n{markers}\n{call_rules(tools, 'arguments')}"

    def close(self) -> Iterator[Part]:
        while self._scan is not None:
            text = "".join((*self._call, self._held))
            yield Content(self._space + self.BEGIN)
            self._held, self._call, self._scan = "", [], None
            yield from self.feed(text)
        # White space at the end is kept.
        held, self._held = self._held, ""
        yield from _content(held)


class LeadingCalls:
    """Parser of answers that begin with calls: JSON objects separated by semicolons, or a JSON list of objects.
    `prefix` may precede the first one, such as <|python_tag|> in Llama 3.x. Text after the calls is Content."""

    _separator = ";"

    def __init__(self, tool_names: Collection[str] = (), prefix: str = "", arguments_key: str = "arguments") -> None:
        """tool_names: JSON of other names is Content; empty: any name is a call. arguments_key: name of the arguments
        in grammar(). feed() accepts "arguments" and "parameters" alike."""
        self._tool_names = frozenset(tool_names)
        self._prefix = prefix
        self._arguments_key = arguments_key
        self._before = ""
        """Undecided text before the next value: white space, and the prefix or a separator."""
        self._value: list[str] = []
        """Earlier pieces of the value under way."""
        self._scan: _JsonScan | None = None
        """Scan of the value under way; None: it has not begun."""
        self._is_over = False
        """Everything further is Content."""
        self._has_calls = False

    def feed(self, text: str) -> Iterator[Part]:
        if self._scan is None:
            text, self._before = self._before + text, ""
        start = 0
        while start < len(text) and not self._is_over:
            begin = start
            if self._scan is None:
                found = self._start(text, start)
                if found is None:
                    self._before = text[start:]
                    return
                if found < 0:
                    self._is_over = True
                    break
                begin = found
                self._before, self._scan = text[start:begin], _JsonScan()
            end = self._scan.end(text, begin)
            if end is None:
                self._value.append(text[begin:])
                return
            calls = _read_calls("".join((*self._value, text[begin:end]))) if end >= 0 else None
            if calls is None or (self._tool_names and any(call.name not in self._tool_names for call in calls)):
                self._is_over, text, start = True, "".join((self._before, *self._value, text[begin:])), 0
            else:
                self._has_calls, start = True, end
                yield from calls
            self._before, self._value, self._scan = "", [], None
        yield from _content(text[start:])

    def grammar(self, tools: Sequence[Tool], *, several: bool) -> str:
        calls = f'calls: call ("{self._separator} " call)*' if several else "calls: call"
        return f"{calls}\n{call_rules(tools, self._arguments_key)}"

    def close(self) -> Iterator[Part]:
        held = "".join((self._before, *self._value))
        self._before, self._value = "", []
        # Drop white space and a separator after the last call: they belong to the markup.
        if not self._has_calls or held.strip().strip(self._separator).strip():
            yield from _content(held)

    def _start(self, text: str, start: int) -> int | None:
        """Return the index at which the next JSON value begins; None: not known yet; -1: there is none."""
        skipped = self._separator if self._has_calls else self._prefix
        begin = after_space(text, start)
        if skipped and text.startswith(skipped, begin):
            begin = after_space(text, begin + len(skipped))
        rest = text[begin : begin + len(skipped) + 1]
        if skipped.startswith(rest):
            return None
        return begin if rest[0] in ("{" if self._has_calls else "{[") else -1


class _JsonScan:
    """Incremental scan of one JSON value for brackets outside strings. Visits each character once."""

    def __init__(self) -> None:
        self.has_begun = False
        """Set by the parser once it has seen more than white space."""
        self._depth = 0
        self._in_string = False
        self._skipped = 0
        """Characters of the next piece that were escaped by the last one: 0 or 1."""

    def stops(self, text: str, start: int) -> Iterator[int]:
        """Yield the index of each bracket outside strings, and of each "<", "\\" and control character that cannot be
        JSON where it is. text: not empty after start."""
        start, self._skipped = start + self._skipped, 0
        for found in _STOPS.finditer(text, start):
            character = found[0]
            if character == '"':
                self._in_string = not self._in_string
            elif character == "\\" and self._in_string:
                self._skipped = 1
            elif (character < " ") == self._in_string:
                yield found.start()

    def end(self, text: str, start: int) -> int | None:
        """Return where the value ends in this piece of it; -1: it is not JSON; None: it goes on."""
        for index in self.stops(text, start):
            if text[index] not in "{}[]":
                return -1
            self._depth += 1 if text[index] in "{[" else -1
            if self._depth == 0:
                return index + 1
        return None


def _content(text: str) -> Iterator[Part]:
    if text:
        yield Content(text)


def llama3_calls(tool_names: Collection[str] = ()) -> LeadingCalls:
    """Return the parser of Llama 3.x, whose calls have "parameters"."""
    return LeadingCalls(tool_names, "<|python_tag|>", "parameters")
