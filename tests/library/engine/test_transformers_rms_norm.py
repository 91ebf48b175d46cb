"""The RMS norm by layer norm equals the models' own, and replaces no other norm."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kaveri.engine.transformers.cpu_layers import RmsNorm, replace_rms_norms

SIZE = 24


class OffsetNorm(nn.Module):
    """RMS norm as in Gemma: weights are stored as differences from one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        return rms_norm(rows, self.weight.shape, None, self.variance_epsilon) * (1 + self.weight)


class GatedNorm(OffsetNorm):
    """RMS norm as in Mamba: equals Llama's without a gate."""

    def forward(self, rows: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = rms_norm(rows, self.weight.shape, self.weight, self.variance_epsilon)
        return normed if gate is None else normed * gate


def norm_of(kind: Any, dtype: torch.dtype) -> Any:
    norm = kind(SIZE).to(dtype).requires_grad_(False)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_norm_is_replaced_and_rounds_as_the_models_own(dtype: torch.dtype) -> None:
    own = norm_of(LlamaRMSNorm, dtype)
    model = nn.Sequential(own)
    replace_rms_norms(model)
    assert isinstance(model[0], RmsNorm)
    # Tiny rows, too, where epsilon counts; zeros; and rows with gaps between them.
    rows = torch.randn(1, 200, 2 * SIZE, generator=torch.Generator().manual_seed(2))[..., :SIZE]
    for scale in (1e-3, 1.0, 100.0, 0.0):
        scaled = (rows * scale).to(dtype)
        ours, theirs = model(scaled), own(scaled)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        if dtype != torch.float32:
            assert (ours == theirs).float().mean() > 0.99


@pytest.mark.parametrize("kind", [OffsetNorm, GatedNorm])
def test_norm_of_another_kind_stays(kind: type[nn.Module]) -> None:
    model = nn.Sequential(norm_of(kind, torch.float32))
    replace_rms_norms(model)
    assert type(model[0]) is kind
