"""Random checkpoints of real transformers architectures for tests: seconds to make, milliseconds to run."""

from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "opt", "gpt2")
"""Tested with every engine. Others: phi3, gemma2 (soft-capped scores, sliding windows in every other layer)."""

_ROTARY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY | {"head_dim": 24},
    # A window that prompts of tests outgrow.
    "mistral": _ROTARY | {"sliding_window": 72, "head_dim": 16},
    "phi3": _ROTARY,
    "gemma2": _ROTARY | {"sliding_window": 40, "head_dim": 16, "attn_logit_softcapping": 2.0},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False},
}


def make_tiny_model(
    folder: Path | str,
    architecture: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 320,
    max_positions: int = 1024,
    eos_token_id: int | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random float32 checkpoint into `folder` (created if needed); return the folder. architecture: of
    ARCHITECTURES, or gemma2 or phi3. eos_token_id: None: the model never ends an answer. tokenizer: add a byte-level
    one, whose ids [0, 256) are bytes. overrides: fields of the configuration. Weights have a standard deviation of 0.12
    and embeddings are untied: with the usual 0.02 a random model repeats one token, which proves little."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shape = {
        **_SHAPES[architecture],
        "vocab_size": vocab_size,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.12,
        "init_std": 0.12,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        **overrides,
    }
    if architecture == "opt":
        shape |= {"pad_token_id": 1}  # its position table is built around one
    if architecture == "gpt2":
        shape["n_positions"] = shape.pop("max_position_embeddings")
    config = AutoConfig.for_model(architecture, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.12 if "embed" not in name and "wte" not in name else 0.5)
    model.save_pretrained(folder)
    if tokenizer:
        make_byte_tokenizer(folder, vocab_size, eos_token_id)
    return folder


def make_byte_tokenizer(folder: Path, vocab_size: int, eos_token_id: int | None) -> None:
    """Write a byte-level tokenizer: ids [0, 256) are bytes, other ids have their numbers as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert vocab_size >= 257, "a byte-level tokenizer needs 256 bytes and one end"
    # GPT-2's printable stand-ins for the 256 bytes, in byte order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for place, byte in enumerate(byte for byte in range(256) if byte not in stand_ins):
        stand_ins[byte] = chr(256 + place)
    vocabulary = {stand_ins[byte]: byte for byte in range(256)}
    end = eos_token_id if eos_token_id is not None and eos_token_id >= 256 else 256
    vocabulary |= {("<end>" if index == end else f"<{index}>"): index for index in range(256, vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.save_pretrained(folder)
