"""Decides how the answer to a conversation is read, and what grammar it must match. Pure."""

import re
from collections.abc import Callable
from dataclasses import replace

from kaveri.domain.grammar import Grammar, GrammarKind
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.parsers.answer import (
    AUTO,
    NONE,
    THINK,
    TOOL_PARSERS,
    AnswerForm,
    detected_reasoning_parser,
    detected_tool_parser,
)
from kaveri.parsers.reasoning import THINK_BEGIN, THINK_END
from kaveri.parsers.tools import inline_schema
from kaveri.text.chat_template import ChatTemplate
from kaveri.text.conversation import Conversation

_MARKER_RULE = re.compile(r'^(?P<rule>call\w*): "(?P<text><[^"\\]+>)"$', re.MULTILINE)
"""A rule of a ToolParser's grammar that is one literal in angle brackets."""


def model_form(tool_parser: str, reasoning_parser: str, template: ChatTemplate | None) -> AnswerForm:
    """Return how a model's answers are read. tool_parser, reasoning_parser: a name, AUTO (by the chat template) or
    NONE. Raises ConfigError, naming the flag."""
    source = "" if template is None else template.source
    if tool_parser == AUTO:
        tool_parser = detected_tool_parser(source)
    elif tool_parser != NONE:
        try:
            TOOL_PARSERS.known(tool_parser)
        except ValueError as error:
            raise ConfigError("--tool-parser", f"{error}; or {AUTO}, or {NONE}") from error
    if reasoning_parser == AUTO:
        reasoning_parser = detected_reasoning_parser(source)
    elif reasoning_parser not in (NONE, THINK):
        raise ConfigError("--reasoning-parser", f"is {reasoning_parser!r}; it must be {THINK}, {AUTO} or {NONE}")
    return AnswerForm("" if tool_parser == NONE else tool_parser, "" if reasoning_parser == NONE else reasoning_parser)


def answer_form(model: AnswerForm, conversation: Conversation, prompt_end: str) -> AnswerForm:
    """Return how the answer to a conversation is read. model: how the model's answers are read. prompt_end: end of the
    rendered prompt. Raises InvalidArgument if calls are required but the model has no tool parser."""
    tool_parser = model.tool_parser if conversation.tools else ""
    if conversation.wanted and not tool_parser:
        limit = "left out or auto: the router has no tool parser for this model (--tool-parser)"
        raise InvalidArgument("tool_choice", "required", limit)
    names = tuple(tool.name for tool in conversation.known) if tool_parser else ()
    end = prompt_end.rstrip()
    has_begun = end.endswith(THINK_BEGIN)
    if conversation.continues:
        last = conversation.turns[-1]
        text = "".join(last.parts) or last.content
        has_begun = text.rpartition(THINK_END)[2].lstrip().startswith(THINK_BEGIN)
    if not model.reasoning_parser or end.endswith(THINK_END) or (conversation.continues and not has_begun):
        # The template has closed the reasoning, as for enable_thinking = false.
        return AnswerForm(tool_parser, tool_names=names)
    return AnswerForm(tool_parser, model.reasoning_parser, has_begun, names)


def answer_grammar(
    form: AnswerForm, conversation: Conversation, grammar: Grammar | None, token_id_of: Callable[[str], int | None]
) -> Grammar | None:
    """Return the grammar of the answer to a conversation; None for any text. grammar: the request's own. token_id_of:
    returns the id of a token of the model's vocabulary. Raises InvalidArgument."""
    if conversation.wanted:
        if grammar is not None:
            raise InvalidArgument("tool_choice", "required", "left out or auto if the request has a grammar")
        grammar = Grammar.lark("start: calls\n" + _calls(form, conversation, token_id_of))
    elif grammar is not None and form.tool_parser and grammar.kind is GrammarKind.JSON_SCHEMA:
        # An answer is a call, or what the schema says.
        schema = f"answer: %json {inline_schema(grammar.source)}"
        grammar = Grammar.lark(f"start: calls | answer\n{schema}\n{_calls(form, conversation, token_id_of)}")
    if grammar is None or not form.reasoning_parser:
        return grammar
    begin_id, end_id = token_id_of(THINK_BEGIN), token_id_of(THINK_END)
    if end_id is None or (begin_id is None and not form.reasoning_has_begun):
        limit = f"left out: {THINK_BEGIN} and {THINK_END} are no tokens of this model's vocabulary"
        raise InvalidArgument("params.grammar", "set", limit)
    reasoning_begin_ids = () if form.reasoning_has_begun or begin_id is None else (begin_id,)
    return replace(grammar, reasoning_end_ids=(end_id,), reasoning_begin_ids=reasoning_begin_ids)


def _calls(form: AnswerForm, conversation: Conversation, token_id_of: Callable[[str], int | None]) -> str:
    tools = conversation.wanted or conversation.known
    rules = str(TOOL_PARSERS.load(form.tool_parser)(form.tool_names).grammar(tools, several=conversation.several))

    def marker(found: re.Match[str]) -> str:
        token_id = token_id_of(found["text"])
        return found[0] if token_id is None else f"{found['rule']}: <[{token_id}]>"

    return _MARKER_RULE.sub(marker, rules)
