"""Checkpoint folders with one fault each, made from a valid one; no engine can serve them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "aqlm": {"quant_method": "aqlm"},
}
"""quantization_config in config.json, by method."""


def edit(folder: Path, name: str, **changes: Any) -> None:
    """Set fields of a JSON file, which is created if needed."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def _cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


BROKEN: dict[str, Callable[[Path], object]] = {
    "config.json is a list": lambda folder: (folder / "config.json").write_text("[]"),
    "config.json is cut off": lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
    "config.json is deep": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "config.json is bytes": lambda folder: (folder / "config.json").write_bytes(bytes(range(256))),
    "no model type": lambda folder: (folder / "config.json").write_text("{}"),
    "unknown model type": lambda folder: edit(folder, "config.json", model_type="nobody-knows-it"),
    "encoder and decoder": lambda folder: edit(folder, "config.json", model_type="t5"),
    "embeddings": lambda folder: edit(folder, "config.json", model_type="clip", architectures=["CLIPModel"]),
    "images": lambda folder: edit(folder, "config.json", model_type="vit"),
    "heads in words": lambda folder: edit(folder, "config.json", num_attention_heads="four"),
    "no heads": lambda folder: edit(folder, "config.json", num_attention_heads=0),
    "layers below 0": lambda folder: edit(folder, "config.json", num_hidden_layers=-1),
    "padding beyond the vocabulary": lambda folder: edit(folder, "config.json", pad_token_id=10**6),
    "ends in words": lambda folder: edit(folder, "config.json", eos_token_id="</s>"),
    "unknown activation": lambda folder: edit(folder, "config.json", hidden_act="nobody-knows-it"),
    "unknown element type": lambda folder: edit(folder, "config.json", dtype="float9"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut off": _cut,
    "weights empty": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "index of nothing": lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
    "index of a missing file": lambda folder: (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "gone.safetensors"}}'
    ),
    "generation_config is a list": lambda folder: (folder / "generation_config.json").write_text("[1]"),
    "generation_config is cut off": lambda folder: (folder / "generation_config.json").write_text('{"a'),
}
"""Functions that break a folder, by fault. No engine serves the result."""


def broken_copy(source: Path, target: Path, fault: str) -> Path:
    """Copy a valid folder, with a fault of BROKEN or a method of QUANTIZED."""
    folder = Path(shutil.copytree(source, target))
    if fault in QUANTIZED:
        edit(folder, "config.json", quantization_config=QUANTIZED[fault])
    else:
        BROKEN[fault](folder)
    return folder
