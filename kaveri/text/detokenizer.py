"""Converts an answer's token ids to text incrementally, and finds stop texts across token boundaries."""

import copy
import functools
from collections.abc import Callable, Collection, Sequence

from tokenizers import Tokenizer, decoders

from kaveri.text.stop_matcher import StopMatcher

_UNDECIDED_TOKENS = 8
"""Max tokens that wait for the end of a character: more than its four bytes."""
_CONTEXT_TOKENS = 4
"""Preceding tokens decoded with new ones; up to twice as many at the end of a prompt."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain_texts(backend: Tokenizer, skipped_ids: Collection[int]) -> Callable[[int], str | None]:
    """Return a cached function from a token id to its text if the token is plain, else None. Plain: non-empty ASCII
    text that a byte-level tokenizer concatenates unchanged. Other tokenizers have none: they drop a leading space, or
    join tokens. skipped_ids: special tokens, which have no text."""
    joins_bytes = isinstance(backend.decoder, decoders.ByteLevel)

    @functools.cache
    def plain_text(token_id: int) -> str | None:
        if not joins_bytes or token_id in skipped_ids:
            return None
        text = str(backend.decode([token_id], skip_special_tokens=True))
        return text if text and text.isascii() else None

    return plain_text


class Detokenizer:
    """Incremental text of one answer: what its tokens add to the text of the prompt.

    The pieces joined equal decode(prompt + answer) minus decode(prompt), up to a stop text, with two exceptions: the
    answer does not complete a character that the prompt leaves unfinished; and where invalid UTF-8 changes how earlier
    characters decode, which may have been sent, the new tokens are decoded alone.

    Text is held back while it may change: an unfinished UTF-8 sequence, or a possible start of a stop text."""

    def __init__(
        self,
        backend: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        prompt_token_ids: Sequence[int] = (),
        skipped_ids: Collection[int] = (),
        plain: Callable[[int], str | None] | None = None,
        known_characters: int = 0,
    ) -> None:
        """backend: shared, not modified. stop: texts that end the answer, which is cut before the first match.
        min_tokens: stop texts completed within this many tokens are ignored, as in vLLM. skipped_ids: tokens without
        text, such as special tokens; one that equals a stop text ends the answer. plain: from plain_texts(), saves
        decoding. known_characters: length of an already searched beginning of the answer; stop texts that end in it are
        ignored."""
        self._backend = backend
        self._plain = plain
        self._matcher = StopMatcher(stop, known_characters) if stop else None
        self._ignoring = min_tokens + 1 if min_tokens else 0
        """Tokens up to and including the first that may complete a stop text."""
        self._skipped_ids = skipped_ids
        # Decoded together: [0, new) is sent, and is the context of the rest; [new, end) is unsent, at least in part.
        self._window: list[int] = []
        self._new = 0
        self._left = ""
        """Text of the window's tokens before _new: sent, or part of the prompt."""
        self.decided_characters = 0
        """Number of final characters, including those held back for a stop text."""
        self.stop_text: str | None = None
        """Stop text that ended the answer, if any; push() must not be called then."""
        self._begin_after(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Append a token. Returns the text that is now final, often empty."""
        if self._ignoring:
            self._ignoring -= 1
        plain = self._plain(token_id) if self._plain is not None else None
        if plain is not None and self._new == len(self._window):
            # All text before is decided: no other context is needed.
            self._window, self._new, self._left = [token_id], 1, plain
            return self._scan(plain)
        if not self._has_text(token_id):
            token = self._backend.id_to_token(token_id)
            if self._matcher is None or token not in self._matcher.stop or self._ignoring:
                return ""
            rest = self.flush()
            if self.stop_text is None:
                self.stop_text = token
            return rest
        self._window.append(token_id)
        piece = self._decided()
        return self._scan(piece) if piece else piece

    def flush(self) -> str:
        """Return the text held back. Call after the last token."""
        if self.stop_text is not None:
            return ""
        rest = ""
        if self._new < len(self._window):
            rest = self._scan(self._continued(self._decode(self._window))[len(self._left) :])
            if self.stop_text is not None:
                return rest
        return rest if self._matcher is None else rest + self._matcher.flush()

    @property
    def undecided(self) -> str:
        """Text held back: what flush() would return now."""
        other = copy.copy(self)
        if self._matcher is not None:
            other._matcher = self._matcher.copy()
        return other.flush()

    def _begin_after(self, prompt_token_ids: Sequence[int]) -> None:
        if self._plain is not None and prompt_token_ids:
            plain = self._plain(prompt_token_ids[-1])
            if plain is not None:
                self._window, self._new, self._left = [prompt_token_ids[-1]], 1, plain
                return
        tail = [token_id for token_id in prompt_token_ids[-4 * _UNDECIDED_TOKENS :] if self._has_text(token_id)]
        # A character that the prompt leaves unfinished belongs to the prompt; the answer's bytes are decoded alone.
        while self._decode(tail[-_CONTEXT_TOKENS:]).endswith(_REPLACEMENT):
            tail.pop()
        for count in range(_CONTEXT_TOKENS, 2 * _CONTEXT_TOKENS):
            window = tail[-count:]
            text = self._decode(window)
            # A context that starts inside a character would corrupt the text after it.
            if not text.startswith(_REPLACEMENT):
                self._window, self._new, self._left = window, len(window), text
                return

    def _decided(self) -> str:
        """Return the text that is now final. Its tokens become the context of the next ones."""
        overdue = len(self._window) - self._new > _UNDECIDED_TOKENS
        text = self._decode(self._window)
        if not overdue and (text.endswith(_REPLACEMENT) or text == self._left):
            return ""
        text = self._continued(text)
        if not overdue and text.endswith(_REPLACEMENT):
            return ""
        left = self._left
        if text.endswith(_REPLACEMENT):
            # Only the tail can still change.
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
        """Return `text`, decoded from recent tokens, if it extends the text sent; else decode the new tokens alone."""
        if text.startswith(self._left):
            return text
        self._window, self._new, self._left = self._window[self._new :], 0, ""
        return self._decode(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._backend.id_to_token(token_id) is not None

    def _scan(self, piece: str) -> str:
        self.decided_characters += len(piece)
        if self._matcher is None:
            return piece
        text, self.stop_text = self._matcher.push(piece, ignores=bool(self._ignoring))
        return text
