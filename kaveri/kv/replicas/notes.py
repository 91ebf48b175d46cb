"""Encodes the token ids that travel, as its note, with each mark (checkpoint) of a replica's push. Pure."""

import struct
from collections.abc import Sequence

from kaveri.kv.transfer.transport import NOTE_BYTES_MAX

_TOKEN_BYTES = 4
NOTE_TOKENS_MAX = NOTE_BYTES_MAX // _TOKEN_BYTES
"""Max token ids per note, so max tokens that one mark adds."""


def token_note(token_ids: Sequence[int]) -> bytes:
    """Encode at most NOTE_TOKENS_MAX token ids, to be sent with the tokens' KV to a replica: uint32, little-endian."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def noted_tokens(note: bytes) -> tuple[int, ...]:
    """Decode the token ids of a note from token_note(); trailing bytes that form no whole id are ignored."""
    return struct.unpack_from(f"<{len(note) // _TOKEN_BYTES}I", note)
