"""Reads a checkpoint's config.json, element type and fingerprint, and explains why it cannot be served."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from kaveri.errors import ConfigError
from kaveri.telemetry.logs import get_logger

_PYDANTIC_LINK = "For further information visit"
"""Start of the last line of a pydantic validation error."""
_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""By element type, the torch.cpu capabilities that have matrix instructions for it: two of x86, one of ARM."""
_WHOLE_FILE_BYTES = 2**30
_SAMPLE_COUNT = 256
_SAMPLE_BYTES = 4096


def read_config_json(folder: Path) -> Mapping[str, Any]:
    """Return the values in the config.json of a model's folder. Raises ConfigError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", f"{path} cannot be read: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def stored_dtype(values: Mapping[str, Any]) -> str | None:
    """Return the element type of the weights, such as "bfloat16", from config.json; None if it is not given. Pure."""
    for part in _parts(values):
        named = part.get("dtype") or part.get("torch_dtype")
        if isinstance(named, str):
            return named.removeprefix("torch.")
    return None


def quantization_method(values: Mapping[str, Any]) -> str | None:
    """Return the quantization method of the weights, such as "gptq"; None if they are not quantized. Pure."""
    for part in _parts(values):
        described = part.get("quantization_config") or part.get("compression_config")
        if isinstance(described, dict):
            return str(described.get("quant_method") or described.get("quant_algo") or "an unnamed method")
    return None


def computed_dtype(stored: str, capabilities: Mapping[str, Any]) -> str:
    """Return the dtype to compute a checkpoint in on a CPU: float32 if the CPU lacks instructions for `stored`.

    capabilities: torch.cpu.get_capabilities(). On architectures other than x86 and ARM `stored` is kept. Pure.
    """
    known = [name for name in _INSTRUCTIONS.get(stored, ()) if name in capabilities]
    return "float32" if known and not any(capabilities[name] for name in known) else stored


def auto_dtype(stored: str, on_cpu: bool) -> str:
    """Return the dtype that "auto" means for `stored`: computed_dtype() on a CPU, else `stored`. Logs a change."""
    if not on_cpu:
        return stored
    import torch

    chosen = computed_dtype(stored, torch.cpu.get_capabilities())
    if chosen != stored:
        get_logger().warning(
            "dtype_widened",
            stored=stored,
            dtype=chosen,
            lacking=" or ".join(name for name in _INSTRUCTIONS[stored][:2]),
            advice=f"--dtype {stored} computes in the stored type, which is slow on this CPU; all instances of a model "
            "must compute in one type: on unlike machines give --dtype to all of them",
        )
    return chosen


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers loads from `folder`. Raises ConfigError when there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError("model", f"{index} is no index of safetensors files") from error
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError("model", f"{folder} holds no {file.name}; only safetensors weights are loaded")
    return files


def fingerprint(folder: Path) -> str:
    """Return 32 hexadecimal digits (xxh3_128) of the configuration and of the weight files' names, sizes and contents.

    Files above 1 GiB are sampled: the header and 256 evenly spaced pages. Checkpoints of one shape that differ only
    outside the samples get the same fingerprint.
    """
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_FILE_BYTES:
                while chunk := stream.read(2**22):
                    digest.update(chunk)
            else:
                header_bytes = int.from_bytes(stream.read(8), "little")
                digest.update(stream.read(min(header_bytes, _WHOLE_FILE_BYTES)))
                for sample in range(_SAMPLE_COUNT):
                    stream.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLE_COUNT - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def refusal(folder: Path, values: Mapping[str, Any], error: Exception, engine: str) -> ConfigError:
    """Return the error for a checkpoint that a library could not load: one sentence with cause and advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_PYDANTIC_LINK)] or [type(error).__name__]
    # vLLM's validation errors end with the cause. Some of transformers take two lines.
    why = lines[-1] if engine == "vllm" else " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if isinstance(error, KeyError):
        why = f"{why} is not known"
    method = quantization_method(values)
    if method is None:
        return ConfigError("model", f"{folder} cannot be loaded: {why:.300}")
    other = "" if engine == "vllm" else f", or --engine vllm where it has kernels for {method}"
    advice = f"use the checkpoint that is not quantized{other}"
    return ConfigError(
        "model", f"{folder} is quantized with {method}, which cannot be served here: {advice} ({why:.200})"
    )


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = values.get("text_config")
    return [inner, values] if isinstance(inner, dict) else [values]
