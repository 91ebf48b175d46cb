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
    """Prefill and decode instances that share machines, with an equal part of each instance in each machine."""

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
        """Requests per second within the SLOs: the lower of the two phases' goodputs, each found by itself."""
        return min(self.prefill_count * self.prefill.goodput_per_s, self.decode_count * self.decode.goodput_per_s)

    def count(self, rate_per_s: float) -> int:
        """Return the number of such units that the rate requires."""
        return math.ceil(rate_per_s / self.goodput_per_s - 1e-9)


def cheapest_unit(
    prefill_options: Sequence[PhaseOption], decode_options: Sequence[PhaseOption], rate_per_s: float, hardware: Hardware
) -> NodeUnit:
    """Return the unit that serves the rate with the fewest GPUs; of equals, the best per GPU, then the smallest.

    Raises ConfigError when no pair of options, split into the same number of segments, fits into machines.
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
    """Return all pairs (prefill segments, decode segments) that fit into the GPUs of one machine."""
    return [
        (prefill_count, decode_count)
        for prefill_count in range(1, gpus // prefill_gpus + 1)
        for decode_count in range(1, (gpus - prefill_count * prefill_gpus) // decode_gpus + 1)
    ]
