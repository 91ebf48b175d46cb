"""The element type that vLLM is told to compute in."""

from typing import Any

import pytest

from kaveri.engine.vllm.loading import vllm_dtype


@pytest.mark.parametrize(
    ("asked", "values", "on_cpu", "has_bfloat16", "told"),
    [
        ("auto", {"dtype": "bfloat16"}, True, False, "float32"),
        ("auto", {"dtype": "float32"}, True, False, "float32"),
        ("auto", {}, True, False, "float32"),
        ("auto", {"dtype": "bfloat16"}, True, True, "auto"),
        ("auto", {"dtype": "bfloat16"}, False, False, "auto"),
        ("auto", {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, True, False, "auto"),
        ("bfloat16", {"dtype": "bfloat16"}, True, False, "bfloat16"),
    ],
)
def test_vllm_computes_in_float32_where_the_cpu_has_no_bfloat16(
    asked: str, values: dict[str, Any], on_cpu: bool, has_bfloat16: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": has_bfloat16, "amx_bf16": False})
    assert vllm_dtype(asked, values, on_cpu) == told
