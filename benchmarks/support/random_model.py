"""Writes a checkpoint with random weights in the shape of a real model, for benchmarks of engines.

    python -m benchmarks.support.random_model /tmp/llama-3.2-1b-random --device cuda

Times do not depend on the weights; what is drawn is noise. Its tokenizer is one of bytes.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.tiny_models import make_byte_tokenizer

_SHAPES = {
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "llama-3.2-3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28},
}
_HEADS = {"llama-3.2-1b": (32, 8, 64), "llama-3.2-3b": (24, 8, 128)}


def main() -> None:
    """Makes the folder where it is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=_SHAPES, default="llama-3.2-1b")
    parser.add_argument("--device", default="cpu", help="where the weights are drawn")
    given = parser.parse_args()
    head_count, kv_head_count, head_dim = _HEADS[given.shape]
    config = LlamaConfig(
        **_SHAPES[given.shape],
        num_attention_heads=head_count,
        num_key_value_heads=kv_head_count,
        head_dim=head_dim,
        vocab_size=128_256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_id=128_001,
    )
    torch.manual_seed(0)
    with torch.device(given.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(given.folder)
    make_byte_tokenizer(given.folder, config.vocab_size, config.eos_token_id)


if __name__ == "__main__":
    main()
