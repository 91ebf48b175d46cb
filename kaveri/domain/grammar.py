"""Grammars that the text of an answer must match, as domain values."""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kaveri.errors import InvalidArgument

MAX_GRAMMAR_BYTES = 2**17
MAX_REASONING_IDS = 16
_FIELD = "params.grammar"


class GrammarKind(enum.StrEnum):
    """Notation of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    """Lark's notation, or llama.cpp's GBNF."""
    CHOICES = "choices"
    """A JSON list of texts."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer's whole text must match. Made by the class methods. Raises InvalidArgument.

    The answer ends only where the grammar may end, unless max_tokens or a stop text cuts it.
    """

    kind: GrammarKind
    source: str
    reasoning_end_ids: tuple[int, ...] = ()
    """The token sequence that ends the reasoning, which the grammar does not constrain. Empty: the answer has none."""
    reasoning_begin_ids: tuple[int, ...] = ()
    """Tokens that begin the reasoning, one of them at the answer's start; an answer that starts otherwise has none.
    Empty, with reasoning_end_ids: the prompt has begun it."""

    def __post_init__(self) -> None:
        for ids in (self.reasoning_end_ids, self.reasoning_begin_ids):
            if len(ids) > MAX_REASONING_IDS:
                raise InvalidArgument(_FIELD, f"{len(ids)} tokens around the reasoning", f"at most {MAX_REASONING_IDS}")
        if not isinstance(self.source, str):
            raise InvalidArgument(_FIELD, self.source, "a text")
        try:
            size_bytes = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise InvalidArgument(_FIELD, "a text", f"Unicode text: {error.reason}") from error
        if not 0 < size_bytes <= MAX_GRAMMAR_BYTES:
            raise InvalidArgument(_FIELD, f"{size_bytes} bytes", f"1 to {MAX_GRAMMAR_BYTES} bytes")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Grammar":
        """JSON that a schema allows, on one line, with the properties in the schema's order. schema: a JSON Schema, or
        its JSON."""
        return cls(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that a regular expression matches as a whole, in the notation of Rust's crate regex."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """Text of a context-free grammar, in Lark's notation or llama.cpp's GBNF."""
        return cls(GrammarKind.LARK, grammar)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> "Grammar":
        """One of some texts."""
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts) or not texts:
            raise InvalidArgument(_FIELD, texts, "a list of texts, none of them empty")
        return cls(GrammarKind.CHOICES, _json(list(texts)))


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        # Not the value itself: showing it may fail as this did.
        raise InvalidArgument(_FIELD, f"a {type(value).__name__}", f"JSON: {error}") from error
