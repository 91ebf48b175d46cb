"""The columns of a simulated run, filled while it runs."""

import math
from array import array
from dataclasses import dataclass

import numpy as np

from kaveri.simulator.attempt import SimulatedAttempt, SimulatedRequest
from kaveri.workload.run_columns import SERVER_LOSSES, SERVER_PHASES, Floats, RunColumns, Whole


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """One row, as kaveri.workload.latencies reads it: an Outcome."""

    due_s: float
    first_s: float | None
    last_s: float | None
    received_tokens: int
    error: str | None


class RunTable:
    """One row per request, in planned order. Times are seconds of the run."""

    def __init__(self, count: int, instance_ids: tuple[str, ...]) -> None:
        missing = array("d", [float("nan")]) * count
        self._instance_ids = instance_ids
        self._numbers = {instance_id: number for number, instance_id in enumerate(instance_ids)}
        self._due = array("d", missing)
        self._first = array("d", missing)
        self._last = array("d", missing)
        self._prompt = array("q", [0]) * count
        self._planned = array("q", [0]) * count
        self._received = array("q", [0]) * count
        self._error = array("q", [0]) * count
        self._server = {phase: array("d", missing) for phase in SERVER_PHASES}
        self._prefill = array("q", [-1]) * count
        self._decode = array("q", [-1]) * count
        self.attempts = array("q", [0]) * count
        self.preemptions = array("q", [0]) * count
        self.ends = array("q", [0]) * count
        """Times that each request has ended: once, if all is well."""
        self._losses = {name: array("d", [0.0]) * count for name in SERVER_LOSSES}
        self._gap_s = array("d")
        self._gap_counts = array("q")
        self._error_names: dict[str, int] = {}
        self._reasons: dict[int, str] = {}

    def gaps(self, gap_s: float, count: int) -> None:
        """Record `count` tokens, at least 1, that have followed another one of their answer after gap_s."""
        self._gap_s.append(gap_s)
        self._gap_counts.append(count)

    def planned(self, request: SimulatedRequest) -> None:
        """Record that the request is due."""
        number = request.number
        self._due[number] = request.due_s
        self._prompt[number] = request.prompt_tokens
        self._planned[number] = request.output_tokens

    def failed(self, request: SimulatedRequest, error: str, reason: str) -> None:
        """Record that it has ended with an error."""
        number = request.number
        self.ends[number] += 1
        self.attempts[number] = request.attempt_count
        self._error[number] = self._error_names.setdefault(error, len(self._error_names) + 1)
        self._reasons[number] = reason
        self._first[number] = request.first_s
        self._received[number] = request.generated

    def answered(
        self, attempt: SimulatedAttempt, last_s: float, first_step_s: float, end_s: float, preemptions: int
    ) -> None:
        """Record an answer. last_s: when its client had the last token. first_step_s: end of its first decode step, or
        less than 0. end_s: when its last token was drawn."""
        request, server = attempt.request, self._server
        number = request.number
        if request.losses is not None:
            for name, column in self._losses.items():
                column[number] = getattr(request.losses, name)
        self.ends[number] += 1
        self.attempts[number] = request.attempt_count
        self.preemptions[number] = preemptions
        self._first[number] = request.first_s
        self._last[number] = last_s
        self._received[number] = request.output_tokens
        server["router_s"][number] = request.router_s
        computed = attempt.resumed_from or attempt
        server["prefill_queue_s"][number] = computed.started_s - computed.arrived_s
        server["prefill_s"][number] = computed.first_token_s - computed.started_s
        self._prefill[number] = self._numbers[attempt.prefill.record.instance_id]
        handed = computed.landed_s >= 0
        server["kv_transfer_s"][number] = computed.landed_s - computed.push.since_s if handed and computed.push else 0.0
        server["kv_tail_s"][number] = computed.landed_s - computed.first_token_s if handed else 0.0
        server["decode_queue_s"][number] = first_step_s - attempt.landed_s if first_step_s >= 0 else 0.0
        server["decode_s"][number] = end_s - first_step_s if first_step_s >= 0 else 0.0
        if attempt.decode is not None:
            self._decode[number] = self._numbers[attempt.decode.record.instance_id]

    def reason(self, number: int) -> str:
        """Return why the request failed."""
        return self._reasons.get(number, "")

    def outcome(self, number: int) -> EndedRequest:
        """Outcome of a request that has ended."""
        first_s, last_s = self._first[number], self._last[number]
        return EndedRequest(
            self._due[number],
            None if math.isnan(first_s) else first_s,
            None if math.isnan(last_s) else last_s,
            self._received[number],
            self._reasons.get(number),
        )

    def columns(self) -> RunColumns:
        """Input of kaveri.workload.summary."""
        last_s = _floats(self._last)
        ended_s = last_s[~np.isnan(last_s)]
        return RunColumns(
            due_s=_floats(self._due),
            sent_s=_floats(self._due),
            first_s=_floats(self._first),
            last_s=last_s,
            prompt_tokens=_whole(self._prompt),
            planned_tokens=_whole(self._planned),
            received_tokens=_whole(self._received),
            error=_whole(self._error),
            error_names=tuple(self._error_names),
            server={phase: _floats(column) for phase, column in self._server.items()},
            prefill_instance=_whole(self._prefill),
            decode_instance=_whole(self._decode),
            instance_ids=self._instance_ids,
            duration_s=float(ended_s.max()) if len(ended_s) else float(np.nanmax(_floats(self._due))) or 1.0,
            losses={name: _floats(column) for name, column in self._losses.items()},
            gaps_s=_floats(self._gap_s),
            gap_counts=_whole(self._gap_counts),
        )


def _floats(column: "array[float]") -> Floats:
    return np.frombuffer(column, dtype=np.float64) if len(column) else np.empty(0)


def _whole(column: "array[int]") -> Whole:
    return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)
