"""Spreads what a router has not been sent over small messages. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.decode.answer_log import GainedTokens

MAX_TOKENS_BYTES = 2**13
"""Most bytes in one message, by an estimate from above. A router takes in a whole message in one turn of its event
loop, some milliseconds for these: 60 entries of one token, or 1,600 tokens of one answer."""
_ENTRY_BYTES = 128
"""Of an entry without ids, tokens and error."""
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 24
"""Of each log-probability of a token: its own and the alternatives'."""


def messages_of(batch: Sequence[GainedTokens]) -> Iterator[list[GainedTokens]]:
    """The entries of one message after another, in order; an entry that is too large goes in pieces."""
    message: list[GainedTokens] = []
    room = MAX_TOKENS_BYTES
    for gained in batch:
        size = _bytes(gained)
        if size <= room:
            # Nearly always, and for every token: nothing is cut.
            message.append(gained)
            room -= size
            continue
        for piece in _pieces(gained):
            piece_bytes = _bytes(piece)
            if piece_bytes > room and message:
                yield message
                message, room = [], MAX_TOKENS_BYTES
            message.append(piece)
            room -= piece_bytes
    if message:
        yield message


def _pieces(gained: GainedTokens) -> Iterator[GainedTokens]:
    """The entry, cut between tokens; how it ended is said with the last piece."""
    if _bytes(gained) <= MAX_TOKENS_BYTES:
        yield gained
        return
    start, size = 0, 0
    for end in range(len(gained.token_ids)):
        token_bytes = _token_bytes(gained, end)
        if size + token_bytes > MAX_TOKENS_BYTES // 2 and end > start:
            tokens, logprobs = gained.token_ids[start:end], gained.logprobs[start:end]
            yield GainedTokens(gained.request_id, gained.owner, gained.index + start, tokens, logprobs)
            start, size = end, 0
        size += token_bytes
    rest, rest_logprobs = gained.token_ids[start:], gained.logprobs[start:]
    yield replace(gained, index=gained.index + start, token_ids=rest, logprobs=rest_logprobs)


def _bytes(gained: GainedTokens) -> int:
    # A character takes up to four bytes.
    size = _ENTRY_BYTES + 4 * (len(gained.request_id) + len(gained.end.error)) + _TOKEN_BYTES * len(gained.token_ids)
    if gained.logprobs:
        size += _LOGPROB_BYTES * sum(1 + len(logprobs.top) for logprobs in gained.logprobs)
    return size


def _token_bytes(gained: GainedTokens, position: int) -> int:
    if not gained.logprobs:
        return _TOKEN_BYTES
    return _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(gained.logprobs[position].top))
