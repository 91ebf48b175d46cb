"""Grammars of strangers that explode, recurse, contradict themselves or are wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kaveri.domain.grammar import Grammar


def _doubled(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a", "b"]}
    return schema


def _nested(depth: int, key: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", key: schema}
    return schema


def _referring(count: int, width: int) -> dict[str, Any]:
    """Definitions that each refer `width` times to the next one: width ** count once they are written out."""
    defs: dict[str, Any] = {
        f"d{number}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{number + 1}"}] * width, "minItems": width}
        for number in range(count)
    }
    return {"$defs": defs | {f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _any_of_all(count: int, width: int) -> dict[str, Any]:
    return {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(width)]} for i in range(count)]}


_LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
SCHEMAS: dict[str, Any] = {
    "a billion items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "at most a billion items": {"type": "array", "items": {"type": "string"}, "maxItems": 10**9},
    "a hundred thousand items": {"type": "array", "items": {"type": "string"}, "minItems": 10**5},
    "items without end": {"type": "array", "minItems": 10**30},
    "negative items": {"type": "array", "minItems": -1},
    "more items than allowed": {"type": "array", "minItems": 3, "maxItems": 2},
    "a billion characters": {"type": "string", "minLength": 10**9},
    "at most a billion characters": {"type": "string", "maxLength": 10**9},
    "a long string of a set": {"type": "string", "pattern": "^[a-z]{1,100000}$"},
    "a billion properties": {"type": "object", "minProperties": 10**9},
    "thousands of optional properties": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
    "thousands of required ones": {
        "type": "object",
        "properties": {f"p{i}": {"type": "null"} for i in range(2000)},
        "required": [f"p{i}" for i in range(2000)],
    },
    "thousands of values": {"enum": [f"value {i}" for i in range(6000)]},
    "long values": {"enum": ["x" * 20000, "y" * 20000]},
    "doubled": _doubled(11),
    "nested": _nested(200),
    "nested deeper": _nested(3000),
    "referring ten to the ten": _referring(10, 10),
    "referring two to the hundred": _referring(100, 2),
    "any of all": _any_of_all(8, 10),
    "any of all, wider": _any_of_all(4, 60),
    "itself": {"$ref": "#"},
    "a loop": _LOOP,
    "a loop within": {"type": "array", "items": _LOOP, "$defs": _LOOP["$defs"], "minItems": 1},
    "all of itself": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "not itself": {"not": {"$ref": "#"}},
    "an endless object": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "an unknown reference": {"$ref": "#/$defs/x"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an address": {"$ref": "http://127.0.0.1:1/schema"},
    "a pointer into a list": {"$ref": "#/allOf/0", "allOf": [{"$ref": "#"}]},
    "contradicting numbers": {"type": "integer", "minimum": 10, "maximum": 5},
    "contradicting types": {"allOf": [{"type": "integer"}, {"type": "string"}]},
    "contradicting lengths": {"type": "string", "minLength": 5, "maxLength": 4},
    "no value": {"enum": []},
    "numbers without end": {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    "small steps": {"type": "number", "multipleOf": 1e-9, "minimum": 0, "maximum": 1e9},
    "steps of nothing": {"type": "number", "multipleOf": 0},
    "a prime": {"type": "integer", "multipleOf": 104729},
    "patterns that multiply": {"allOf": [{"type": "string", "pattern": f"[{c}].{{50}}"} for c in "abcdefghijkl"]},
    "a pattern that looks ahead": {"type": "string", "pattern": "(?=a)b"},
    "a pattern that refers back": {"type": "string", "pattern": r"(a)\1"},
    "a broken pattern": {"type": "string", "pattern": "[a"},
    "many patterns of names": {"type": "object", "patternProperties": {f"^{i}.*x{{9}}": {} for i in range(500)}},
    "type of a number": {"type": 7},
    "a list of types": {"type": []},
    "properties as a list": {"type": "object", "properties": [1]},
    "required as a text": {"type": "object", "required": "a"},
    "own options of the compiler": {"x-guidance": {"whitespace_pattern": "(.*){1000}"}},
    "a NUL in a name": {"type": "object", "properties": {"\0": {}}, "required": ["\0"]},
    "a list": [1, 2],
}
REGEXES = {
    "a hundred thousand": "a{1,100000}",
    "a product of counts": "((a{1,1000}){1,1000}){1,1000}",
    "a count without end": "a{1,99999999999}",
    "ambiguous": "(a|aa)*b",
    "ambiguous and nested": "((a*)*)*b",
    "remembers thirty letters": ".*a.{30}",
    "remembers three thousand": "(.*a.{3000}|.*b.{2000})",
    "an and of many": "(?:.*a.*b.*c.*d.*e.*f){40}",
    "classes of Unicode": r"(\p{L}{1,200}\p{N}{1,200}){1,50}",
    "ten thousand words": "|".join(f"word{i}x" for i in range(10000)),
    "nested deep": "(" * 5000 + "a" + ")" * 5000,
    "broken": "(a",
    "looks ahead": "(?=a)b",
    "nothing": "[^\\s\\S]",
}
LARKS = {
    "left recursion": 'start: start start | "a" | ',
    "ambiguous": 'start: a+\na: a a a | "x" | ""',
    "rules without end": "start: start",
    "unknown rule": "start: nothing",
    "broken": "start: ((",
    "a thousand rules": "start: r0\n"
    + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(1000))
    + '\nr1000: "b"',
    "doubled rules": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "b"',
    "a regex that explodes": "start: /((a{1,1000}){1,1000}){1,1000}/",
    "imports": "%import common.NUMBER\nstart: NUMBER",
    "its own options": '%llguidance {"no_forcing": true}\nstart: "a"',
}
HOSTILE: dict[str, Callable[[], Grammar]] = {
    **{f"schema: {name}": partial(Grammar.json_schema, schema) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": partial(Grammar.regex, pattern) for name, pattern in REGEXES.items()},
    **{f"lark: {name}": partial(Grammar.lark, text) for name, text in LARKS.items()},
}
"""Each raises InvalidArgument, or gives a grammar that is refused later or is served."""
