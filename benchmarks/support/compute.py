"""Replaces a model's compute in benchmarks without a model: off the CPU a wait, on the CPU products of matrices."""

import os
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is there

import numpy as np


def wait_until(until_s: float) -> None:
    """Sleeps until `until_s` of time.perf_counter(), as the timed engine does between its layers."""
    left_s = until_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class Multiplier:
    """Computes on one thread: as many products of small matrices as take the time asked for on an idle core."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).random((128, 128), np.float32)
        self._out = np.empty_like(self._matrix)
        self._multiply(50)
        self._once_s = min(self._multiply(20) for _ in range(10)) / 20

    def __call__(self, seconds: float) -> None:
        """Returns later where something else takes the core."""
        self._multiply(max(1, round(seconds / self._once_s)))

    def _multiply(self, count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            np.matmul(self._matrix, self._matrix, self._out)
        return time.perf_counter() - began_s
