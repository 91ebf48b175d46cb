"""Values of a config.json, and the dtype chosen for a checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.checkpoint import computed_dtype, quantization_method, refusal, stored_dtype

AVX2 = {"avx2": True, "avx512_bf16": False, "amx_bf16": False, "avx512_fp16": False, "amx_fp16": False}


@pytest.mark.parametrize(
    ("stored", "capabilities", "computed"),
    [
        ("bfloat16", AVX2, "float32"),
        ("float16", AVX2, "float32"),
        ("float32", AVX2, "float32"),
        ("bfloat16", AVX2 | {"avx512_bf16": True}, "bfloat16"),
        ("bfloat16", AVX2 | {"amx_bf16": True}, "bfloat16"),
        ("float16", AVX2 | {"avx512_bf16": True}, "float32"),
        ("float16", AVX2 | {"amx_fp16": True}, "float16"),
        ("bfloat16", {"neon": True, "bf16": False}, "float32"),
        ("bfloat16", {"neon": True, "bf16": True}, "bfloat16"),
        ("bfloat16", {"architecture": "another"}, "bfloat16"),
        ("float8_e4m3fn", AVX2, "float8_e4m3fn"),
    ],
)
def test_a_type_without_instructions_is_computed_in_float32(
    stored: str, capabilities: dict[str, Any], computed: str
) -> None:
    assert computed_dtype(stored, capabilities) == computed


def test_the_text_models_own_values_come_first() -> None:
    assert stored_dtype({"torch_dtype": "float16"}) == "float16"
    assert stored_dtype({"dtype": "torch.bfloat16"}) == "bfloat16"
    assert stored_dtype({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}) == "bfloat16"
    assert stored_dtype({"dtype": None}) is None
    assert quantization_method({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == "awq"
    assert quantization_method({"quantization_config": None}) is None


def test_vllms_reason_is_its_last_line() -> None:
    error = ValueError(
        "1 validation error for ModelConfig\n  Value error, no such thing\n    For further information visit a link"
    )
    assert "no such thing" in str(refusal(Path("m"), {}, error, "vllm"))
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    assert "--engine vllm" not in str(refusal(Path("m"), quantized, error, "vllm"))
    assert "--engine vllm" in str(refusal(Path("m"), quantized, error, "transformers"))
