"""Chooses the element type for `--dtype auto`. Imports torch only to read the CPU's abilities."""

from collections.abc import Mapping
from typing import Any

from kaveri.telemetry.logs import get_logger

_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
"""CPU capabilities of torch.cpu, by the element type whose matrices they multiply: two of x86, one of ARM."""


def computed_dtype(stored: str, capabilities: Mapping[str, Any]) -> str:
    """Return the type to compute a checkpoint in on a CPU: float32 if the CPU lacks instructions for the stored one.

    capabilities: torch.cpu.get_capabilities(). For architectures other than x86 and ARM the stored type is kept, as
    nothing is known. Pure.
    """
    known = [name for name in _INSTRUCTIONS.get(stored, ()) if name in capabilities]
    return "float32" if known and not any(capabilities[name] for name in known) else stored


def auto_dtype(stored: str, on_cpu: bool) -> str:
    """Return the meaning of `auto` for a checkpoint of this type: computed_dtype() on a CPU, else the stored type. Logs
    it if it differs."""
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
