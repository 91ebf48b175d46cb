"""Turns one answer's token ids into text as they come, and finds stop texts across token boundaries."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

_UNDECIDED_TOKENS = 8
"""Tokens that may wait for the end of a character. The longest one has four bytes, so four tokens."""
_CONTEXT_TOKENS = 4
"""Tokens kept for context where text is cut off amid undecodable bytes; tokens of a prompt: as many or a few more."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of one answer: what its tokens add to the text of the prompt.

    The pieces joined equal the tokenizer's decoding of prompt and answer without that of the prompt, up to a stop text.
    Two exceptions. A character that the prompt leaves unfinished is not finished by the answer. And bytes that are no
    UTF-8 can change how a tokenizer decodes the characters before them, which may have left already: then the text goes
    on with the decoding of the new tokens alone.

    Held back until decided: an unfinished UTF-8 sequence, and a possible beginning of a stop text. The work for a token
    is bounded, whatever the tokens before it were.
    """

    def __init__(
        self,
        backend: Tokenizer,
        stop: Sequence[str] = (),
        *,
        prompt_token_ids: Sequence[int] = (),
        skipped_ids: Collection[int] = (),
    ) -> None:
        """backend: shared with others. stop: texts that end the answer; the text is cut before the first match.
        skipped_ids: the special tokens, which have no text."""
        self._backend = backend
        self._stop = tuple(stop)
        self._skipped_ids = skipped_ids
        # Decoded together: [0, new) have left, and are the context of the others     [new, end) have not, or not wholly
        self._window: list[int] = []
        self._new = 0
        self._left = ""
        """The text of the window that has left, or is the prompt's."""
        self._held = ""
        self.stopped = False
        """Whether a stop text was found; nothing more may be pushed."""
        self._begin_after(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is decided now, often empty."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        piece = self._decided()
        return self._scan(piece) if self._stop and piece else piece

    def flush(self) -> str:
        """The text held back, at the end of the answer."""
        if self.stopped:
            return ""
        rest = self._scan(self._continued(self._decode(self._window))[len(self._left) :])
        if self.stopped:
            return rest
        rest, self._held = rest + self._held, ""
        return rest

    def _begin_after(self, prompt_token_ids: Sequence[int]) -> None:
        tail = [token_id for token_id in prompt_token_ids[-4 * _UNDECIDED_TOKENS :] if self._has_text(token_id)]
        # A character that the prompt leaves unfinished is the prompt's: the answer's bytes stand for themselves.
        while self._decode(tail[-_CONTEXT_TOKENS:]).endswith(_REPLACEMENT):
            tail.pop()
        for count in range(_CONTEXT_TOKENS, 2 * _CONTEXT_TOKENS):
            window = tail[-count:]
            text = self._decode(window)
            # Begun within a character, the context would spoil what comes after it.
            if not text.startswith(_REPLACEMENT):
                self._window, self._new, self._left = window, len(window), text
                return

    def _decided(self) -> str:
        """The text that the window has decided. What has left becomes context, and older context is dropped."""
        overdue = len(self._window) - self._new > _UNDECIDED_TOKENS
        text = self._decode(self._window)
        if not overdue and (text.endswith(_REPLACEMENT) or text == self._left):
            return ""
        text = self._continued(text)
        if not overdue and text.endswith(_REPLACEMENT):
            return ""
        left = self._left
        if text.endswith(_REPLACEMENT):
            # Only the end can become another character.
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._new = 1
            self._left = self._decode(self._window)
            undecided = min(3, len(self._left) - len(self._left.rstrip(_REPLACEMENT)))
            self._left = self._left[: len(self._left) - undecided]
            return text[len(left) : len(text) - undecided]
        self._window = self._window[self._new :]
        self._new = len(self._window)
        self._left = self._decode(self._window)
        return text[len(left) :]

    def _continued(self, text: str) -> str:
        """`text`, which is the window's, if it still begins with what has left. Else the new tokens begin a window."""
        if text.startswith(self._left):
            return text
        self._window, self._new, self._left = self._window[self._new :], 0, ""
        return self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._backend.id_to_token(token_id) is not None

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
