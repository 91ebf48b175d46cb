"""Notices prefill instances that hang or are cut off while attempts wait for what they report. For one event loop."""

import time
from typing import Any

from grpc import aio

from kaveri.domain.view import ClusterView, InstanceRecord
from kaveri.rpc.channels import Channels
from kaveri.rpc.liveness import Liveness
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from services.router import metrics


class PrefillSteps:
    """A stream of a prefill instance's reports."""

    leaves_unheard = True

    def __init__(
        self, call: "aio.UnaryStreamCall[Any, Any]", record: InstanceRecord, *, was_connected: bool = True
    ) -> None:
        """was_connected: whether the call has left this process at once."""
        self.call = call
        self.record = record
        self.target = record.address
        self.sent_s = float("-inf") if was_connected else time.monotonic()
        """The call has left this process if the instance was heard since then."""
        self.fault = ""
        """Why this router has broken the stream off."""

    def suspect(self, after_s: float) -> None:
        """The instance has been silent for so long."""
        self.fault = f"it sent nothing for {after_s:g} s"
        self.call.cancel()


class _SilenceCheck:
    """Waits for a sign of life of an instance that has gone silent."""

    leaves_unheard = False

    def __init__(self, liveness: Liveness, target: str) -> None:
        self.target = target
        self._liveness = liveness
        self._since_s = time.monotonic()
        liveness.begin(self)

    @property
    def is_answered(self) -> bool:
        """Whether the instance has been heard since."""
        return self._liveness.heard_s.get(self.target, float("-inf")) > self._since_s

    def suspect(self, after_s: float) -> None:
        """It is still silent."""
        self._liveness.begin(self)

    def end(self) -> None:
        """The answer is not wanted any more."""
        self._liveness.end(self)


class PrefillWatch:
    """The prefill instances that one router hears reports from."""

    def __init__(self, channels: Channels, suspect_after_s: float) -> None:
        """suspect_after_s: an instance that is silent for so long, while this process runs, is suspected."""
        self._channels = channels
        self._liveness = Liveness(self._beat, suspect_after_s)
        self._silent: dict[str, tuple[InstanceRecord, _SilenceCheck]] = {}

    def begin(self, steps: PrefillSteps) -> None:
        """An attempt waits for reports. They are broken off when the instance goes silent."""
        self._liveness.begin(steps)

    def end(self, steps: PrefillSteps) -> None:
        """It does not wait any more."""
        self._liveness.end(steps)

    def heard(self, steps: PrefillSteps) -> None:
        """A report has come."""
        self._liveness.heard(steps.target)

    def has_reached(self, steps: PrefillSteps) -> bool:
        """Whether the instance may know of the call."""
        return self._liveness.heard_s.get(steps.target, float("-inf")) >= steps.sent_s

    def suspected(self, record: InstanceRecord) -> None:
        """Reports of the instance were broken off: it counts as silent until it is heard, or leaves the cluster."""
        if record.instance_id not in self._silent:
            metrics.SUSPICIONS.inc()
            self._silent[record.instance_id] = record, _SilenceCheck(self._liveness, record.address)

    def update(self, view: ClusterView) -> None:
        """Forgets instances that have left, or were heard again."""
        for instance_id, (record, question) in tuple(self._silent.items()):
            status = view.instances.get(instance_id)
            has_left = status is None or status.record.incarnation != record.incarnation
            if has_left or question.is_answered:
                question.end()
                del self._silent[instance_id]

    @property
    def silent_ids(self) -> frozenset[str]:
        """The instances that went silent and were not heard since."""
        return frozenset(name for name, (_, question) in self._silent.items() if not question.is_answered)

    def close(self) -> None:
        """Ends what runs in the background."""
        self._liveness.close()

    async def _beat(self, target: str) -> None:
        stub = self._channels.stub(PrefillServiceStub, target)
        await stub.BeatPrefill(prefill_pb2.BeatPrefillRequest(), timeout=CALL_TIMEOUT_S)
