"""Packed linear layers compute the same as the originals, are joined only if that is exact, and free old weights."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kaveri.engine.transformers.cpu_layers import PackedLinear, pack_linears, watched_linears
from kaveri.engine.transformers.loading import load_runner
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this build of torch has no oneDNN"
)
WIDTH = 24


class Projections(nn.Module):
    def __init__(self, call: Callable[["Projections", Tensor], tuple[Tensor, ...]], bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(WIDTH, size, bias) for size in (40, 8, WIDTH))
        self._call = call

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self._call(self, rows)


def siblings(model: Projections, rows: Tensor) -> tuple[Tensor, ...]:
    return model.first(rows), model.second(rows), model.third(rows)


def chain(model: Projections, rows: Tensor) -> tuple[Tensor, ...]:
    return (model.first(model.third(model.third(rows))),)


def changed_in_between(model: Projections, rows: Tensor) -> tuple[Tensor, ...]:
    rows = rows.clone()
    before = model.first(rows)
    rows.mul_(2)
    return before, model.second(rows)


def random_rows(count: int) -> Tensor:
    return torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(count))


@torch.inference_mode()
def pack(model: nn.Module) -> None:
    with watched_linears(model) as calls:
        model(random_rows(2))
    pack_linears(model, calls)


@torch.inference_mode()
def require_same(model: nn.Module, expected: nn.Module) -> None:
    for count in (1, 5, 40, 0):
        rows = random_rows(count)
        for ours, theirs in zip(model(rows), expected(rows), strict=True):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs)


def stored_weights(model: nn.Module) -> int:
    return len({id(module.weight) for module in model.modules() if hasattr(module, "weight")})


@pytest.mark.parametrize("bias", [True, False])
def test_layers_with_the_same_input_become_one_product_and_give_their_own_results(bias: bool) -> None:
    model = Projections(siblings, bias)
    pack(model)
    assert stored_weights(model) == 1
    require_same(model, Projections(siblings, bias))


def test_layers_with_inputs_of_their_own_are_packed_one_by_one() -> None:
    model = Projections(chain)
    pack(model)
    assert isinstance(model.first, PackedLinear)
    assert isinstance(model.third, PackedLinear)
    assert type(model.second) is nn.Linear
    require_same(model, Projections(chain))


def test_input_that_is_changed_between_two_layers_does_not_join_them() -> None:
    model = Projections(changed_in_between)
    pack(model)
    assert isinstance(model.first, PackedLinear)
    assert isinstance(model.second, PackedLinear)
    require_same(model, Projections(changed_in_between))


def test_joined_layers_may_be_called_in_any_order_and_any_number_of_times() -> None:
    model, expected = Projections(siblings), Projections(siblings)
    pack(model)
    one, other = random_rows(3), random_rows(4)
    with torch.inference_mode():
        for name, rows in [("second", one), ("first", other), ("second", one), ("second", one), ("third", one)]:
            torch.testing.assert_close(getattr(model, name)(rows), getattr(expected, name)(rows))


def test_weight_that_another_module_uses_stays_where_it_is() -> None:
    model = Projections(siblings)
    embedding = nn.Embedding(40, WIDTH)
    embedding.weight = model.first.weight
    model.add_module("embedding", embedding)
    pack(model)
    assert type(model.first) is nn.Linear
    assert type(model.second) is not nn.Linear


def test_original_weights_are_released() -> None:
    model = Projections(siblings)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    assert len(weights) == 6
    pack(model)
    gc.collect()
    assert [weight() for weight in weights] == [None] * 6
    assert not list(model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loaded_model_is_packed_where_onednn_computes_its_dtype(dtype: str, tmp_path: Path) -> None:
    supported = {
        "float32": True,
        "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "float16": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    runner = load_runner(str(make_tiny_model(tmp_path, "llama")), dtype, "cpu", None, 16)
    linears = [module for module in runner._model.modules() if type(module) is nn.Linear]
    # Of each of 3 layers: q, k and v; o; gate and up; down. And the output layer, which is not tied.
    assert len(linears) == (0 if supported[dtype] else 3 * 7 + 1)
    if supported[dtype]:
        matrices = {id(part.weight) for part in runner._model.modules() if getattr(part, "weight", None) is not None}
        norms_and_embedding = 3 * 2 + 1 + 1
        assert len(matrices) == 3 * 4 + 1 + norms_and_embedding
