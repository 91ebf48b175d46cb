"""Owns the tokenizer of `kaveri-tiny`: a byte-level BPE trained on the families' own text, and the chat template.

`python -m training.kaveri_tiny.make_tokenizer` writes tokenizer.json and tokenizer_config.json into the model folder.
Digits are always tokens of their own (numbers are then spelled the same way everywhere), and as the alphabet is the 256
bytes, any UTF-8 text encodes and decodes unchanged.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.kaveri_tiny.families import FAMILIES, NAMES, WORDS, draw

MODEL_FOLDER = Path(__file__).parents[2] / "kaveri" / "models" / "kaveri_tiny"
VOCABULARY_SIZE = 1536
CONTEXT_LENGTH = 2048
PAD, BEGIN, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL_TOKENS = [PAD, BEGIN, END, USER, ASSISTANT, SYSTEM]
PRETOKEN_PATTERN = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(seed: int) -> Iterator[str]:
    """The text the merges are learnt from: samples of every family, and every lexicon word with and without a space."""
    rng = Random(seed)
    for family in FAMILIES:
        for _ in range(40):
            sample = draw(rng, family, 0.2, held_out=False)
            yield sample.prompt
            yield sample.answer
    # Each word shall become a single token in both of its spellings, whatever its rank in the samples. The bare
    # spelling comes more often, so that one merge makes the spaced one of it, instead of several of its own.
    for word in (*WORDS, *NAMES):
        for _ in range(300):
            yield word
        for _ in range(100):
            yield f" {word}"


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def main() -> None:
    """Writes the tokenizer and reports which lexicon words are more than one token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=MODEL_FOLDER)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer(arguments.seed)
    tokenizer.save_pretrained(arguments.output)
    pieces = {
        text: tokenizer.tokenize(text)
        for word in (*WORDS, *NAMES)
        for text in (word, f" {word}")
        if len(tokenizer.tokenize(text)) > 1
    }
    print(f"{len(tokenizer)} tokens; words of more than one token: {pieces}")


if __name__ == "__main__":
    main()
