"""Tool calls and reasoning in answers: the parts, for every split of the text."""

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.parsers.answer import TOOL_PARSERS, AnswerForm, detected_reasoning_parser, detected_tool_parser
from kaveri.parsers.parts import Content, Part, Reasoning, ToolCall

CALL = '{"name": "look", "arguments": {"at": "the \\"sky\\" {", "times": [1, 2]}}'
LOOK = ToolCall("look", '{"at": "the \\"sky\\" {", "times": [1, 2]}')
NO_CALLS = [
    f"<tool_call>{text}</tool_call>"
    for text in ('{"name": "g"}', '{"name": "f", "args": {}}', '{"name": "f", "arguments": {"x": NaN}}')
]
MARKED = f"<tool_call>{CALL}</tool_call>"
WRONG = '<tool_call>{"name": "g", "arguments": [1]}</tool_call>'
LLAMA = '{"name": "look", "parameters": {"at": "x"}}'
# Of which answers are made: markers, their beginnings, calls, malformed calls, and text.
PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "<tool_",
        "</th",
        "<",
        ">",
        ";",
        "\n",
        " ",
    ),
    *(
        "\n\n",
        "\n" * 40,
        " " * 70,
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        "a",
        "text",
        "ü🙂",
        CALL,
        f"<tool_call>\n{CALL}\n</tool_call>",
    ),
    *(LLAMA, f"[{LLAMA},{LLAMA}]", '{"name": 3}', '{"name": "f", "arguments": "{}"}', '{"name": "g"}', "null"),
)


def parsed(pieces: Sequence[str], tools: str = "", reasoning: str = "", *, has_begun: bool = False) -> list[Part]:
    """Return the parts, with neighbours of one kind joined."""
    parser = AnswerForm(tools, reasoning, has_begun).parser()
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.close()]:
        if found and isinstance(part, Reasoning) and isinstance(found[-1], Reasoning):
            found[-1] = Reasoning(found[-1].text + part.text)
        elif found and isinstance(part, Content) and isinstance(found[-1], Content):
            found[-1] = Content(found[-1].text + part.text)
        else:
            found.append(part)
    return found


@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.integers(0, 2**32),
    tools=st.sampled_from(["", *TOOL_PARSERS.own]),
    reasoning=st.sampled_from(["", "think"]),
    has_begun=st.booleans(),
)
def test_any_split_gives_the_parts_of_the_whole(
    pieces: list[str], cuts: int, tools: str, reasoning: str, has_begun: bool
) -> None:
    text, rng = "".join(pieces), random.Random(cuts)
    whole = parsed([text], tools, reasoning, has_begun=has_begun)
    assert parsed(list(text), tools, reasoning, has_begun=has_begun) == whole
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randrange(6)))
    split = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parsed(split, tools, reasoning, has_begun=has_begun) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        # Nothing is lost or doubled but the markers of the reasoning, and white space before the first.
        shown = "".join(part.text for part in whole if not isinstance(part, ToolCall))
        if any(isinstance(part, Reasoning) for part in whole) or has_begun:
            text = text.replace("<think>", "").replace("</think>", "")
            shown = shown.replace("<think>", "").replace("</think>", "")
        assert shown == text or shown == text.lstrip() or reasoning


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", [LOOK]),
        (f"Let me see.\n{MARKED}\n<tool_call>\n{CALL}</tool_call>", [Content("Let me see."), LOOK, LOOK]),
        (f"a {MARKED} b", [Content("a"), LOOK, Content(" b")]),
        ("<tool_call>\nnot JSON\n</tool_call>", [Content("<tool_call>\nnot JSON\n</tool_call>")]),
        (f"<tool_call>{CALL}", [Content(f"<tool_call>{CALL}")]),
        ("1 < 2 <tool", [Content("1 < 2 <tool")]),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', [ToolCall("g", "{}")]),
        *((text, [Content(text)]) for text in NO_CALLS),
        (WRONG, [Content(WRONG)]),
    ],
)  # fmt: skip
def test_calls_of_hermes_and_qwen(text: str, parts: list[Part]) -> None:
    assert parsed([text], "hermes") == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LLAMA, [ToolCall("look", '{"at": "x"}')]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}\n", [ToolCall("look", '{"at": "x"}')] * 2),
        (f"[{LLAMA}, {LLAMA}]", [ToolCall("look", '{"at": "x"}')] * 2),
        (f"{LLAMA} and so", [ToolCall("look", '{"at": "x"}'), Content(" and so")]),
        (f"Sure: {LLAMA}", [Content(f"Sure: {LLAMA}")]),
        ('{"answer": 42}', [Content('{"answer": 42}')]),
        ('{"name": "Ann", "age": 5}', [Content('{"name": "Ann", "age": 5}')]),
        ('{"name": "look", "para', [Content('{"name": "look", "para')]),
        ("[]", [Content("[]")]),
        ("", []),
    ],
)
def test_calls_of_llama(text: str, parts: list[Part]) -> None:
    assert parsed([text], "llama3_json") == parts


@pytest.mark.parametrize(
    ("text", "has_begun", "parts"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, [Reasoning("\nhm\n"), Content("\n\nyes")]),
        ("hm</think>yes", True, [Reasoning("hm"), Content("yes")]),
        ("yes", False, [Content("yes")]),
        ("yes <think>no</think>", False, [Content("yes <think>no</think>")]),
        ("<think>cut", False, [Reasoning("cut")]),
        ("<think></think>yes</think>", False, [Content("yes</think>")]),
        ("<thin", False, [Content("<thin")]),
        ("<think>cut</thi", False, [Reasoning("cut</thi")]),
    ],
)
def test_reasoning_comes_apart(text: str, has_begun: bool, parts: list[Part]) -> None:
    assert parsed([text], "", "think", has_begun=has_begun) == parts


def test_calls_within_the_reasoning_are_none() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    assert parsed([f"<think>{call}</think>{call}"], "hermes", "think") == [Reasoning(call), LOOK]


def test_a_long_answer_takes_time_in_proportion_to_its_length() -> None:
    # Steps, not seconds: each character is looked at a bounded number of times.
    long = json.dumps({"name": "f", "arguments": {"x": "{[\\" * 20000}})
    (call,) = parsed(
        [f"<tool_call>{long}</tool_call>"[start : start + 3] for start in range(0, len(long) + 23, 3)], "hermes"
    )
    assert isinstance(call, ToolCall)
    (call,) = parsed([long[start : start + 3] for start in range(0, len(long), 3)], "llama3_json")
    assert isinstance(call, ToolCall)


def test_parsers_are_found_by_the_chat_template() -> None:
    assert detected_tool_parser("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detected_tool_parser('{% if tools %}{"name": ..., "parameters": ...}{% endif %}') == "llama3_json"
    assert detected_tool_parser("{% if tools %}[TOOL_CALLS]{% endif %}") == ""
    assert detected_tool_parser("<tool_call>") == ""
    assert detected_reasoning_parser("{{ content.split('</think>') }}") == "think"
    assert detected_reasoning_parser("{{ content }}") == ""
