"""Faster layers for a CPU, which replace a loaded model's own: packed and joined linear layers, and RMS norms."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

_TYPICAL_ROWS = 16
"""Number of rows for which oneDNN chooses the layout of packed weights: the one for 4 to 32 rows is among the best for
a chunk of 512, too. For one row of a float32 matrix of many MiB it is a fifth slower than no packing."""


class LinearCall(NamedTuple):
    """Record of one call of a linear layer during a run of the model."""

    name: str
    input: Tensor
    content: Tensor
    """A copy of the input at the time of the call."""


@contextmanager
def watched_linears(model: nn.Module) -> Iterator[list[LinearCall]]:
    """Context manager: record the calls of the model's linear layers inside the with block."""
    calls: list[LinearCall] = []

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            # A layer that is called with its input by name is not recorded, and so not replaced.
            calls.extend(LinearCall(name, rows, rows.clone()) for rows in inputs)

        return module.register_forward_pre_hook(note)

    hooks = [watch(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def pack_linears(model: nn.Module, calls: Sequence[LinearCall]) -> None:
    """Pack the linear layers in `calls`, recorded in one run. The model then only runs in inference mode.

    torch packs a weight again in every call. Here that is done once, in oneDNN's layout, and layers that share an input
    (query, key and value projections, or gate and up) become one matrix. Packed weights replace the layers' own, so
    memory does not grow.

    Not replaced: layers that oneDNN cannot compute here, and those whose weight another module shares (an output layer
    tied to the embedding would need its weight twice).
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    packable = [
        call
        for call in calls
        if owners[id(_linear(model, call.name).weight)] == 1 and _computes(_linear(model, call.name).weight)
    ]
    for names in _joinable(model, packable):
        product = PackedProduct.of([_linear(model, name) for name in names])
        for index, name in enumerate(names):
            model.set_submodule(name, PackedLinear(product, index))


@dataclass(eq=False, slots=True)
class PackedProduct:
    """Matrix product of linear layers that share their input (or of one): the first one called computes it for all."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]
    """Number of outputs of each layer."""
    rows: Tensor | None = None
    """Input of the last product, while not all layers have taken their outputs."""
    parts: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> "PackedProduct":
        """Pack layers of one dtype and one in_features, all with a bias or all without."""
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), _TYPICAL_ROWS)
        return cls(weight, torch.cat(biases) if biases else None, [layer.out_features for layer in layers])


class PackedLinear(nn.Module):
    """Module that replaces a linear layer. index: the layer's position among those of the product."""

    def __init__(self, product: PackedProduct, index: int = 0) -> None:
        super().__init__()
        # Not a parameter: models may ask for its dtype, and nothing else can be done with it.
        self.weight = product.weight
        self._product, self._index = product, index

    def forward(self, rows: Tensor) -> Tensor:
        """Compute the layer. rows: [..., in_features]. Returns [..., out_features], strided if layers share the
        product."""
        product, index = self._product, self._index
        # The same object, kept alive from here: another tensor cannot have its identity.
        if rows is not product.rows or index not in product.parts:
            outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, product.weight, product.bias, "none", [], "")
            if len(product.sizes) == 1:
                return outputs
            product.rows, product.parts = rows, dict(enumerate(torch.split(outputs, product.sizes, -1)))
        part = product.parts.pop(index)
        if not product.parts:
            product.rows = None
        return part


def _joinable(model: nn.Module, calls: Sequence[LinearCall]) -> Iterable[list[str]]:
    times = Counter(call.name for call in calls)
    groups: dict[tuple[object, ...], list[LinearCall]] = {}
    for call in calls:
        layer = _linear(model, call.name)
        if times[call.name] > 1:
            # Its turns could not be told apart.
            groups[call.name,] = [call]
            continue
        group = groups.setdefault((id(call.input), layer.weight.dtype, layer.bias is None), [])
        # Changed in place since the first call: the same tensor with other numbers.
        if group and not torch.equal(group[0].content, call.content):
            groups[call.name,] = [call]
        else:
            group.append(call)
    return [[call.name for call in group] for group in groups.values()]


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


def _computes(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


class RmsNorm(nn.Module):
    """RMS norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight, rounded before the weight.

    RMS norm (Zhang and Sennrich 2019, equation 4) by torch's layer norm, which is one kernel on a CPU; that of
    transformers is six. The layer norm of (x, -x) is the RMS norm of x followed by that of -x: its mean is 0, its mean
    square that of x.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._size = len(weight)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalize rows: [..., size], of the weight's dtype. Returns the same shape."""
        both = layer_norm(torch.cat((rows, -rows), -1), (2 * self._size,), eps=self._eps)
        return both[..., : self._size] * self.weight


@torch.inference_mode()
def replace_rms_norms(model: nn.Module) -> None:
    """Replace a model's RMS norms on a CPU by RmsNorm, after a numeric comparison: other kinds of norms stay."""
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
