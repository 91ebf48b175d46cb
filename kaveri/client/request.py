"""Validates a call's arguments and builds its GenerateRequest. Pure."""

import json
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kaveri.domain.sampling import SamplingParams, ordered_items, whole_number
from kaveri.errors import InvalidArgument
from kaveri.v1 import inference_pb2
from kaveri.wire.attempts import MAX_REQUEST_ID_BYTES
from kaveri.wire.messages import params_to_proto


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation."""

    role: str
    """The speaker: "system", "user" or "assistant" for most chat templates."""
    content: str | Sequence[str] = ""
    """Text, or its parts. Chat templates that do not iterate over parts get them joined by line breaks."""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Of an assistant: the calls that it made, as OpenAI's: {"id": ..., "type": "function", "function": {"name": ...,
    "arguments": JSON in a text}}."""
    tool_call_id: str = ""
    """Of a tool: id of the call that it answers."""
    name: str = ""
    """Name of the tool. Few chat templates show it."""
    reasoning: str = ""
    """Of an assistant: what it thought. Few chat templates show it."""


MessageLike = Message | Mapping[str, Any]
"""A Message, or a mapping with its fields, of which role is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a conversation has beside its messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the model may call, as OpenAI's: {"type": "function", "function": {"name": ..., "description": ...,
    "parameters": a JSON Schema}}. Completion.tool_calls has the calls."""
    tool_choice: str = "auto"
    """ "auto": the model decides; "none": no calls; "required": the answer is calls; or the name of the tool."""
    parallel_tool_calls: bool = True
    """False: where the answer must be calls, it is one."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template: {"enable_thinking": False}."""
    continue_final_message: bool = False
    """The answer goes on with the text of the last message."""
    add_generation_prompt: bool = True
    """False: the prompt does not begin the assistant's turn."""


MAX_TIMEOUT_S = 365 * 86_400.0
"""Max timeout, a year. gRPC treats timeouts that overflow as expired."""
_MAX_TOKEN_ID = 2**32 - 1


def build_request(
    prompt: str | None,
    prompt_token_ids: Sequence[int] | inference_pb2.TokenIds | None,
    messages: Sequence[MessageLike] | None,
    params: SamplingParams | None,
    model: str | None,
    request_id: str,
    chat: ChatOptions | None = None,
) -> inference_pb2.GenerateRequest:
    """Build the GenerateRequest for a call's arguments. prompt_token_ids: a protobuf message if already checked by
    add_token_ids(). Raises InvalidArgument, naming the argument, for a wrong type or an exceeded limit, or unless
    exactly one of prompt, prompt_token_ids and messages is given."""
    kinds = {"prompt": prompt, "prompt_token_ids": prompt_token_ids, "messages": messages}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) != 1:
        raise InvalidArgument("prompt", " and ".join(given) or None, f"exactly one of {', '.join(kinds)}")
    request_id = check_text("request_id", request_id, most_bytes=MAX_REQUEST_ID_BYTES)
    request = inference_pb2.GenerateRequest(request_id=request_id)
    if model is not None:
        request.model = check_text("model", model)
    if prompt is not None:
        request.text = check_text("prompt", prompt, may_be_blank=True)
    elif isinstance(prompt_token_ids, inference_pb2.TokenIds):
        request.token_ids.CopyFrom(prompt_token_ids)
    elif prompt_token_ids is not None:
        request.token_ids.SetInParent()
        items = ordered_items("prompt_token_ids", prompt_token_ids, "a sequence of token ids")
        add_token_ids(request.token_ids, items)
    elif messages is not None:
        request.messages.SetInParent()
        items = ordered_items("messages", messages, "a sequence of messages")
        request.messages.messages.extend(_message_to_proto(item) for item in items)
        if chat is not None:
            _add_options(request.messages, chat)
    if chat is not None and messages is None:
        raise InvalidArgument("chat", chat, "left out without messages")
    if params is not None:
        if not isinstance(params, SamplingParams):
            raise InvalidArgument("params", params, "SamplingParams, or None")
        request.params.CopyFrom(params_to_proto(params))
        request.token_texts = params.logprobs is not None or params.prompt_logprobs is not None
    return request


def check_timeout(timeout_s: float | None) -> None:
    """Raise InvalidArgument unless `timeout_s` is None (no limit) or a positive number of seconds, at most a year."""
    if timeout_s is None:
        return
    number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument("timeout_s", timeout_s, f"a number of seconds in (0, {MAX_TIMEOUT_S:.0f}], or None")


def check_text(field: str, value: object, *, may_be_blank: bool = False, most_bytes: int | None = None) -> str:
    """Validate a text and return it. Raises InvalidArgument, naming `field`, unless it is Unicode text of at most
    `most_bytes` in UTF-8 that contains more than white space; `may_be_blank` waives the latter."""
    if not isinstance(value, str):
        raise InvalidArgument(field, value, "a text")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, value, f"Unicode text: {error.reason}") from error
    if not may_be_blank and not value.strip():
        raise InvalidArgument(field, value, "a text that is not blank")
    if most_bytes is not None and size_bytes > most_bytes:
        raise InvalidArgument(field, value, f"at most {most_bytes} bytes long, not {size_bytes}")
    return value


def add_token_ids(message: inference_pb2.TokenIds, items: Iterable[object]) -> None:
    """Validate token ids and append them to `message`. Raises InvalidArgument."""
    values: Any = items if isinstance(items, list | tuple) else list(items)
    # Avoid a Python loop over long prompts.
    if set(map(type, values)) - {int}:
        values = [_token_id(value) for value in values]
    elif values:
        _token_id(min(values))
        _token_id(max(values))
    message.ids.extend(values)


def _token_id(value: object) -> int:
    token_id = whole_number(value)
    if token_id is None or not 0 <= token_id <= _MAX_TOKEN_ID:
        raise InvalidArgument("prompt_token_ids", value, f"whole numbers in [0, {_MAX_TOKEN_ID}]")
    return token_id


def _message_to_proto(given: object) -> inference_pb2.Message:
    if isinstance(given, Mapping):
        known = [name for name in given if name in _MESSAGE_FIELDS]
        is_whole = "role" in known and ("content" in known or "tool_calls" in known)
        given = Message(**{name: given[name] for name in known}) if is_whole and len(known) == len(given) else None
    if not isinstance(given, Message):
        raise InvalidArgument(
            "messages", given, f"messages with role and content each, of {', '.join(_MESSAGE_FIELDS)}"
        )
    texts = given.content if isinstance(given.content, list | tuple) else (given.content,)
    parts = [check_text("messages", part, may_be_blank=True) for part in texts]
    message = inference_pb2.Message(role=check_text("messages", given.role, may_be_blank=True))
    if len(parts) == 1:
        message.content = parts[0]
    else:
        message.parts.extend(parts)
    if given.tool_calls:
        message.tool_calls = to_json("messages", list(given.tool_calls))
    for name in ("tool_call_id", "name", "reasoning"):
        if text := getattr(given, name):
            setattr(message, name, check_text("messages", text, may_be_blank=True))
    return message


_MESSAGE_FIELDS = tuple(each.name for each in fields(Message))


def _add_options(messages: inference_pb2.Messages, chat: ChatOptions) -> None:
    if chat.tools:
        messages.tools = to_json("chat.tools", list(chat.tools))
    if chat.template_arguments:
        messages.template_arguments = to_json("chat.template_arguments", dict(chat.template_arguments))
    choice = check_text("chat.tool_choice", chat.tool_choice)
    if choice == "none":
        # Not shown to the model, so that it does not call them.
        messages.tools, choice = "", "auto"
    messages.tool_required = choice == "required"
    messages.tool_name = "" if choice in ("auto", "required") else choice
    messages.one_tool_call = not chat.parallel_tool_calls
    messages.continue_final_message = chat.continue_final_message
    messages.no_generation_prompt = not chat.add_generation_prompt


def to_json(field_name: str, value: object) -> str:
    """Return a value as JSON. Raises InvalidArgument, naming the field."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # A part of a surrogate pair is no Unicode text.
        text.encode()
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(field_name, f"a {type(value).__name__}", f"JSON: {error}") from error
