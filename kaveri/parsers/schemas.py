"""Reads JSON Schemas for llguidance. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING_MATCHES = "no text matches it"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Restricts JSON to one line: with free white space, some models generate nothing else until max_tokens."""
_WITHOUT_EFFECT: Mapping[str, Sequence[object]] = {
    # Zod writes this for each record: all names are strings.
    "propertyNames": ({}, {"type": "string"}),
    # Every string has these formats of OpenAPI and pydantic. Base64 (byte) and uri-reference exclude some strings.
    "format": ("binary", "password", "path", "file-path", "directory-path"),
}
"""Keyword values that exclude no JSON, but that llguidance refuses."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def one_line_schema(schema: object) -> dict[str, Any]:
    """Return a decoded JSON Schema with llguidance's options for JSON on one line. Raises ValueError if it is none, no
    text matches it, or it sets such options itself. Keywords without effect are dropped."""
    if schema is False:
        raise ValueError(NOTHING_MATCHES)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is an object, or true or false")
    # llguidance reads its options from this key.
    if "x-guidance" in schema:
        raise ValueError("Unimplemented keys: x-guidance")
    return {**_effective(schema), "x-guidance": _ONE_LINE}


def _effective(value: Any) -> Any:
    """Return a decoded schema, or part of one, without the keywords in _WITHOUT_EFFECT at any depth."""
    if isinstance(value, list):
        return [_effective(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, each in value.items():
        if key in _NAMED_SCHEMAS and isinstance(each, dict):
            kept[key] = {name: _effective(schema) for name, schema in each.items()}
        elif key in ("const", "enum"):
            kept[key] = each
        elif (part := _effective(each)) not in _WITHOUT_EFFECT.get(key, ()):
            kept[key] = part
    return kept
