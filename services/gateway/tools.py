"""Converts the fields of a chat request about tools, reasoning and the chat template. Pure."""

from collections.abc import Mapping
from typing import Any

from kaveri.client.request import ChatOptions
from kaveri.errors import InvalidArgument
from kaveri.parsers.tools import read_tools
from services.gateway.fields import Fields, any_of, check_items, check_object, one_of

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def take_chat_options(fields: Fields) -> ChatOptions:
    """Take the fields of a chat request that its prompt depends on beside the messages. Raises InvalidArgument."""
    tools = fields.take("tools")
    tools = [] if tools is None else tools
    choice = _choice(fields.take("tool_choice"))
    read = read_tools(tools)
    if choice == "none":
        # Not shown to the model, so that it does not call them.
        tools, choice = [], "auto"
    elif choice != "auto" and choice not in ("required", *(tool.name for tool in read)):
        raise InvalidArgument("tool_choice", choice, "none, auto, required, or a function of tools")
    if choice != "auto" and not tools:
        raise InvalidArgument("tool_choice", choice, "none or auto without tools")
    continues = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", default=not continues)
    if continues and begins:
        raise InvalidArgument("add_generation_prompt", True, "false, or left out, with continue_final_message")
    return ChatOptions(
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=fields.flag("parallel_tool_calls", default=True),
        template_arguments=_arguments(fields),
        continue_final_message=continues,
        add_generation_prompt=begins,
    )


def _choice(value: Any) -> str:
    if value is None:
        return "auto"
    if value in ("none", "auto", "required"):
        return str(value)
    if not isinstance(value, dict):
        raise InvalidArgument("tool_choice", value, "none, auto, required, or an object that names a function")
    choice = Fields(value, "tool_choice.")
    if choice.text("type") != "function":
        raise InvalidArgument("tool_choice.type", value.get("type"), "function")
    function = Fields(check_object(choice.take("function"), "tool_choice.function"), "tool_choice.function.")
    name = function.text("name")
    choice.refuse_rest({})
    function.refuse_rest({})
    if not name or name in ("none", "auto", "required"):
        raise InvalidArgument("tool_choice.function.name", name, "the name of a tool")
    return name


def _arguments(fields: Fields) -> Mapping[str, Any]:
    given = fields.take("chat_template_kwargs")
    arguments = {} if given is None else dict(check_object(given, "chat_template_kwargs"))
    effort = fields.take("reasoning_effort")
    if effort is not None and effort not in _EFFORTS:
        raise InvalidArgument("reasoning_effort", effort, f"one of {', '.join(_EFFORTS)}")
    # A router knows what the model's template takes.
    return arguments if effort is None else {"reasoning_effort": effort, **arguments}


def take_calls(fields: Fields, path: str) -> list[Any]:
    """Take an assistant's tool_calls. Raises InvalidArgument."""
    calls = fields.take("tool_calls")
    if calls in (None, []):
        return []
    for number, call in enumerate(check_items(calls, f"{path}.tool_calls")):
        each = Fields(check_object(call, f"{path}.tool_calls[{number}]"), f"{path}.tool_calls[{number}].")
        kind, _, function = each.text("type"), each.text("id"), each.take("function")
        if kind not in (None, "function"):
            raise InvalidArgument(f"{path}.tool_calls[{number}].type", kind, "function")
        field = f"{path}.tool_calls[{number}].function"
        inner = Fields(check_object(function, field), f"{field}.")
        if not inner.text("name"):
            raise InvalidArgument(f"{field}.name", None, "the name of a tool")
        inner.text("arguments")
        # A position of streamed calls, which some clients send back.
        each.refuse_rest({"index": any_of(int)})
        inner.refuse_rest({})
    return list(calls)


NO_TOOLS = {"functions": one_of([]), "function_call": one_of("none")}
"""OpenAI's former fields, which tools have replaced."""
