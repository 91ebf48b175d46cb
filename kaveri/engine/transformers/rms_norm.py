"""RMS norms (Zhang and Sennrich 2019, equation 4) by torch's layer norm, which is one kernel on a CPU; theirs are six.

The layer norm of (x, -x) is the RMS norm of x followed by that of -x: its mean is zero and its mean square that of x.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; rounded before the weight, as in transformers."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        """weight: [size]."""
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._size = len(weight)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [..., size], of the weight's dtype. Returns the same shape."""
        both = layer_norm(torch.cat((rows, -rows), -1), (2 * self._size,), eps=self._eps)
        return both[..., : self._size] * self.weight


@torch.inference_mode()
def replace_rms_norms(model: nn.Module) -> None:
    """Replace the RMS norms that lie on a CPU. A norm of another kind is recognized by its output, and stays."""
    for name, module in list(model.named_modules()):
        eps = getattr(module, "variance_epsilon", None)
        weight = getattr(module, "weight", None)
        if eps is None or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.device.type != "cpu":
            continue
        replacement = RmsNorm(weight, eps)
        if _same(module, replacement, weight):
            model.set_submodule(name, replacement)


def _same(module: Any, replacement: RmsNorm, weight: Tensor) -> bool:
    # Some take a gate as well.
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    scales = torch.tensor([[1e-3], [1.0], [30.0]])
    rows = (torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)) * scales).to(weight.dtype)
    return torch.allclose(module(rows), replacement(rows), rtol=8 * torch.finfo(weight.dtype).eps)
