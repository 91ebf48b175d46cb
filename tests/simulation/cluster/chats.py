"""Conversations with tools and reasoning: how they are drawn, sent, read, and checked.

Random tokens write calls of tools and reasoning only because a request allows few tokens, among them the markers.
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kaveri.client.answer import Chunk
from kaveri.client.request import ChatOptions, Message, build_request
from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.parsers.answer import AUTO, AnswerForm
from kaveri.parsers.parts import Content, Part, Reasoning, ToolCall
from kaveri.text.conversation import read_conversation
from kaveri.text.tokenizer import ModelTokenizer
from services.gateway.formats import ChatFormat
from services.gateway.parsed_request import ParsedRequest
from services.gateway.shown_prompts import ShownPrompt
from services.router.answer_forms import answer_form, answer_grammar, model_form
from tests.simulation.cluster.plan import PlannedChat, ScheduledRequest
from tests.simulation.cluster.tokenizer import CHAT_PIECES, make_tokenizer

_TOKENIZER = make_tokenizer(chats=True).backend_tokenizer
_WHOLE_PIECES = 5
"""Those at the start of CHAT_PIECES: whole markers and a call."""
_LARGEST = 99
_SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False}
_MOST_TOKENS = 120
_MOST_READ_S = 10.0


def _tool(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


_TOOLS = (
    _tool("look", {**_SCHEMA, "properties": {"n": {"type": "integer", "minimum": 0, "maximum": _LARGEST}}}),
    _tool("stop", _SCHEMA),
)
_HISTORY = (
    Message("user", "look at the sand"),
    Message("assistant", "", [{"id": "c", "function": {"name": "look", "arguments": '{"n": 1}'}}]),
    Message("tool", "a hot bed", (), "c"),
)


def with_chat(request: ScheduledRequest, rng: random.Random) -> ScheduledRequest:
    """The request with a conversation in place of its prompt."""
    thinks = rng.choice((None, False, True, True))
    options = ChatOptions(
        tools=_TOOLS if rng.random() < 0.8 else (),
        template_arguments={} if thinks is None else {"enable_thinking": thinks},
    )
    given = request.params
    params = SamplingParams(
        max_tokens=rng.randint(20, _MOST_TOKENS),
        temperature=given.temperature,
        seed=given.seed,
        logprobs=given.logprobs,
        prompt_logprobs=given.prompt_logprobs,
    )
    # Otherwise reasoning would rarely end within max_tokens.
    end_bias = ((_TOKENIZER.token_to_id("</think>"), 2.5),)
    if options.tools and rng.random() < 0.5:
        options = replace(
            options, tool_choice=rng.choice(("required", "look", "stop")), parallel_tool_calls=rng.random() < 0.5
        )
        params = replace(params, ignore_eos=False, logit_bias=end_bias)
    elif rng.random() < 0.3:
        params = replace(params, ignore_eos=False, logit_bias=end_bias, grammar=Grammar.json_schema(_SCHEMA))
    else:
        others = rng.sample(CHAT_PIECES[_WHOLE_PIECES:], rng.randint(1, 4))
        pieces = tuple(_TOKENIZER.encode(text).ids[0] for text in (*CHAT_PIECES[:_WHOLE_PIECES], *others))
        params = replace(params, ignore_eos=True, logit_bias=(), allowed_token_ids=pieces)
    messages = (*(_HISTORY if rng.random() < 0.4 else ()), Message("user", rng.choice(("go on", "a band, the end"))))
    pause_s = min(request.read_pause_s, _MOST_READ_S / _MOST_TOKENS)
    chat = PlannedChat(messages=messages, options=options)
    return replace(request, prompt=(), text="", chat=chat, params=params, read_pause_s=pause_s)


def render_chat(
    tokenizer: ModelTokenizer, chat: PlannedChat, params: SamplingParams
) -> tuple[tuple[int, ...], SamplingParams, AnswerForm]:
    """The prompt of a chat, its parameters with the grammar of its calls, and how its answer is read."""
    built = build_request(None, None, chat.messages, params, None, "chat", chat.options)
    conversation = read_conversation(built.messages)
    token_ids, end = tokenizer._encode_chat(conversation, 10_000, float("inf"))
    form = answer_form(model_form(AUTO, AUTO, tokenizer.chat_template), conversation, end)
    grammar = answer_grammar(form, conversation, params.grammar, tokenizer.backend.token_to_id)
    return tuple(token_ids), replace(params, grammar=grammar), form


@dataclass(slots=True)
class _Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments."""

    def take(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCall():
                    self.calls.append((part.name, part.arguments))


class ChatReader:
    """Reads an answer from the server-sent events that the gateway's formatter writes for it."""

    def __init__(self, chat: PlannedChat, form: AnswerForm) -> None:
        """form: the form that the router should send."""
        self.chat = chat
        self.form = form
        self.told = form
        """The form that the stream had with the newest chunk."""
        self.so_far = _Read()
        self.finish_reason: str | None = None
        asked = ParsedRequest(model=None, prompts=(chat.messages,), params=SamplingParams(), stream=True)
        self._format = ChatFormat(asked, [ShownPrompt()], "chat", "simulated", 0)

    def read(self, chunk: Chunk, form: AnswerForm) -> None:
        """Reads a chunk. form: as the stream has it."""
        self.told = form
        for event in self._format.events(0, chunk, 0, form):
            (choice,) = json.loads(event.removeprefix(b"data: "))["choices"]
            delta, so_far = choice["delta"], self.so_far
            so_far.content += delta.get("content") or ""
            so_far.reasoning += delta.get("reasoning_content") or ""
            calls = [call["function"] for call in delta.get("tool_calls", ())]
            so_far.calls += [(call["name"], call["arguments"]) for call in calls]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def answer_violations(reader: ChatReader, text: str, finish: FinishReason | None) -> Iterator[str]:
    """What is wrong with what was read of an answer. text: all of it that arrived."""
    # A request that is cancelled before a router accepts it gets no form.
    if text and reader.told != reader.form:
        yield f"the answer was to be read as {reader.told}, not {reader.form}"
    parser, expected = reader.form.parser(), _Read()
    expected.take([*parser.feed(text), *(parser.close() if finish is not None else ())])
    if reader.so_far != expected:
        yield f"read {reader.so_far} of {text!r}, not {expected}"
    if finish is FinishReason.STOP and reader.chat.options.tool_choice != "auto":
        yield from _call_violations(reader)


def _call_violations(reader: ChatReader) -> Iterator[str]:
    choice, calls = reader.chat.options.tool_choice, reader.so_far.calls
    if not calls or reader.finish_reason != "tool_calls" or reader.so_far.content:
        yield f"no calls alone, which were required: {reader.so_far}, {reader.finish_reason}"
    if len(calls) > 1 and not reader.chat.options.parallel_tool_calls:
        yield f"{len(calls)} calls, where one was allowed"
    for name, arguments in calls:
        allowed = {"look": range(_LARGEST + 1), "stop": (1, 23)}[name]
        if (choice not in ("required", name)) or json.loads(arguments)["n"] not in allowed:
            yield f"a call of {name} with {arguments}"
