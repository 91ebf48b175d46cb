"""Conformance tests for tool parsers: subclass ToolParserConformance and provide the fixtures `make` and `examples`.
Not verified: that parsing takes linear time.

    class TestMyCalls(ToolParserConformance):
        @pytest.fixture
        def make(self):
            return MyCalls

        @pytest.fixture
        def examples(self):
            return {'[look {"at": "x"}]': (ToolCall("look", '{"at": "x"}'),), "[look": (Content("[look"),)}
"""

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence

from kaveri.domain.grammar import Grammar
from kaveri.parsers.parts import Content, Part, Tool, ToolCall, ToolParser
from kaveri.text.grammars import compile_grammar, grammar_tokenizer

Make = Callable[[Collection[str]], ToolParser]
_TOOLS = (
    Tool("look", {"properties": {"at": {"type": "string", "maxLength": 4}}, "required": ["at"]}),
    Tool("wait", {"properties": {"s": {"type": "integer"}}, "required": ["s"], "additionalProperties": False}),
)
_NAMES = tuple(tool.name for tool in _TOOLS)
_SPLITS = 40
_ANSWERS = 30
_MOST_BYTES = 2000


def parse(parser: ToolParser, pieces: Sequence[str]) -> list[Part]:
    """Return the parts of a text that comes in pieces, with neighbouring Content joined."""
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.close()]:
        if found and isinstance(part, Content) and isinstance(last := found[-1], Content):
            found[-1] = Content(last.text + part.text)
        else:
            found.append(part)
    return found


class ToolParserConformance:
    def test_examples_are_parsed(self, make: Make, examples: Mapping[str, Sequence[Part]]) -> None:
        for text, parts in examples.items():
            assert parse(make(_NAMES), [text]) == list(parts), text

    def test_any_split_gives_the_parts_of_the_whole(self, make: Make, examples: Mapping[str, Sequence[Part]]) -> None:
        rng = random.Random(0)
        for text in (*examples, "".join(examples), "no call", ""):
            whole = parse(make(_NAMES), [text])
            assert parse(make(_NAMES), list(text)) == whole, text
            for _ in range(_SPLITS):
                cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
                pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
                assert parse(make(_NAMES), pieces) == whole, pieces

    def test_text_without_calls_is_content_unchanged(self, make: Make, examples: Mapping[str, Sequence[Part]]) -> None:
        texts = ["plain text", " \n", *(text for text, parts in examples.items() if not _has_calls(parts))]
        for text in texts:
            assert parse(make(_NAMES), [text]) == [Content(text)]

    def test_answers_of_its_grammar_are_calls_of_the_tools(self, make: Make) -> None:
        for several in (False, True):
            grammar = Grammar.lark("start: calls\n" + make(_NAMES).grammar(_TOOLS, several=several))
            for seed in range(_ANSWERS):
                text = _drawn(grammar, random.Random(seed))
                calls = parse(make(_NAMES), [text])
                assert _has_calls(calls), text
                assert several or len(calls) == 1, text
                for call in calls:
                    assert isinstance(call, ToolCall), text
                    arguments = json.loads(call.arguments)
                    kind, key = {"look": (str, "at"), "wait": (int, "s")}[call.name]
                    assert isinstance(arguments[key], kind), text


def _has_calls(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, ToolCall) for part in parts)


def _drawn(grammar: Grammar, rng: random.Random) -> str:
    """Draw a random text of the grammar, byte by byte."""
    tokenizer = grammar_tokenizer(None, 256, frozenset())
    matcher, text = compile_grammar(tokenizer, grammar), b""
    while not (matcher.is_accepting() and rng.random() < 0.5):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [each for each in range(256) if mask >> each & 1]
        if not allowed:
            break
        closing = [each for each in allowed if each in b'"}']
        text += bytes([rng.choice(closing if closing and rng.random() < 0.3 else allowed)])
        matcher.consume_token(text[-1])
        assert len(text) < _MOST_BYTES, text
    return text.decode()
