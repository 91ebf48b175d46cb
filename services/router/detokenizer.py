"""Turns one answer's token ids into text as they come, and finds stop texts across token boundaries."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one answer. The pieces joined equal the tokenizer's decoding of all tokens, up to a stop text.

    Held back until decided: an unfinished UTF-8 sequence, and a possible beginning of a stop text.
    """

    def __init__(self, backend: Tokenizer, stop: Sequence[str] = ()) -> None:
        """backend: shared with others. stop: texts that end the answer; the text is cut before the first match."""
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._decoded_characters = 0
        self._held = ""
        self._undecided = False
        self.stopped = False
        """Whether a stop text was found; nothing more may be pushed."""

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is decided now, often empty."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._backend, token_id)
        self._undecided = piece is None
        if not piece:
            return ""
        self._decoded_characters += len(piece)
        return self._scan(piece) if self._stop else piece

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        if self.stopped:
            return ""
        rest = ""
        if self._undecided:
            decoded = self._backend.decode(self._token_ids, skip_special_tokens=True)
            rest = self._scan(decoded[self._decoded_characters :])
            if self.stopped:
                return rest
        rest, self._held = rest + self._held, ""
        return rest

    def _scan(self, piece: str) -> str:
        text = self._held + piece
        # The match that ends first is the one that text coming letter by letter would meet first.
        ends = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        decided = len(text) - held
        self._held = text[decided:]
        return text[:decided]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that could be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
