"""Converts the fields of an HTTP request that say what the answer must look like to a grammar. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from kaveri.domain.grammar import Grammar
from kaveri.errors import InvalidArgument
from services.gateway.fields import Accepts, Fields, any_of, check_object, one_of

_Read = Callable[[Any, str], Grammar | None]


def _text(make: Callable[[str], Grammar]) -> _Read:
    def read(value: Any, path: str) -> Grammar:
        if type(value) is not str or not value:
            raise InvalidArgument(path, value, "a text, not empty")
        return make(value)

    return read


def _schema(value: Any, path: str) -> Grammar:
    # vLLM takes a schema as a text, too.
    if type(value) not in (dict, bool, str):
        raise InvalidArgument(path, value, "a JSON Schema")
    return Grammar.json_schema(value)


def _choices(value: Any, path: str) -> Grammar:
    if type(value) is not list or not value or not all(type(text) is str and text for text in value):
        raise InvalidArgument(path, value, "a list of texts, none of them empty")
    return Grammar.choices(value)


def _object(value: Any, path: str) -> Grammar | None:
    if type(value) is not bool:
        raise InvalidArgument(path, value, "true or false")
    return Grammar.json_object() if value else None


_NOTATIONS: Mapping[str, _Read] = {
    "json": _schema,
    "regex": _text(Grammar.regex),
    "choice": _choices,
    "grammar": _text(Grammar.lark),
    "json_object": _object,
}
"""Of vLLM's structured_outputs; the first four are also its former guided_json, guided_regex, ..."""
_HARMLESS: Mapping[str, Accepts] = {
    "disable_any_whitespace": any_of(bool),
    "disable_additional_properties": one_of(False),
    "disable_fallback": any_of(bool),
    "whitespace_pattern": one_of(),
    "structural_tag": one_of(),
    "backend": one_of(),
}


def take_grammar(fields: Fields) -> tuple[Grammar | None, str]:
    """Take a request's grammar, and the name of its parameter for errors; None and an empty name without one. Raises
    InvalidArgument, also if there are two."""
    found: list[tuple[Grammar, str]] = []
    if (value := fields.take("response_format")) is not None:
        found += _of_response_format(Fields(check_object(value, "response_format"), "response_format."))
    if (value := fields.take("structured_outputs")) is not None:
        options = Fields(check_object(value, "structured_outputs"), "structured_outputs.")
        found += _taken(options, "structured_outputs.", "")
        options.refuse_rest(_HARMLESS)
    found += _taken(fields, "", "guided_")
    if len(found) > 1:
        raise InvalidArgument(found[1][1], "set", f"left out beside {found[0][1]}")
    return found[0] if found else (None, "")


def _taken(fields: Fields, path: str, prefix: str) -> list[tuple[Grammar, str]]:
    found = []
    for name, read in _NOTATIONS.items():
        if (value := fields.take(prefix + name)) is not None:
            field = path + prefix + name
            if (grammar := read(value, field)) is not None:
                found.append((grammar, field))
    return found


def _of_response_format(fields: Fields) -> list[tuple[Grammar, str]]:
    kind, described = fields.text("type"), fields.take("json_schema")
    if kind == "json_schema":
        described = Fields(check_object(described, "response_format.json_schema"), "response_format.json_schema.")
        field = "response_format.json_schema.schema"
        schema = described.take("schema")
        for name in ("name", "description"):
            described.text(name)
        # Every schema is enforced.
        described.flag("strict")
        described.refuse_rest({})
        found = [(_schema(True if schema is None else check_object(schema, field), field), field)]
    elif kind == "json_object":
        found = [(Grammar.json_object(), "response_format")]
    elif kind == "text":
        found = []
    else:
        raise InvalidArgument("response_format.type", kind, "text, json_object or json_schema")
    fields.refuse_rest({})
    return found
