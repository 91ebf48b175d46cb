"""Instances of both phases that share machines: DistServe's algorithm 2. Pure.

Where the link between machines is slow, KV must not cross it (arXiv 2401.09670, section 4.2). Prefill and decode then
have the same pipeline stages, and stage k of each instance of a unit stands in the unit's machine k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.planner.hardware import Hardware
from kaveri.planner.placement_search import PhaseOption


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnit:
    """Instances that stand in the same machines, one machine for each stage."""

    prefill: PhaseOption
    prefill_count: int
    decode: PhaseOption
    decode_count: int

    @property
    def gpus(self) -> int:
        """Of the whole unit."""
        prefill, decode = self.prefill.parallelism, self.decode.parallelism
        return self.prefill_count * prefill.gpus + self.decode_count * decode.gpus

    @property
    def goodput_per_s(self) -> float:
        """Of the phase that binds. Each phase was searched by itself."""
        return min(
            self.prefill_count * self.prefill.goodput_per_s,
            self.decode_count * self.decode.goodput_per_s,
        )

    def count(self, rate_per_s: float) -> int:
        """Units that carry the rate."""
        return math.ceil(rate_per_s / self.goodput_per_s - 1e-9)


def cheapest_unit(
    prefill_options: Sequence[PhaseOption], decode_options: Sequence[PhaseOption], rate_per_s: float, hardware: Hardware
) -> NodeUnit:
    """The unit that carries the rate with the fewest GPUs; of equal ones, the best goodput per GPU.

    Raises ConfigError when no prefill and decode instance with the same stages fit into one machine.
    """
    units = [
        NodeUnit(prefill=prefill, prefill_count=prefill_count, decode=decode, decode_count=decode_count)
        for prefill in prefill_options
        for decode in decode_options
        if prefill.parallelism.pp == decode.parallelism.pp and prefill.goodput_per_s > 0 and decode.goodput_per_s > 0
        for prefill_count, decode_count in _divisions(
            prefill.parallelism.tp, decode.parallelism.tp, hardware.gpus_per_node
        )
    ]
    if not units:
        reason = (
            f"is given; no prefill and decode instance of equal PP, both within their SLOs, fit into the"
            f" {hardware.gpus_per_node} GPUs of one machine of {hardware.name}"
        )
        raise ConfigError("--same-node", reason)
    return min(units, key=lambda unit: (unit.count(rate_per_s) * unit.gpus, -unit.goodput_per_s / unit.gpus, unit.gpus))


def _divisions(prefill_tp: int, decode_tp: int, gpus: int) -> list[tuple[int, int]]:
    """How many instances of each phase fit beside each other: all pairs."""
    return [
        (prefill_count, decode_count)
        for prefill_count in range(1, gpus // prefill_tp + 1)
        for decode_count in range(1, (gpus - prefill_count * prefill_tp) // decode_tp + 1)
    ]
