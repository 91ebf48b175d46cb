"""Instances of both phases that share machines: DistServe's algorithm 2. Pure.

Where the link between machines is slow, KV must not cross it. KV goes only between the same layers of both phases, so
the layers are divided into as many segments as the unit has machines, and machine k holds segment k of each instance
(arXiv 2401.09670, section 4.2: "colocating prefill and decoding segments of the same stage within a single node").
A segment has the TP of its phase, and PP / machines stages. The machines must divide both PP, and PP itself may differ:
with m machines, and one instance of each phase, TP_p PP_p / m + TP_d PP_d / m GPUs must be in one machine. The authors'
simulator (search_configs.py of LLMServe/DistServe) accepts the same pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.planner.catalog import Hardware
from kaveri.planner.placement_search import PhaseOption


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnit:
    """Instances that share machines, with a segment of each in every machine."""

    prefill: PhaseOption
    prefill_count: int
    decode: PhaseOption
    decode_count: int
    machines: int

    @property
    def gpus(self) -> int:
        prefill, decode = self.prefill.parallelism, self.decode.parallelism
        return self.prefill_count * prefill.gpus + self.decode_count * decode.gpus

    @property
    def goodput_per_s(self) -> float:
        """Goodput of the slower phase. Each phase was searched by itself."""
        return min(self.prefill_count * self.prefill.goodput_per_s, self.decode_count * self.decode.goodput_per_s)

    def count(self, rate_per_s: float) -> int:
        """Return how many units carry the rate."""
        return math.ceil(rate_per_s / self.goodput_per_s - 1e-9)


def cheapest_unit(
    prefill_options: Sequence[PhaseOption], decode_options: Sequence[PhaseOption], rate_per_s: float, hardware: Hardware
) -> NodeUnit:
    """Return the unit that carries the rate with the fewest GPUs; of equals, the best per GPU, in few machines.

    Raises ConfigError when no prefill and decode instance with a common number of segments fit into machines.
    """
    units = [
        NodeUnit(
            prefill=prefill, prefill_count=prefill_count, decode=decode, decode_count=decode_count, machines=machines
        )
        for prefill in prefill_options
        for decode in decode_options
        if prefill.goodput_per_s > 0 and decode.goodput_per_s > 0
        for machines in _common_divisors(prefill.parallelism.pp, decode.parallelism.pp)
        for prefill_count, decode_count in _divisions(
            prefill.parallelism.gpus // machines, decode.parallelism.gpus // machines, hardware.gpus_per_node
        )
    ]
    if not units:
        reason = (
            f"is given; no prefill and decode instance, both within their SLOs, fit together into the"
            f" {hardware.gpus_per_node} GPUs of a machine of {hardware.name}, also when divided among machines, whose"
            f" number must divide the PP of both"
        )
        raise ConfigError("--same-node", reason)
    return min(units, key=lambda unit: (unit.count(rate_per_s) * unit.gpus, -unit.goodput_per_s / unit.gpus, unit.gpus))


def _common_divisors(one: int, other: int) -> list[int]:
    common = math.gcd(one, other)
    return [divisor for divisor in range(1, common + 1) if common % divisor == 0]


def _divisions(prefill_gpus: int, decode_gpus: int, gpus: int) -> list[tuple[int, int]]:
    """Return all pairs of counts of prefill and decode segments that fit into one machine."""
    return [
        (prefill_count, decode_count)
        for prefill_count in range(1, gpus // prefill_gpus + 1)
        for decode_count in range(1, (gpus - prefill_count * prefill_gpus) // decode_gpus + 1)
    ]
