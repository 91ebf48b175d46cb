"""A small real tokenizer: byte-level BPE whose random answers are full of split characters and beginnings of words."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS_TOKEN_ID = 0
STOP_TEXTS = ("ab", "the end", "é", "😀a", "stop", "ba b")
"""Texts that random answers contain, within a token, across two and across several."""

_CHARACTERS = "abdehnopst " + "éü漢😀"
_MERGED = ("ab", "ba", " b", "th", "the", " the", "en", "end", "st", "op", " a", "é", "漢", "😀", "e ", "hé")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Encodes text of _CHARACTERS. Its ids are [0, len(tokenizer)); EOS_TOKEN_ID is a special token."""
    letters = {byte: _letter(byte) for byte in sorted({byte for text in _CHARACTERS for byte in text.encode()})}
    vocabulary = {"</s>": EOS_TOKEN_ID}
    for letter in letters.values():
        vocabulary[letter] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for text in _MERGED:
        pieces = [letters[byte] for byte in text.encode()]
        left = pieces[0]
        for right in pieces[1:]:
            # Also the parts of a character become tokens.
            if left + right not in vocabulary:
                merges.append((left, right))
                vocabulary[left + right] = len(vocabulary)
            left += right
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def texts_of(
    backend: Tokenizer, prompt: tuple[int, ...], token_ids: tuple[int, ...], stop: tuple[str, ...]
) -> set[tuple[str, bool]]:
    """The texts that an answer of these tokens may have, each with whether a stop text ends it.

    There is more than one only where the prompt ends within a character: then the answer's text is what it adds to the
    prompt's, or its own. Decodes everything at once: says nothing of when each piece of the text is due.
    """
    before, whole = _decode(backend, prompt), _decode(backend, prompt + token_ids)
    texts = {_decode(backend, token_ids)}
    if whole.startswith(before):
        texts.add(whole[len(before) :])
    return {_cut(text, stop) for text in texts}


def _decode(backend: Tokenizer, token_ids: tuple[int, ...]) -> str:
    return str(backend.decode(list(token_ids), skip_special_tokens=True))


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    found = [(start + len(each), start) for each in stop if (start := text.find(each)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def _letter(byte: int) -> str:
    """What stands for a byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    others = [value for value in range(256) if value not in printable]
    return chr(256 + others.index(byte))
