"""Encodes the token ids of a mark's blocks as its note. Pure."""

import struct
from collections.abc import Sequence

from kaveri.kv.transfer.transport import NOTE_BYTES_MAX

_TOKEN_BYTES = 4
NOTE_TOKENS_MAX = NOTE_BYTES_MAX // _TOKEN_BYTES
"""Most tokens of the blocks that one mark adds."""


def token_note(token_ids: Sequence[int]) -> bytes:
    """The note for blocks with these tokens, at most NOTE_TOKENS_MAX: uint32, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def noted_tokens(note: bytes) -> tuple[int, ...]:
    """The tokens in a note; bytes after the last whole number are ignored."""
    return struct.unpack_from(f"<{len(note) // _TOKEN_BYTES}I", note)
