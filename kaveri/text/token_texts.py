"""Text and bytes of single tokens, for logprobs."""

import re
from typing import NamedTuple

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenPiece(NamedTuple):
    """Text and bytes of one token, without its neighbours."""

    text: str
    """Text; an incomplete character is U+FFFD. Empty for an unknown id."""
    raw_bytes: bytes
    """The token's bytes if `text` in UTF-8 differs from them, else empty."""


class TokenTexts:
    """Cache of each token's text and bytes."""

    def __init__(self, backend: Tokenizer) -> None:
        """backend: shared, not modified."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Decoders drop the space before the first word, so a token is decoded after another one.
        self._before = backend.encode("a", add_special_tokens=False).ids[-1:]
        self._text_before = str(backend.decode(self._before))
        self._pieces: dict[int, TokenPiece] = {}

    def piece(self, token_id: int) -> TokenPiece:
        """Return the text and bytes of a token; both empty for an unknown id."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> TokenPiece:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return TokenPiece("", b"")
        if token_id in self._special_ids:
            return TokenPiece(token, b"")
        text = str(self._backend.decode([*self._before, token_id], skip_special_tokens=False))
        if _REPLACEMENT in text or not text.startswith(self._text_before):
            text = str(self._backend.decode([token_id], skip_special_tokens=False))
        else:
            text = text[len(self._text_before) :]
        return TokenPiece(text, _bytes_of(token) if _REPLACEMENT in text else b"")


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a vocabulary entry such as "<0xE2>" or byte-level BPE letters; empty for any other."""
    if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes.fromhex(byte[1])
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    except KeyError:
        return b""


def _byte_letters() -> dict[str, int]:
    """Map each letter of byte-level BPE vocabularies to its byte (GPT-2, encoder.py, bytes_to_unicode). A printable
    Latin-1 character is its own byte; the other bytes, in order, have the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()
