"""Small tokenizers built like those of known model families, with the family's chat template."""

import json
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps. a b ab ba abba",
    "user assistant system hello there Hello! What is the capital of France? It is Paris. 0 1 2 3 4 5 6 7 8 9",
    "def f(x):\n    return x < 3 and x > 1 | 2 \n\n\n",
] * 20

_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'].replace('assistant', 'model') + '\n'"
    " + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}"
    "{% else %}{{ '<|Assistant|>' + m['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)


def _special(*texts: str, normalized: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=normalized) for text in texts]


def _byte_level(special: list[AddedToken], template: str, bos: str, eos: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return _finish(backend, special, template, bos, eos)


def _metaspace(
    special: list[AddedToken], template: str, *, prefix: bool, split: str = "legacy"
) -> PreTrainedTokenizerFast:
    """Build a SentencePiece-like tokenizer with byte fallback. prefix: put a space before text; decoding drops it."""
    alphabet = sorted(set("".join(_CORPUS).replace(" ", "▁")))
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=names, initial_alphabet=alphabet)
    backend.train_from_iterator(_CORPUS, trainer)
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    # Trained as added tokens, so that each byte has an id; only the first three are such in these families.
    description = json.loads(backend.to_str())
    description["added_tokens"] = description["added_tokens"][:3]
    if split == "legacy":
        description["pre_tokenizer"] = None
    backend = Tokenizer.from_str(json.dumps(description))
    if split == "legacy":
        replace = normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if prefix else [replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return _finish(backend, special, template, "<s>", "</s>")


def _finish(
    backend: Tokenizer, special: list[AddedToken], template: str, bos: str, eos: str
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([token for token in special if token.special])
    backend.add_tokens([token for token in special if not token.special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def chatml() -> PreTrainedTokenizerFast:
    added = _special("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added += [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
    return _byte_level(added, _CHATML, "<|endoftext|>", "<|im_end|>")


def llama3() -> PreTrainedTokenizerFast:
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    names += [f"<|reserved_special_token_{number}|>" for number in range(40)]
    # White space that the template writes, too, and that stays text.
    added = [*_special(*names), AddedToken("\n\n", special=False, normalized=False)]
    return _byte_level(added, _LLAMA3, "<|begin_of_text|>", "<|eot_id|>")


def deepseek() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose turns are marked by tokens that are not special, as DeepSeek's."""
    added = _special("<|begin|>", "<|end|>")
    names = ("<|User|>", "<|Assistant|>", "<think>", "</think>")
    added += [AddedToken(text, special=False, normalized=True) for text in names]
    return _byte_level(added, _DEEPSEEK, "<|begin|>", "<|end|>")


def llama2() -> PreTrainedTokenizerFast:
    return _metaspace(_special("<unk>", "<s>", "</s>"), _LLAMA2, prefix=True)


def mistral() -> PreTrainedTokenizerFast:
    added = _special("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    return _metaspace(added, _MISTRAL, prefix=True, split="first")


def gemma() -> PreTrainedTokenizerFast:
    added = _special("<start_of_turn>", "<end_of_turn>")
    added += [AddedToken("\n" * count, special=False, normalized=False) for count in range(2, 5)]
    return _metaspace(added, _GEMMA, prefix=False)


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "chatml": chatml,
    "llama3": llama3,
    "deepseek": deepseek,
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
}


def unigram() -> Tokenizer:
    """Build a tokenizer like T5's and XLM-R's."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def word_piece() -> Tokenizer:
    """Build a tokenizer like BERT's, without its cleaning of spaces before punctuation."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


BACKENDS: dict[str, Callable[[], Tokenizer]] = {
    **{name: lambda make=make: make().backend_tokenizer for name, make in FAMILIES.items()},  # type: ignore[misc]
    "unigram": unigram,
    "word piece": word_piece,
}
"""All tokenizers by name, including those of families without a chat template."""
