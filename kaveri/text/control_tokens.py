"""Encodes control tokens in messages as plain text, so that a message cannot start another role's turn."""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, normalizers

_SLICE_CHARACTERS = 65_536
"""Characters searched at a time, since a search holds the GIL: a few milliseconds."""


class ControlTokens:
    """Control tokens of one model: its special tokens, and the added tokens that its chat template writes around turns.
    mark() breaks those in a message with a marker; `backend` removes the marker and encodes them as plain text."""

    def __init__(self, backend: Tokenizer, rendered: Sequence[str]) -> None:
        """backend: tokenizer, not modified. rendered: sample conversations rendered by the chat template."""
        added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        control = {token.content for token in added.values() if token.special or _is_written(token.content, rendered)}
        self._pattern = re.compile(_alternatives(control)) if control else None
        self._longest = max(map(len, control), default=0)
        # Random, so that no caller can write it; noncharacters, so that no template looks for it.
        self._marker = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(8))
        self._normalizer: normalizers.Normalizer | None = None
        if any(token.normalized for token in added.values() if token.content in control):
            self._normalizer = backend.normalizer
        self.backend = _without_marker(backend, control, self._marker)
        """Copy of the tokenizer that drops markers once it has searched for control tokens."""

    def mark(self, text: str) -> tuple[str, bool]:
        """Break each control token in `text` with a marker. Returns the text, to be encoded with `backend`, and True if
        it has control tokens, also after normalization."""
        pieces: list[str] = []
        taken = 0
        for position in self._positions(text):
            # Inserted after the token's first character, so that overlapping tokens are found and broken as well.
            pieces += text[taken : position + 1], self._marker
            taken = position + 1
        if pieces:
            return "".join((*pieces, text[taken:])), True
        return text, self._appears_when_normalized(text)

    def _positions(self, text: str) -> Iterator[int]:
        if self._pattern is None:
            return
        for start in range(0, len(text), _SLICE_CHARACTERS):
            end = start + _SLICE_CHARACTERS
            position = start
            while (match := self._pattern.search(text, position, end + self._longest - 1)) and match.start() < end:
                yield match.start()
                position = match.start() + 1

    def _appears_when_normalized(self, text: str) -> bool:
        if self._normalizer is None or self._pattern is None:
            return False
        slices = (text[start : start + _SLICE_CHARACTERS] for start in range(0, len(text), _SLICE_CHARACTERS))
        return any(self._pattern.search(self._normalizer.normalize_str(part)) for part in slices)


def _is_written(token: str, rendered: Iterable[str]) -> bool:
    """Return True if a rendered conversation contains the token; False for words and white space."""
    return not token.isspace() and not token.isalnum() and any(token in text for text in rendered)


def _without_marker(backend: Tokenizer, control: set[str], marker: str) -> Tokenizer:
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        if token["content"] in control:
            # Looked for before the normalizer has removed the markers.
            token["normalized"] = False
    copy = Tokenizer.from_str(json.dumps(description))
    steps = [normalizers.Replace(marker, "")]
    copy.normalizer = normalizers.Sequence(steps if copy.normalizer is None else [*steps, copy.normalizer])
    return copy


def _alternatives(words: Iterable[str]) -> str:
    """Return a regular expression for any of the words, branching per letter to be fast for thousands of words."""
    branches: dict[str, set[str]] = {}
    for word in words:
        branches.setdefault(word[0], set()).add(word[1:])
    patterns = [
        re.escape(letter) + ("" if "" in rests else _alternatives(rests)) for letter, rests in sorted(branches.items())
    ]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
