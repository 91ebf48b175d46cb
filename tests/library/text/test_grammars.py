"""Compiled grammars: whatever a model draws within the mask, an answer that ends is what was asked for."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from kaveri.engine.token_rules import TokenRules, tokens_in
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.errors import InvalidArgument
from kaveri.models import resolve_model
from kaveri.text.grammars import Grammars
from tests.support.thinking_model import THINK_ID, write_thinking_model

EOS = frozenset({0})
MOST_TOKENS = 3000
_OBJECT = {"type": "object", "additionalProperties": False}
_STRING: dict[str, Any] = {"type": "string", "maxLength": 12}
_NODE = {
    **_OBJECT,
    "properties": {"name": {"enum": ["a", "b"]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["name", "next"],
}

SCHEMAS: dict[str, Any] = {
    "true": True,
    "any": {},
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null"]},
    "const": {"const": {"a": [1, "x"]}},
    "enum of texts": {"enum": ["red", "green", 'a "quoted" one', "ü"]},
    "enum of all types": {"enum": [1, 2.5, None, True, "x", [1], {"a": 1}]},
    "minimum": {"type": "integer", "minimum": 17},
    "maximum": {"type": "integer", "minimum": -5, "maximum": 3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number in a range": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple of": {"type": "integer", "multipleOf": 7},
    "min length": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern in the middle": {"type": "string", "pattern": "b+c", "maxLength": 9},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "uri": {"type": "string", "format": "uri"},
    "array": {"type": "array", "items": {"type": "integer"}},
    "array of a size": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "empty array": {"type": "array", "maxItems": 0},
    "prefix items": {"type": "array", "prefixItems": [{"type": "integer"}, _STRING], "items": False, "minItems": 2},
    "array of arrays": {"type": "array", "items": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    "object": {"type": "object"},
    "required": {**_OBJECT, "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "optional": {**_OBJECT, "properties": {"a": {"type": "integer"}, "b": _STRING}},
    "some required": {**_OBJECT, "properties": {"a": _STRING, "b": {"type": "null"}}, "required": ["b"]},
    "additional of a type": {"type": "object", "additionalProperties": {"type": "integer"}},
    "additional beside named": {
        "type": "object",
        "properties": {"a": _STRING},
        "additionalProperties": {"type": "boolean"},
    },
    "pattern properties": {**_OBJECT, "patternProperties": {"^x[0-9]$": {"type": "integer"}}},
    "nested": {**_OBJECT, "properties": {"a": {**_OBJECT, "properties": {"b": _STRING}, "required": ["b"]}}},
    "names that need quotes": {**_OBJECT, "properties": {'a "b"\n': {"type": "null"}}, "required": ['a "b"\n']},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]},
    "oneOf of unlike": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "discriminated": {
        "anyOf": [
            {**_OBJECT, "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]},
            {**_OBJECT, "properties": {"kind": {"const": "dog"}, "name": _STRING}, "required": ["kind", "name"]},
        ]
    },
    "definitions": {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
    "draft 7 definitions": {"definitions": {"n": {"enum": ["a"]}}, "$ref": "#/definitions/n"},
    "recursive": {"$defs": {"node": _NODE}, "$ref": "#/$defs/node"},
    "recursive root": {**_OBJECT, "properties": {"child": {"$ref": "#"}}},
    "pydantic": {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 8},
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Age"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "title": "Tags", "default": []},
        },
        "required": ["name"],
    },
    "described": {"$schema": "https://json-schema.org/draft/2020-12/schema", "description": "x", "type": "integer"},
    "examples and default": {"type": "integer", "examples": [1], "default": 2, "readOnly": True},
    "zod": {
        "type": "object",
        "properties": {"kind": {"type": "string", "enum": ["a"]}, "n": {"type": "number"}},
        "required": ["kind", "n"],
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "zod record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {
            "type": "object",
            "propertyNames": {"format": "path"},
            "additionalProperties": _STRING,
        },
    },
    "formats of any text": {
        **_OBJECT,
        "$defs": {"path": {**_STRING, "format": "path"}},
        "properties": {
            "file": {"$ref": "#/$defs/path"},
            "secret": {"anyOf": [{**_STRING, "format": "password"}, {"type": "null"}]},
            "files": {"type": "array", "items": {**_STRING, "format": "file-path"}, "maxItems": 2},
            "folder": {**_STRING, "format": "directory-path"},
            "data": {**_STRING, "format": "binary"},
        },
        "required": ["file", "secret", "files", "folder", "data"],
    },
    "names like keywords": {
        **_OBJECT,
        "properties": {"format": {"const": {"format": "path"}}, "propertyNames": {"enum": [{"propertyNames": {}}]}},
        "required": ["format", "propertyNames"],
    },
    "min properties of named": {**_OBJECT, "properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 1},
    "min properties": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
    "map of maps": {
        "type": "object",
        "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}},
    },
    "unicode": {"enum": ["日本語", "café", "🙂"]},
    "deep": {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"const": 0}}}},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "names of properties": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "names of some": ({"type": "object", "propertyNames": {"type": "string", "enum": ["a"]}}, "propertyNames"),
    "names of none": ({"type": "object", "propertyNames": False}, "propertyNames"),
    "names in definitions": (
        {"$defs": {"x": {"propertyNames": {"minLength": 1}}}, "type": "array", "items": {"$ref": "#/$defs/x"}},
        "propertyNames",
    ),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "unknown format": ({"type": "string", "format": "telephone"}, "format"),
    "base64": ({"type": "string", "format": "byte"}, "format"),
    "reference to a URI": ({"type": "string", "format": "uri-reference"}, "format"),
    "unknown type": ({"type": "text"}, "type"),
    "unknown reference": ({"$ref": "#/$defs/none"}, "none"),
    "remote reference": ({"$ref": "https://example.com/schema"}, "example.com"),
    "contradiction": ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
    "nothing": (False, "no text matches it"),
    "itself": ({"$ref": "#"}, "no text matches it"),
    "own options": ({"type": "string", "x-guidance": {"lenient": True}}, "x-guidance"),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars("kaveri-tiny", 1536, EOS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{resolve_model('kaveri-tiny')}/tokenizer.json")


def answers(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, count: int) -> Iterator[str]:
    """Draw answers of a model that thinks of nothing, and likes to close what is open."""
    closing = [token_id for token_id in range(1536) if set(tokenizer.decode([token_id])) & set('"]}@')]
    for seed in range(count):
        rng = random.Random(seed)
        history: list[int] = []
        rules = TokenRules(ResolvedParams(grammar=grammar), history, 0, 1536, EOS, grammars)
        while not history or history[-1] not in EOS:
            assert len(history) < MOST_TOKENS, f"no end of {tokenizer.decode(history)[:200]}"
            bits = rules.changes(len(history)).allowed
            assert bits is not None
            allowed = tokens_in(bits, 1536)
            wanted = [token_id for token_id in (*EOS, *closing) if allowed[token_id]]
            choices = wanted if wanted and rng.random() < 0.5 else np.flatnonzero(allowed).tolist()
            history.append(rng.choice(choices))
        yield tokenizer.decode(history[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_ends_is_json_of_the_schema(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    for text in answers(grammars, tokenizer, Grammar.json_schema(schema), 6):
        validator.validate(json.loads(text))
        assert "\n" not in text


def test_about_sixty_kinds_of_schema_are_tried() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(grammars: Grammars, name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InvalidArgument) as caught:
        grammars.prepare(Grammar.json_schema(schema)).result(10)
    assert caught.value.field == "params.grammar"
    assert reason in caught.value.limit


@pytest.mark.parametrize("pattern", ["[a-z]{2,5}", "(yes|no)( [0-9]{1,2})?", r"\d{3}-\w+", "ä|ö{2}"])
def test_regex_matches_the_whole_answer(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    for text in answers(grammars, tokenizer, Grammar.regex(pattern), 6):
        assert re.fullmatch(pattern, text)


def test_choices_and_context_free_grammars(grammars: Grammars, tokenizer: Tokenizer) -> None:
    texts = ["yes", 'a "quoted"\nline', "ünï"]
    assert set(answers(grammars, tokenizer, Grammar.choices(texts), 20)) == set(texts)
    lark = Grammar.lark('start: "(" start ")" | "x"')
    gbnf = Grammar.lark('root ::= "(" root ")" | "x"')
    for grammar in (lark, gbnf):
        for text in answers(grammars, tokenizer, grammar, 6):
            depth = text.count("(")
            assert text == "(" * depth + "x" + ")" * depth


def test_text_that_spells_a_marker_is_made_of_other_tokens_and_the_marker_is_named_by_its_id(tmp_path: Path) -> None:
    model = write_thinking_model(tmp_path)
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    grammars = Grammars(model, 1536, EOS)
    texts = {"<think>", "a</think>b"}
    assert set(answers(grammars, tokenizer, Grammar.choices(sorted(texts)), 20)) == texts
    named = Grammar.lark(f'start: <[{THINK_ID}]> "x"')
    assert set(answers(grammars, tokenizer, named, 3)) == {"<think>x"}


def test_logprobs_of_a_structured_answer_are_the_models_own(grammars: Grammars) -> None:
    params = ResolvedParams(temperature=0.0, grammar=Grammar.regex("[0-9]+"), logprobs=2)
    logits = torch.randn(1, 1536, generator=torch.Generator().manual_seed(1))
    rules = TokenRules(params, [], 0, 1536, EOS, grammars)
    (drawn,) = draw_tokens(logits, [SequenceSlice((), 0, (), True, 0, params, rules)])
    assert isinstance(drawn, DrawnToken)
    assert drawn.logprobs is not None
    raw = torch.log_softmax(logits[0], -1)
    assert drawn.logprobs.logprob == raw[drawn.token_id].item()
    assert drawn.logprobs.top == tuple(zip(*(each.tolist() for each in raw.topk(2)[::-1]), strict=True))
    assert drawn.logprobs.top[0][0] != drawn.token_id


def test_grammars_are_compiled_once_and_the_oldest_is_forgotten(grammars: Grammars) -> None:
    first = Grammar.regex("first[0-9]")
    grammars.prepare(first).result(10)
    assert grammars.prepare(first).done()
    for number in range(64):
        grammars.prepare(Grammar.regex(f"x{number}")).result(10)
    assert not grammars.prepare(first).done() or grammars.matcher(first) is not None
    # A matcher is made of what is kept no more, too.
    assert not grammars.matcher(first).is_error()


def test_an_answer_ends_where_its_grammar_does_though_allowed_token_ids_have_no_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    digits = tuple(token_id for token_id in range(1536) if tokenizer.decode([token_id]).isdigit())
    params = ResolvedParams(grammar=Grammar.regex("[0-9]{2}"), allowed_token_ids=digits)
    history = [token_id for token_id in digits if len(tokenizer.decode([token_id])) == 1][:2]
    allowed = TokenRules(params, history, 0, 1536, EOS, grammars).changes(2).allowed
    assert allowed is not None
    assert {*np.flatnonzero(tokens_in(allowed, 1536)).tolist()} == set(EOS)
