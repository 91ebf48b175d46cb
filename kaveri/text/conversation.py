"""Reads a conversation of a request: its messages, tools, and variables of the chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kaveri.errors import InvalidArgument
from kaveri.parsers.parts import Tool
from kaveri.parsers.tools import chosen_tools, read_tools

MAX_TOOLS_BYTES = 2**18
MAX_DEPTH = 64
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "range")


class Turn(Protocol):
    """Message of a conversation, with one text (content) or several (parts). Implemented by a protobuf message."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...
    @property
    def parts(self) -> Sequence[str]: ...
    @property
    def tool_calls(self) -> str: ...
    @property
    def tool_call_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def reasoning(self) -> str: ...


class Messages(Protocol):
    """A conversation as it arrives. Implemented by a protobuf message, whose fields the proto describes."""

    @property
    def messages(self) -> Sequence[Turn]: ...
    @property
    def tools(self) -> str: ...
    @property
    def tool_required(self) -> bool: ...
    @property
    def tool_name(self) -> str: ...
    @property
    def one_tool_call(self) -> bool: ...
    @property
    def template_arguments(self) -> str: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def no_generation_prompt(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that becomes a prompt through the model's chat template."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    """As templates take them."""
    known: Sequence[Tool] = ()
    """The tools, read."""
    wanted: Sequence[Tool] = ()
    """Tools of which the answer must be calls; empty: it may be anything."""
    several: bool = True
    """The answer may be several calls."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    continues: bool = False
    begins_turn: bool = True


def read_conversation(messages: Messages) -> Conversation:
    """Validate and decode a conversation but for its texts. Raises InvalidArgument."""
    turns = messages.messages
    if not turns:
        raise InvalidArgument("prompt.messages", [], "at least one message")
    tools = _decoded("prompt.tools", messages.tools, [])
    read = read_tools(tools, "prompt.tools")
    wants = messages.tool_required or messages.tool_name
    arguments = _decoded("prompt.template_arguments", messages.template_arguments, {})
    if not isinstance(arguments, dict):
        raise InvalidArgument("prompt.template_arguments", arguments, "a JSON object")
    for name in _RESERVED:
        if name in arguments:
            raise InvalidArgument(f"prompt.template_arguments.{name}", arguments[name], "left out: Kaveri sets it")
    return Conversation(
        turns,
        tools,
        read,
        chosen_tools(read, messages.tool_name) if wants else (),
        not messages.one_tool_call,
        arguments,
        messages.continue_final_message,
        not messages.no_generation_prompt,
    )


def fields_of(turn: Turn, path: str, mark: Callable[[str], str]) -> dict[str, Any]:
    """Return a message's fields beside role and content as templates take them. mark: applied to every text. Raises
    InvalidArgument."""
    found: dict[str, Any] = {}
    if turn.tool_calls:
        found["tool_calls"] = marked_values(_calls(turn.tool_calls, f"{path}.tool_calls"), mark)
    for name, text in (("tool_call_id", turn.tool_call_id), ("name", turn.name), ("reasoning_content", turn.reasoning)):
        if text:
            found[name] = mark(text)
    return found


def _calls(text: str, field_name: str) -> list[dict[str, Any]]:
    calls = _decoded(field_name, text, [])
    if not isinstance(calls, list):
        raise InvalidArgument(field_name, calls, "a JSON list of calls")
    return [_call(call, f"{field_name}[{number}]") for number, call in enumerate(calls)]


def _call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument(f"{path}.function", function, "an object with a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates write an object, as the model did.
        arguments = _decoded(f"{path}.function.arguments", arguments, {})
    if not isinstance(arguments, dict):
        raise InvalidArgument(f"{path}.function.arguments", arguments, "a JSON object in a text")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _decoded(field_name: str, text: str, default: Any) -> Any:
    if not text:
        return default
    if len(text) > MAX_TOOLS_BYTES:
        raise InvalidArgument(field_name, f"{len(text)} characters", f"at most {MAX_TOOLS_BYTES}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field_name, text, f"JSON: {error}") from error


def marked_values(value: Any, mark: Callable[[str], str], depth: int = 0) -> Any:
    """Return a JSON value with `mark` applied to every text in it. Raises InvalidArgument beyond MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise InvalidArgument("prompt.messages", "a nested value", f"JSON of at most {MAX_DEPTH} levels")
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): marked_values(each, mark, depth + 1) for key, each in value.items()}
    return [marked_values(each, mark, depth + 1) for each in value] if isinstance(value, list) else value
