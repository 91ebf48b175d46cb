"""Reads a checkpoint's config.json, and explains why one cannot be served. Imports neither torch nor vLLM."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaveri.errors import ConfigError

_PYDANTIC_LINK = "For further information visit"
"""Start of the last line of a validation error."""


def read_config_json(folder: Path) -> Mapping[str, Any]:
    """Return the values of a folder's config.json. Raises ConfigError."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", f"{path} cannot be read: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise ConfigError("model", f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def stored_dtype(values: Mapping[str, Any]) -> str | None:
    """Return the element type in config.json, as in "bfloat16"; None if it has none. Pure."""
    for part in _parts(values):
        named = part.get("dtype") or part.get("torch_dtype")
        if isinstance(named, str):
            return named.removeprefix("torch.")
    return None


def quantization_method(values: Mapping[str, Any]) -> str | None:
    """Return the quantization method of the weights, as in "gptq"; None for plain ones. Pure."""
    for part in _parts(values):
        described = part.get("quantization_config") or part.get("compression_config")
        if isinstance(described, dict):
            return str(described.get("quant_method") or described.get("quant_algo") or "an unnamed method")
    return None


def refusal(folder: Path, values: Mapping[str, Any], error: Exception, engine: str) -> ConfigError:
    """Return the error for a checkpoint that a library could not load: one sentence, with what to use instead."""
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
    """Return the parts that may hold the values; for a model of text and images, the text model's part first."""
    inner = values.get("text_config")
    return [inner, values] if isinstance(inner, dict) else [values]
