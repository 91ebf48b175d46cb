"""Validates the tools of a request, and writes the grammar of their calls. Pure."""

import json
import re
from collections.abc import Mapping, Sequence

from kaveri.errors import InvalidArgument
from kaveri.parsers.parts import Tool
from kaveri.parsers.schemas import one_line_schema

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_tools(value: object, field: str = "tools") -> list[Tool]:
    """Return the tools of a decoded JSON list. Raises InvalidArgument, naming the entry."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        given = f"{len(value)} tools" if isinstance(value, list) else value
        raise InvalidArgument(field, given, f"a list of at most {MAX_TOOLS} tools")
    tools = [_read_tool(each, f"{field}[{number}]") for number, each in enumerate(value)]
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidArgument(f"{field}[{number}].function.name", name, "unique among the tools")
    return tools


def _read_tool(value: object, path: str) -> Tool:
    if not isinstance(value, Mapping) or value.get("type") != "function":
        kind = value.get("type") if isinstance(value, Mapping) else value
        raise InvalidArgument(f"{path}.type", kind, "function: Kaveri runs no tools itself")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InvalidArgument(f"{path}.function", function, "an object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{path}.function.name", name, "1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description", ""), str | None):
        raise InvalidArgument(f"{path}.function.description", function["description"], "a text")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidArgument(f"{path}.function.parameters", parameters, "a JSON Schema of an object")
    return Tool(name, parameters)


def chosen_tools(tools: Sequence[Tool], name: str) -> Sequence[Tool]:
    """Return only the tool of this name, or all tools if it is empty. Raises InvalidArgument if no tool matches."""
    found = [tool for tool in tools if name in ("", tool.name)]
    if not found:
        limit = "left out without tools" if not tools else f"one of {', '.join(tool.name for tool in tools)}"
        raise InvalidArgument("tool_choice", name or "required", limit)
    return found


def call_rules(tools: Sequence[Tool], arguments_key: str) -> str:
    """Return Lark rules: "call" is one call as a JSON object with the tool's name and its arguments."""
    names = [f"call_{number}" for number in range(len(tools))]
    lines = [f"call: {' | '.join(names)}"]
    for rule, tool in zip(names, tools, strict=True):
        head = json.dumps(f'{{"name": "{tool.name}", "{arguments_key}": ')
        # One %json per tool: references in a schema resolve within that schema.
        try:
            schema = one_line_schema({"type": "object", **tool.parameters})
        except ValueError as error:
            raise InvalidArgument("tools", f"parameters of {tool.name}", f"a JSON Schema: {error}") from error
        lines += [f'{rule}: {head} {rule}_args "}}"', f"{rule}_args: %json {json.dumps(schema)}"]
    return "\n".join(lines)


def inline_schema(source: str) -> str:
    """Return a JSON Schema, given as JSON, for %json in a grammar. Raises InvalidArgument."""
    try:
        return json.dumps(one_line_schema(json.loads(source)))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("params.grammar", f"{len(source)} characters", f"a JSON Schema: {error}") from error
