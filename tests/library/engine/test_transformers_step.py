"""State shared by the layers of a step: calls of the listener, and groups of decoding sequences."""

from typing import Any

import pytest
import torch

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.transformers.attention import report_last
from kaveri.engine.transformers.step import LayerReports, pack
from kaveri.kv.layout.layout import KvLayout

LAYOUT = KvLayout("model", layer_count=3, block_tokens=16, kv_head_count=8, head_dim=64, dtype="bfloat16")


def decoding(context_tokens: int) -> SequenceSlice:
    block_ids = range(LAYOUT.block_count(context_tokens))
    return SequenceSlice([1], context_tokens - 1, block_ids, True, 0, ResolvedParams())


class SlowCopy:
    def __init__(self, heard: list[Any]) -> None:
        self._heard = heard

    def synchronize(self) -> None:
        self._heard.append("waited")


def test_layer_is_reported_once_when_its_copy_is_done() -> None:
    heard: list[Any] = []
    reports = LayerReports(heard.append, torch.tensor([0]), (2, SlowCopy(heard)))  # type: ignore[arg-type]
    report_last(reports)
    report_last(reports)
    assert heard == ["waited", 2]


# A tensor on torch's meta device has no numbers: enough to be packed as for a GPU.
@pytest.mark.parametrize(("device", "group_count"), [("cpu", 8), ("meta", 1)])
def test_a_gpu_pads_where_a_cpu_makes_another_group(device: str, group_count: int) -> None:
    batch = [decoding(128 * (1 + index)) for index in range(8)]
    step = pack(batch, LAYOUT, torch.device(device), None)
    assert len(step.decodes) == group_count
