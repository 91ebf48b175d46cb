"""Builds untrained sequence classifiers: a pretrained base with a new head, or a small one from scratch. Needs torch.
Compares the base's tokenizer with the served model's to decide whether prompts must be tokenized again."""

from dataclasses import dataclass
from typing import Any

from kaveri.errors import ConfigError
from kaveri.models import resolve_model

SCRATCH = "scratch"
"""Value of --base for a classifier without pretrained weights."""


@dataclass(frozen=True)
class Classifier:
    model: Any
    """A transformers *ForSequenceClassification in float32, with a padding token."""
    own_tokenizer: Any | None
    """The classifier's tokenizer; None if it uses the served model's token ids."""


def classifier_from_scratch(
    vocab_size: int, pad_token_id: int, bucket_count: int, max_tokens: int, layers: int, width: int
) -> Classifier:
    """Build a small random decoder over the served model's vocabulary; torch's seed determines its weights. Classifies
    from the hidden state of the last token. width: hidden size, a multiple of 32; heads are 32 wide."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=max_tokens,
        num_labels=bucket_count,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Classifier(LlamaForSequenceClassification(config), None)


def classifier_from_base(base: str, served_tokenizer: Any, bucket_count: int) -> Classifier:
    """Load a pretrained model (a path, a hub id or a bundled name) with a new head for the buckets. Raises
    ConfigError("--base") when it cannot be loaded as a sequence classifier."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = resolve_model(base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSequenceClassification.from_pretrained(
            source, num_labels=bucket_count, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        raise ConfigError("--base", f"{base!r} cannot be loaded as a sequence classifier: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if model.config.pad_token_id is None:
        raise ConfigError("--base", f"{base!r} has neither a padding nor an end token")
    shared = tokenizer.is_fast and tokenizer.backend_tokenizer.to_str() == served_tokenizer.backend_tokenizer.to_str()
    return Classifier(model, None if shared else tokenizer)
