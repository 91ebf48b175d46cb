"""Reads JSON Schemas for llguidance. Pure."""

from typing import Any

NOTHING_MATCHES = "no text matches it"
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Restricts JSON to one line: with free white space, some models generate nothing else until max_tokens."""


def one_line_schema(schema: object) -> dict[str, Any]:
    """Return a decoded JSON Schema with llguidance's options for JSON on one line. Raises ValueError if it is none, no
    text matches it, or it sets such options itself."""
    if schema is False:
        raise ValueError(NOTHING_MATCHES)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON Schema is an object, or true or false")
    # llguidance reads its options from this key.
    if "x-guidance" in schema:
        raise ValueError("Unimplemented keys: x-guidance")
    return {**schema, "x-guidance": _ONE_LINE}
