"""The M/D/1 queue of DistServe's section 3.1 (arXiv 2401.09670): average TTFT in closed form. Pure.

It holds for prompts of one length, Poisson arrivals, first come first served, and one prompt in a step.
"""

import math


def average_ttft_s(rate_per_s: float, service_s: float) -> float:
    """Equation 1: D + R D^2 / (2 (1 - R D)). Infinite from R D = 1 on."""
    return service_s + _wait_s(rate_per_s, service_s)


def average_ttft_inter_op_s(rate_per_s: float, service_s: float, stages: int = 2) -> float:
    """Equation 2, for any number of equal stages: D + R D_m^2 / (2 (1 - R D_m)), where D_m is D / stages.

    For two stages that is the paper's D + R D^2 / (4 (2 - R D)).
    """
    return service_s + _wait_s(rate_per_s, service_s / stages)


def average_ttft_intra_op_s(rate_per_s: float, service_s: float, speedup: float) -> float:
    """Equation 3: D / K + R D^2 / (2 K (K - R D)), where K is the speed-up of tensor parallelism."""
    return average_ttft_s(rate_per_s, service_s / speedup)


def highest_rate_per_s(service_s: float, stages: int = 1) -> float:
    """Arrival rate from which on the queue grows without end: no rate above it meets any SLO for long."""
    return stages / service_s if service_s > 0 else math.inf


def _wait_s(rate_per_s: float, service_s: float) -> float:
    busy = rate_per_s * service_s
    return rate_per_s * service_s**2 / (2 * (1 - busy)) if busy < 1 else math.inf
