"""Tool calls and reasoning in answers: the parts, for every split of the text."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kaveri.parsers import json_calls
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
WITH_MARKER = '<tool_call>\n{"name": "f", "arguments": {"t": "a</tool_call>b"}}\n</tool_call>'
OPEN_STRING = '<tool_call>{"name": "g'
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
        *(WITH_MARKER, OPEN_STRING, f"{OPEN_STRING}</tool_call>"),
    ),
    *(LLAMA, f"[{LLAMA},{LLAMA}]", '{"name": 3}', '{"name": "f", "arguments": "{}"}', '{"name": "g"}', "null"),
)


REASONING = ("", "", "<think>hm</think>", " \n<think>hm {</think>\n", f"<think>{MARKED}</think>", "hm</think>")


def parsed(
    pieces: Sequence[str], tools: str = "", reasoning: str = "", *, has_begun: bool = False, names: Sequence[str] = ()
) -> list[Part]:
    """Return the parts, with neighbours of one kind joined."""
    parser = AnswerForm(tools, reasoning, has_begun, tuple(names)).parser()
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.close()]:
        if found and isinstance(part, Reasoning) and isinstance(found[-1], Reasoning):
            found[-1] = Reasoning(found[-1].text + part.text)
        elif found and isinstance(part, Content) and isinstance(found[-1], Content):
            found[-1] = Content(found[-1].text + part.text)
        else:
            found.append(part)
    return found


def check_accounted(text: str, parts: Sequence[Part], tools: str, reasoning: str, *, has_begun: bool) -> None:
    """Check that the parts, in order, account for each character of the text once: as reasoning, content, or markup.
    Does not check that every call is found."""
    position, left = 0, list(parts)
    begin = re.compile("" if has_begun else r"\s{0,64}<think>").match(text)
    if reasoning and begin:
        thought, marker, _ = text[begin.end() :].partition("</think>")
        position = begin.end() + len(thought) + len(marker)
        if thought:
            assert left.pop(0) == Reasoning(thought)
    while left:
        if isinstance(left[0], Content):
            content = left.pop(0).text
            assert text.startswith(content, position)
            position += len(content)
        else:
            calls, position = raw_calls(text, position, tools)
            assert left[: len(calls)] == calls
            del left[: len(calls)]
    # Only markup after the last call may be left.
    assert re.fullmatch(r"\s*;?\s*" if parts and isinstance(parts[-1], ToolCall) else "", text[position:])
    assert tools != "hermes" or position == len(text)


def raw_calls(text: str, position: int, tools: str) -> tuple[list[Part], int]:
    """Decode the JSON of the next calls, by json's own decoder. Returns the calls, and where their markup ends."""
    before = r"\s*<tool_call>\s*" if tools == "hermes" else r"\s*(?:;|<\|python_tag\|>)?\s*"
    markup = re.compile(before).match(text, position)
    assert markup
    value, position = json.JSONDecoder().raw_decode(text, markup.end())
    if tools == "hermes":
        markup = re.compile(r"\s*</tool_call>").match(text, position)
        assert markup
        position = markup.end()
    calls: list[Part] = []
    for call in value if isinstance(value, list) else [value]:
        arguments = call.get("arguments", call.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append(ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls, position


@given(
    begin=st.sampled_from(REASONING),
    pieces=st.lists(st.sampled_from(PIECES), max_size=14),
    cuts=st.integers(0, 2**32),
    tools=st.sampled_from(["", *TOOL_PARSERS.own]),
    reasoning=st.sampled_from(["", "think"]),
    has_begun=st.booleans(),
    names=st.sampled_from([(), ("look",)]),
)
@example("<think>hm</think>", ["a", MARKED, "\n", MARKED, " ", WRONG], 1, "hermes", "think", False, ())
@example("hm</think>", ["a", WITH_MARKER, OPEN_STRING, "</tool_call>", MARKED], 2, "hermes", "think", True, ())
@example("<think>hm</think>", ["\n", LLAMA, ";", f"[{LLAMA},{LLAMA}]", "a"], 3, "llama3_json", "think", False, ())
@example("<think>hm</think>", ["\n", CALL, "; ", CALL, ";", "\n"], 4, "json", "think", False, ("look",))
def test_any_split_gives_the_parts_of_the_whole(
    begin: str, pieces: list[str], cuts: int, tools: str, reasoning: str, has_begun: bool, names: tuple[str, ...]
) -> None:
    text, rng = "".join([begin, *pieces]), random.Random(cuts)
    whole = parsed([text], tools, reasoning, has_begun=has_begun, names=names)
    check_accounted(text, whole, tools, reasoning, has_begun=has_begun)
    assert parsed(list(text), tools, reasoning, has_begun=has_begun, names=names) == whole
    places = sorted(rng.randint(0, len(text)) for _ in range(rng.randrange(6)))
    split = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert parsed(split, tools, reasoning, has_begun=has_begun, names=names) == whole


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", [LOOK]),
        (f"Let me see.\n{MARKED}\n<tool_call>\n{CALL}</tool_call>", [Content("Let me see."), LOOK, LOOK]),
        (f"a {MARKED} b", [Content("a"), LOOK, Content(" b")]),
        ("<tool_call>\nnot JSON\n</tool_call>", [Content("<tool_call>\nnot JSON\n</tool_call>")]),
        (f"a \n<tool_call>{CALL}", [Content(f"a \n<tool_call>{CALL}")]),
        ("1 < 2 <tool", [Content("1 < 2 <tool")]),
        ('<tool_call>{"name": "g", "arguments": {}}</tool_call>', [ToolCall("g", "{}")]),
        *((text, [Content(text)]) for text in NO_CALLS),
        (WRONG, [Content(WRONG)]),
        (WITH_MARKER, [ToolCall("f", '{"t": "a</tool_call>b"}')]),
        ('<tool_call>{"name": "f", "arguments": {"t": "\\\\"}}</tool_call>', [ToolCall("f", '{"t": "\\\\"}')]),
        (f"{WRONG}{MARKED}", [Content(WRONG), LOOK]),
        (
            f"{OPEN_STRING}</tool_call><tool_call>{LLAMA}</tool_call>",
            [Content(f"{OPEN_STRING}</tool_call>"), ToolCall("look", '{"at": "x"}')],
        ),
        (f"{OPEN_STRING}</tool_call>{MARKED}", [Content(f"{OPEN_STRING}</tool_call>"), LOOK]),
        (f"Write <tool_call> first. {MARKED}", [Content("Write <tool_call> first."), LOOK]),
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
        (f"{LLAMA}; [{LLAMA}]", [ToolCall("look", '{"at": "x"}'), Content(f"; [{LLAMA}]")]),
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


def test_text_behind_a_marker_that_begins_no_call_is_not_held_back() -> None:
    parser = AnswerForm("hermes").parser()
    shown = [part for piece in ("The <tool_call> ", "marker begins a call. ") for part in parser.feed(piece)]
    assert "".join(part.text for part in shown if isinstance(part, Content)).endswith("begins a call.")


def test_malformed_call_is_released_at_its_first_fault() -> None:
    parser = AnswerForm("hermes").parser()
    for text in ("<tool_call>a<b>", "<tool_call>a\\b", f"{OPEN_STRING}\n"):
        assert "".join(part.text for part in parser.feed(text) if isinstance(part, Content)) == text.rstrip("\n")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "-Infinity"])
@pytest.mark.parametrize("arguments", ['{"x": [%s]}', json.dumps('{"x": %s}')])
def test_call_with_a_number_that_is_not_finite_is_content(number: str, arguments: str) -> None:
    call = '{"name": "f", "arguments": ' + arguments % number + "}"
    assert parsed([call], "json") == [Content(call)]
    marked = f"<tool_call>{call}</tool_call>"
    assert parsed([marked], "hermes") == [Content(marked)]


def test_call_that_is_nested_too_deeply_is_content() -> None:
    for depth in (*range(100, 1100), 200_000):
        call = '{"name": "f", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"
        (part,) = parsed([call], "json")
        assert isinstance(part, ToolCall) or part == Content(call)
    assert part == Content(call)


@pytest.mark.parametrize("tools", ["llama3_json", "json"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (LLAMA, [ToolCall("look", '{"at": "x"}')]),
        ('{"name": "Ann", "arguments": {}}', [Content('{"name": "Ann", "arguments": {}}')]),
        (f'[{LLAMA}, {{"name": "Ann", "arguments": {{}}}}]', None),
    ],
)
def test_answer_that_is_json_is_a_call_only_of_an_offered_tool(tools: str, text: str, parts: list[Part] | None) -> None:
    assert parsed([text], tools, names=["see", "look"]) == (parts or [Content(text)])


def test_marked_call_of_an_unknown_tool_is_a_call() -> None:
    assert parsed([MARKED], "hermes", names=["other"]) == [LOOK]


class Counted(str):
    """Text that counts the characters that its methods copy or search."""

    __slots__ = ()
    work = 0

    def _copied(self, text: str) -> "Counted":
        Counted.work += len(text)
        return Counted(text)

    def __getitem__(self, key: SupportsIndex | slice) -> "Counted":
        return self._copied(super().__getitem__(key))

    def __add__(self, other: str) -> "Counted":
        return self._copied(super().__add__(other))

    def __radd__(self, other: str) -> "Counted":
        return self._copied(other + str(self))

    def lstrip(self, *characters: Any) -> "Counted":
        return self._copied(super().lstrip(*characters))

    def rstrip(self, *characters: Any) -> "Counted":
        return self._copied(super().rstrip(*characters))

    def partition(self, separator: str) -> "tuple[Counted, Counted, Counted]":
        before, found, after = super().partition(separator)
        return self._copied(before), self._copied(found), self._copied(after)

    def find(self, wanted: str, start: Any = 0, *end: Any) -> int:
        found = super().find(wanted, start, *end)
        Counted.work += (len(self) if found < 0 else found) - start
        return found


class CountedPattern:
    """A pattern that counts the characters that it passes."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def finditer(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        for found in self._pattern.finditer(text, start):
            Counted.work += found.end() - start
            start = found.end()
            yield found
        Counted.work += len(text) - start


BEGIN, END = "<tool_call>", "</tool_call>"
# Answers that grow with a number. Each must take work in proportion to its length.
LONG_ANSWERS = {
    "many calls": ("hermes", lambda n: f"{MARKED}\n" * n),
    "many values": ("llama3_json", lambda n: f"{LLAMA}; " * n),
    "malformed calls": ("hermes", lambda n: WRONG * n),
    "open strings": ("hermes", lambda n: f"{OPEN_STRING}{END}" * n),
    "begin markers": ("hermes", lambda n: BEGIN * n),
    "open string with markers": ("hermes", lambda n: f'{BEGIN}{{"name": "' + f"{BEGIN}{END}" * n),
    "escaped quotes": ("hermes", lambda n: f'{BEGIN}\\"{END}' * n),
    "turned strings": ("hermes", lambda n: f'{BEGIN}"a{END}" ' * n),
    "string of markers": (
        "hermes",
        lambda n: f'{BEGIN}{{"name": "f", "arguments": {{"t": "{f"{BEGIN}{END}" * n}"}}}}{END}',
    ),
    "escapes": ("json", lambda n: json.dumps({"name": "f", "arguments": {"x": "{[\\" * n}})),
    "nested lists": ("json", lambda n: "[" * n),
    "white space": ("llama3_json", lambda n: f"{LLAMA};" + " \n" * n),
    "spaced marker": ("hermes", lambda n: (" " * 60 + "<tool_") * n),
}


@pytest.mark.parametrize("shape", LONG_ANSWERS)
@pytest.mark.parametrize("piece_length", [1, 7, None])
def test_long_answer_takes_work_in_proportion_to_its_length(
    shape: str, piece_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts characters that are copied, searched or decoded. Does not count copies by str.join of pieces."""
    tools, answer = LONG_ANSWERS[shape]
    monkeypatch.setattr(json_calls, "_STOPS", CountedPattern(json_calls._STOPS))
    decode = json_calls._decode

    def counted(text: str) -> Any:
        Counted.work += len(text)
        return decode(text)

    monkeypatch.setattr(json_calls, "_decode", counted)

    def work(count: int) -> float:
        """Return the work for each character."""
        text, Counted.work = answer(count), 0
        length = piece_length or len(text)
        parser = AnswerForm(tools).parser()
        for start in range(0, len(text), length):
            assert all(parser.feed(Counted(text[start : start + length])))
        assert all(parser.close())
        return Counted.work / len(text)

    few, many = work(200), work(1600)
    assert many < few * 1.2 + 1, f"{few:.1f} of {many:.1f} characters for each"


def test_parsers_are_found_by_the_chat_template() -> None:
    assert detected_tool_parser("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert detected_tool_parser('{% if tools %}{"name": ..., "parameters": ...}{% endif %}') == "llama3_json"
    assert detected_tool_parser("{% if tools %}[TOOL_CALLS]{% endif %}") == ""
    assert detected_tool_parser("<tool_call>") == ""
    # As of Qwen3-Coder and GLM 4.5.
    qwen_coder = (
        "{{ tools }}<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function></tool_call>"
    )
    glm = (
        "{{ tools }}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>"
    )
    for template in (qwen_coder, glm, f'{qwen_coder}{{"parameters": 1}}'):
        assert detected_tool_parser(template) == ""
    qwen3 = '{{ tools }}<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
    assert detected_tool_parser(qwen3) == "hermes"
    assert detected_reasoning_parser("{{ content.split('</think>') }}") == "think"
    assert detected_reasoning_parser("{{ content }}") == ""
