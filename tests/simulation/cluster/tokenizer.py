"""A small real tokenizer: byte-level BPE whose random answers are full of split characters and beginnings of words."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kaveri.text.grammars import Grammars, grammar_tokenizer

EOS_TOKEN_ID = 0
STOP_TEXTS = ("ab", "the end", "é", "😀a", "stop", "ba b")
"""Texts that random answers contain, within a token, across two and across several."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTERS = "abdehnopst " + "éü漢😀"
_MERGED = ("ab", "ba", " b", "th", "the", " the", "en", "end", "st", "op", " a", "é", "漢", "😀", "e ", "hé")
CALL = '{"name":"look","arguments":{"n":1}}'
CHAT_PIECES = (CALL, "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "_call>", "</th", "ink>", "\n", "a")
"""Texts that are one token each. Unconstrained answers to chats consist of them."""
_CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% for call in message.tool_calls or () %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{% endfor %}{% for tool in tools or () %}{{ tool.function.name }} {% endfor %}\
{% if add_generation_prompt %}a{% if enable_thinking is defined %}<think>{% if not enable_thinking %}</think>\
{% endif %}{% endif %}{% endif %}"""


def make_tokenizer(*, chats: bool = False) -> PreTrainedTokenizerFast:
    """Encodes text of _CHARACTERS. Its ids are [0, len(tokenizer)); EOS_TOKEN_ID is a special token. chats: it has a
    chat template with tools and reasoning, and encodes ASCII."""
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
    if chats:
        # Behind the others, whose ids stay as they are.
        for byte in (ord("\n"), *range(0x20, 0x7F)):
            vocabulary.setdefault(_letter(byte), len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    if not chats:
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    pieces = [piece for piece in CHAT_PIECES if backend.token_to_id(piece) is None and len(piece) > 1]
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=_CHAT_TEMPLATE)


def make_grammars(backend: Tokenizer | None, vocab_size: int) -> Grammars:
    """Grammars over a tokenizer's own tokens. backend: None for tokens that are bytes."""
    grammars = Grammars(None, vocab_size, {EOS_TOKEN_ID})
    if backend is not None:
        grammars._tokenizer = grammar_tokenizer(_json_of(backend), vocab_size, {EOS_TOKEN_ID})
    return grammars


@cache
def _json_of(backend: Tokenizer) -> str:
    return str(backend.to_str())


def texts_of(
    backend: Tokenizer, prompt: tuple[int, ...], token_ids: tuple[int, ...], stop: tuple[str, ...], min_tokens: int = 0
) -> set[tuple[str, bool]]:
    """The texts that an answer of these tokens may have, each with whether a stop text ends it. Stop texts that are
    complete with the first min_tokens do not.

    There is more than one only where the prompt ends within a character: then the answer's text is what it adds to the
    prompt's, or its own. Decodes everything at once: says nothing of when each piece of the text is due.
    """
    before, whole = _decode(backend, prompt), _decode(backend, prompt + token_ids)
    # What is left of a character at the end belongs to the token that completes it.
    exempt = len(_decode(backend, token_ids[:min_tokens]).rstrip(_REPLACEMENT))
    texts = {_cut(_decode(backend, token_ids), stop, exempt)}
    if whole.startswith(before):
        exempt = len(_decode(backend, prompt + token_ids[:min_tokens]).rstrip(_REPLACEMENT)) - len(before)
        texts.add(_cut(whole[len(before) :], stop, max(0, exempt)))
    return texts


def _decode(backend: Tokenizer, token_ids: tuple[int, ...]) -> str:
    return str(backend.decode(list(token_ids), skip_special_tokens=True))


def _cut(text: str, stop: tuple[str, ...], exempt: int) -> tuple[str, bool]:
    """exempt: a stop text that ends within so many characters is ignored."""
    starts = [(text.find(each, max(0, exempt + 1 - len(each))), len(each)) for each in stop]
    found = [(start + length, start) for start, length in starts if start >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def _letter(byte: int) -> str:
    """What stands for a byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    others = [value for value in range(256) if value not in printable]
    return chr(256 + others.index(byte))
