"""Kaveri's own tool parsers keep the rules that those of plug-ins must keep."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kaveri.parsers.answer import TOOL_PARSERS
from kaveri.parsers.parts import Content, Part, ToolCall
from kaveri.testing.parser_conformance import ToolParserConformance

LOOK = ToolCall("look", '{"at": "x"}')


class TestHermes(ToolParserConformance):
    @pytest.fixture
    def make(self) -> Callable[..., Any]:
        return TOOL_PARSERS.load("hermes")

    @pytest.fixture
    def examples(self) -> Mapping[str, Sequence[Part]]:
        call = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
        return {
            call: [LOOK],
            f"First this. {call}\n{call} Then that.": [Content("First this."), LOOK, LOOK, Content(" Then that.")],
            "<tool_call>{}</tool_call>": [Content("<tool_call>{}</tool_call>")],
            '<tool_call>{"name": "lo': [Content('<tool_call>{"name": "lo')],
        }


class _Leading(ToolParserConformance):
    prefix, key = "", "arguments"

    @pytest.fixture
    def examples(self) -> Mapping[str, Sequence[Part]]:
        call = f'{{"name": "look", "{self.key}": {{"at": "x"}}}}'
        return {
            f"{self.prefix}{call}": [LOOK],
            f"{self.prefix}{call}; {call}": [LOOK, LOOK],
            call.replace("look", "pay"): [Content(call.replace("look", "pay"))],
            '{"name": "look"}': [Content('{"name": "look"}')],
            '{"name": "lo': [Content('{"name": "lo')],
        }


class TestLlama(_Leading):
    prefix, key = "<|python_tag|>", "parameters"

    @pytest.fixture
    def make(self) -> Callable[..., Any]:
        return TOOL_PARSERS.load("llama3_json")


class TestJson(_Leading):
    @pytest.fixture
    def make(self) -> Callable[..., Any]:
        return TOOL_PARSERS.load("json")
