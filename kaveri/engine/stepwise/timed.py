"""A model runner with another machine's timing: tokens and KV are the fake runner's, seconds a latency model's.

Runs many instances of a large model as real services on a small machine. Blocks, batches, preemption and transfers are
those of any stepwise engine. Not modelled: the size of the KV cache, here the fake model's, and so the time to push it.
"""

import time
from collections.abc import Sequence

from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, SequenceSlice
from kaveri.latency.model import LatencyModel
from kaveri.telemetry.logs import get_logger

_LATE_FACTOR = 1.1
_LATE_REPORT_S = 10.0


class TimedRunner(FakeRunner):
    """FakeRunner whose steps take the time that a latency model predicts. model: its own timing should be 0.

    Logs a warning, at most every 10 s, if this machine is too slow to keep the predicted time.
    """

    name = "timed"

    def __init__(self, model: FakeModel, latency: LatencyModel) -> None:
        super().__init__(model)
        self.latency = latency
        self._modelled_s = 0.0
        self._taken_s = 0.0
        self._reported_s = time.monotonic()

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Compute a step, spread evenly over the layers within its predicted time. Raises the fake runner's errors."""
        started_s = time.monotonic()
        step_s = self.latency.step_s([(part.start, len(part.token_ids)) for part in batch])
        layer_s = step_s / self.layout.layer_count

        def paced(layer: int) -> None:
            _sleep_until(started_s + (layer + 1) * layer_s)
            assert on_layer is not None
            on_layer(layer)

        drawn = super().run(batch, paced if on_layer is not None else None)
        _sleep_until(started_s + step_s)
        self._account(step_s, started_s)
        return drawn

    def _account(self, step_s: float, started_s: float) -> None:
        now_s = time.monotonic()
        self._modelled_s += step_s
        self._taken_s += now_s - started_s
        if now_s - self._reported_s < _LATE_REPORT_S:
            return
        if self._taken_s > _LATE_FACTOR * self._modelled_s:
            get_logger().warning(
                "latency_model_missed",
                latency_model=self.latency.name,
                steps_took_s=round(self._taken_s, 3),
                modelled_s=round(self._modelled_s, 3),
            )
        self._modelled_s = self._taken_s = 0.0
        self._reported_s = now_s


def _sleep_until(until_s: float) -> None:
    wait_s = until_s - time.monotonic()
    if wait_s > 0:
        time.sleep(wait_s)
