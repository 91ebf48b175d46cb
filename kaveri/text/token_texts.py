"""What single tokens stand for, as reports about tokens show them."""

from tokenizers import Tokenizer

_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space before a word in the vocabularies of SentencePiece."""


class TokenTexts:
    """Remembers each token once it was asked for; so it holds at most the vocabulary."""

    def __init__(self, backend: Tokenizer) -> None:
        """backend: shared with others."""
        self._backend = backend
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token's text, alone; a part of a character is U+FFFD. Empty for an id without a token."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._look_up(token_id)
        return text

    def _look_up(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        text = str(self._backend.decode([token_id], skip_special_tokens=False))
        # A decoder of SentencePiece leaves out the space before the first word.
        return " " + text if token.startswith(_WORD_START) and not text.startswith(" ") else text
