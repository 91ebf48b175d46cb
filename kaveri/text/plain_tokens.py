"""Text of tokens that is independent of their context."""

from collections.abc import Collection

from tokenizers import Tokenizer, decoders


class PlainTokens:
    """Tokens of ASCII text in a byte-level tokenizer, which concatenates the bytes of its tokens unchanged.

    For other tokenizers no token is plain: some drop a leading space, or join a token to the one before it. Each token
    is cached on first use.
    """

    def __init__(self, backend: Tokenizer, skipped_ids: Collection[int]) -> None:
        """backend: shared with others. skipped_ids: the special tokens, which have no text."""
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._joins_bytes = isinstance(backend.decoder, decoders.ByteLevel)
        self._texts: dict[int, str | None] = {}

    def text(self, token_id: int) -> str | None:
        """The token's text, at least one character; None if it is not plain."""
        try:
            return self._texts[token_id]
        except KeyError:
            text = self._texts[token_id] = self._look_up(token_id)
            return text

    def _look_up(self, token_id: int) -> str | None:
        if not self._joins_bytes or token_id in self._skipped_ids:
            return None
        text = str(self._backend.decode([token_id], skip_special_tokens=True))
        return text if text and text.isascii() else None
