"""An engine that raises in the steps of some requests: a plug-in for tests of real processes.

A request says by its seed where it raises: FORWARD + k in the forward pass of a step that is to draw token k of its
answer, or that computes tokens before it; DRAW + k in that token's draw, which must be a sampled one.
"""

from collections.abc import Sequence

from torch import Tensor

from kaveri.engine.factory import transformers_runner
from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.runner import Drawn, LayerListener, ModelRunner, SequenceSlice
from kaveri.engine.transformers import sampler

FORWARD = 1_000_000
DRAW = 2_000_000
BUILDER = f"{__name__}:deadly_transformers"
"""For --engine."""


def deadly_transformers(settings: EngineSettings) -> ModelRunner:
    """The builder of an engine that computes."""
    race = sampler._race

    def raises(logits: Tensor, slices: Sequence[SequenceSlice]) -> Tensor:
        if any(piece.params.seed == DRAW + piece.draw_index for piece in slices):
            raise IndexError("a draw that raises")
        return race(logits, slices)

    sampler._race = raises
    return _raising_in_forward_passes(transformers_runner(settings))


def _raising_in_forward_passes(runner: ModelRunner) -> ModelRunner:
    run = runner.run

    def raises(batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        if any(piece.params.seed == FORWARD + piece.draw_index for piece in batch):
            raise RuntimeError("a forward pass that raises")
        return run(batch, on_layer)

    runner.run = raises  # type: ignore[method-assign]
    return runner
