"""State shared by the layers of a step: calls of the listener, and groups of decoding sequences."""

from typing import Any

import pytest
import torch

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.step import pack
from kaveri.kv.layout.layout import KvLayout

LAYOUT = KvLayout("model", layer_count=3, block_tokens=16, kv_head_count=8, head_dim=64, dtype="bfloat16")


def decoding(context_tokens: int) -> SequenceSlice:
    block_ids = range(LAYOUT.block_count(context_tokens))
    return SequenceSlice([1], context_tokens - 1, block_ids, True, 0, ResolvedParams())


class SlowCopy:
    """Stands for a CUDA event."""

    def __init__(self, heard: list[Any], layer: int) -> None:
        self._heard = heard
        self._layer = layer

    def synchronize(self) -> None:
        self._heard.append(f"waited for {self._layer}")


def test_a_layer_is_told_of_when_its_copy_is_done_and_the_next_layer_has_been_begun() -> None:
    heard: list[Any] = []
    step = pack([decoding(20)], LAYOUT, torch.device("cpu"), heard.append)
    for layer in range(3):
        heard.append(f"computed {layer}")
        step.tell(layer, SlowCopy(heard, layer))  # type: ignore[arg-type]
    step.tell_last()
    step.tell_last()
    assert heard == ["computed 0", "computed 1", "waited for 0", 0, "computed 2", "waited for 1", 1, "waited for 2", 2]


def test_a_layer_that_needs_no_copy_is_told_of_at_once() -> None:
    heard: list[int] = []
    step = pack([decoding(20)], LAYOUT, torch.device("cpu"), heard.append)
    step.tell(0, None)
    assert heard == [0]
    step.tell_last()
    assert heard == [0]


# A tensor on torch's meta device has no numbers: enough to be packed as for a GPU.
@pytest.mark.parametrize(("device", "group_count"), [("cpu", 8), ("meta", 1)])
def test_a_gpu_pads_where_a_cpu_makes_another_group(device: str, group_count: int) -> None:
    batch = [decoding(128 * (1 + index)) for index in range(8)]
    step = pack(batch, LAYOUT, torch.device(device), None)
    assert len(step.decodes) == group_count
