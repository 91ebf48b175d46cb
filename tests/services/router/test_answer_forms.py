"""How answers to conversations are read, and what grammar they must match."""

import json
from typing import Any

import pytest

from kaveri.domain.grammar import Grammar, GrammarKind
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.parsers.answer import AnswerForm
from kaveri.text.conversation import Conversation, read_conversation
from kaveri.v1 import inference_pb2
from kaveri.wire.messages import form_from_proto, form_to_proto
from services.router.answer_forms import answer_form, answer_grammar, model_form

HERMES = AnswerForm("hermes")
OFFERED = AnswerForm("hermes", tool_names=("look",))
THINKING = AnswerForm("hermes", "think")
SCHEMA = Grammar.json_schema({"type": "object"})
THINK_BEGIN_ID, THINK_END_ID = 76, 77


def asked(**fields: Any) -> Conversation:
    tool = {"type": "function", "function": {"name": "look"}}
    messages = [inference_pb2.Message(role="user", content="hello")]
    return read_conversation(inference_pb2.Messages(messages=messages, **{"tools": json.dumps([tool]), **fields}))


def ids(text: str) -> int | None:
    return {"<think>": THINK_BEGIN_ID, "</think>": THINK_END_ID}.get(text)


def test_parsers_of_flags_are_checked() -> None:
    assert model_form("auto", "auto", None) == AnswerForm()
    assert model_form("hermes", "think", None) == THINKING
    assert model_form("none", "none", None) == AnswerForm()
    with pytest.raises(ConfigError, match="--tool-parser"):
        model_form("no_such_parser", "none", None)
    with pytest.raises(ConfigError, match="--reasoning-parser"):
        model_form("none", "guess", None)


@pytest.mark.parametrize(
    ("end", "reasoning", "begun"),
    [
        ("<|assistant|>", "think", False),
        ("<|assistant|><think>\n", "think", True),
        ("<think>\n\n</think>\n\n", "", False),
    ],
)
def test_the_end_of_the_prompt_says_where_the_reasoning_is(end: str, reasoning: str, begun: bool) -> None:
    assert answer_form(THINKING, asked(), end) == AnswerForm("hermes", reasoning, begun, ("look",))
    assert answer_form(THINKING, asked(continue_final_message=True), end) == OFFERED


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>abc", "think"),
        (" \n<think>", "think"),
        ("<think>abc</think>yes", ""),
        ("The tag <think> begins", ""),
        ("yes", ""),
    ],
)
def test_a_continued_message_says_where_the_reasoning_is(text: str, reasoning: str) -> None:
    messages = [inference_pb2.Message(role="assistant", content=text)]
    conversation = read_conversation(inference_pb2.Messages(messages=messages, continue_final_message=True))
    assert answer_form(THINKING, conversation, "") == AnswerForm("", reasoning, bool(reasoning))


def test_calls_are_looked_for_only_where_there_are_tools() -> None:
    assert answer_form(HERMES, asked(tools=""), "") == AnswerForm()
    assert answer_form(HERMES, asked(), "") == OFFERED
    assert answer_form(AnswerForm(), asked(), "") == AnswerForm()
    assert form_from_proto(form_to_proto(OFFERED)) == OFFERED
    with pytest.raises(InvalidArgument, match="--tool-parser"):
        answer_form(AnswerForm(), asked(tool_required=True), "")


def test_grammar_of_calls_and_of_a_schema() -> None:
    assert answer_grammar(HERMES, asked(), None, ids) is None
    assert answer_grammar(AnswerForm(), asked(tools=""), SCHEMA, ids) == SCHEMA
    required = answer_grammar(HERMES, asked(tool_required=True), None, ids)
    assert required is not None
    assert required.kind is GrammarKind.LARK
    assert required.source.startswith("start: calls\n")
    either = answer_grammar(HERMES, asked(), SCHEMA, ids)
    assert either is not None
    assert either.source.startswith("start: calls | answer\n")
    anything = answer_grammar(HERMES, asked(), Grammar.json_schema(True), ids)
    assert anything is not None
    assert "answer: %json {" in anything.source
    for wrong in (False, [], "[", {"x-guidance": {}}):
        schema = Grammar.json_schema(wrong if isinstance(wrong, str) else json.dumps(wrong))
        with pytest.raises(InvalidArgument, match=r"params\.grammar"):
            answer_grammar(HERMES, asked(), schema, ids)
    with pytest.raises(InvalidArgument, match="tool_choice"):
        answer_grammar(HERMES, asked(tool_required=True), SCHEMA, ids)


def test_markers_of_calls_are_the_tokens_of_the_vocabulary() -> None:
    required = answer_grammar(HERMES, asked(tool_required=True), None, {"<tool_call>": 5, "</tool_call>": 6}.get)
    spelled = answer_grammar(HERMES, asked(tool_required=True), None, ids)
    assert required is not None
    assert spelled is not None
    assert [line for line in required.source.splitlines() if line not in spelled.source.splitlines()] == [
        "call_begin: <[5]>",
        "call_end: <[6]>",
    ]
    # The same text within a schema is not replaced.
    schema = {"properties": {"a": {"const": "<tool_call>"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    either = answer_grammar(HERMES, asked(tools=json.dumps([tool])), SCHEMA, {"<tool_call>": 5}.get)
    assert either is not None
    assert '"<tool_call>"' in either.source


def test_grammar_begins_after_the_reasoning() -> None:
    found = answer_grammar(THINKING, asked(tools=""), SCHEMA, ids)
    assert found is not None
    assert (found.reasoning_end_ids, found.reasoning_begin_ids) == ((THINK_END_ID,), (THINK_BEGIN_ID,))
    begun = answer_grammar(AnswerForm("", "think", True), asked(tools=""), SCHEMA, ids)
    assert begun is not None
    assert (begun.reasoning_end_ids, begun.reasoning_begin_ids) == ((THINK_END_ID,), ())
    with pytest.raises(InvalidArgument, match=r"params\.grammar"):
        answer_grammar(THINKING, asked(tools=""), SCHEMA, lambda _: None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": "["}, "prompt.tools"),
        ({"tools": "{}"}, "prompt.tools"),
        ({"tools": "[1]"}, "prompt.tools[0].type"),
        ({"tools": "[" * 100_000}, "prompt.tools"),
        ({"tools": "x" * 2**19}, "prompt.tools"),
        ({"tools": "", "tool_required": True}, "tool_choice"),
        ({"tool_name": "other"}, "tool_choice"),
        ({"template_arguments": "[]"}, "prompt.template_arguments"),
        ({"template_arguments": '{"messages": []}'}, "prompt.template_arguments.messages"),
        ({"messages": []}, "prompt.messages"),
    ],
)
def test_wrong_conversations_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        asked(**fields) if "messages" not in fields else read_conversation(inference_pb2.Messages(**fields))
    assert caught.value.field == field
