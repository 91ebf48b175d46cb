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
        self._numbers = {instance_id: number for number, instance_id in enumerate(instance_ids)}
        self._times = {name: array("d", [math.nan]) * count for name in ("due_s", "first_s", "last_s", *SERVER_PHASES)}
        self._whole = {name: array("q", [0]) * count for name in ("prompt_tokens", "planned_tokens", "received_tokens")}
        self._whole |= {name: array("q", [-1]) * count for name in ("prefill_instance", "decode_instance")}
        self._failures: dict[int, tuple[str, str]] = {}
        """Error name and reason, by request."""
        self.attempts = array("q", [0]) * count
        self.preemptions = array("q", [0]) * count
        self.ends = array("q", [0]) * count
        """Times that each request has ended: once, if all is well."""
        self._losses = {name: array("d", [0.0]) * count for name in SERVER_LOSSES}
        self._gap_s = array("d")
        self._gap_counts = array("q")

    def gaps(self, gap_s: float, count: int) -> None:
        """Record `count` tokens, at least 1, that have followed another one of their answer after gap_s."""
        self._gap_s.append(gap_s)
        self._gap_counts.append(count)

    def planned(self, request: SimulatedRequest) -> None:
        """Record that the request is due."""
        self._times["due_s"][request.number] = request.due_s
        self._whole["prompt_tokens"][request.number] = request.prompt_tokens
        self._whole["planned_tokens"][request.number] = request.output_tokens

    def failed(self, request: SimulatedRequest, error: str, reason: str) -> None:
        self._ended(request)
        self._failures[request.number] = error, reason

    def answered(
        self, attempt: SimulatedAttempt, last_s: float, first_step_s: float, end_s: float, preemptions: int
    ) -> None:
        """Record an answer. last_s: when its client had the last token. first_step_s: end of its first decode step, or
        less than 0. end_s: when its last token was drawn."""
        request, times = attempt.request, self._times
        number = request.number
        self._ended(request)
        if request.losses is not None:
            for name, column in self._losses.items():
                column[number] = getattr(request.losses, name)
        self.preemptions[number] = preemptions
        times["last_s"][number] = last_s
        times["router_s"][number] = request.router_s
        computed = attempt.resumed_from or attempt
        times["prefill_queue_s"][number] = computed.started_s - computed.arrived_s
        times["prefill_s"][number] = computed.first_token_s - computed.started_s
        self._whole["prefill_instance"][number] = self._numbers[attempt.prefill.record.instance_id]
        handed = computed.landed_s >= 0
        times["kv_transfer_s"][number] = computed.landed_s - computed.push.since_s if handed and computed.push else 0.0
        times["kv_tail_s"][number] = computed.landed_s - computed.first_token_s if handed else 0.0
        times["decode_queue_s"][number] = first_step_s - attempt.landed_s if first_step_s >= 0 else 0.0
        times["decode_s"][number] = end_s - first_step_s if first_step_s >= 0 else 0.0
        if attempt.decode is not None:
            self._whole["decode_instance"][number] = self._numbers[attempt.decode.record.instance_id]

    def _ended(self, request: SimulatedRequest) -> None:
        number = request.number
        self.ends[number] += 1
        self.attempts[number] = request.attempt_count
        self._times["first_s"][number] = request.first_s
        self._whole["received_tokens"][number] = request.generated

    def reason(self, number: int) -> str:
        """Return why the request failed."""
        return self._failures.get(number, ("", ""))[1]

    def outcome(self, number: int) -> EndedRequest:
        first_s, last_s = self._times["first_s"][number], self._times["last_s"][number]
        return EndedRequest(
            self._times["due_s"][number],
            None if math.isnan(first_s) else first_s,
            None if math.isnan(last_s) else last_s,
            self._whole["received_tokens"][number],
            self._failures[number][1] if number in self._failures else None,
        )

    def columns(self) -> RunColumns:
        times = {name: _floats(column) for name, column in self._times.items()}
        last_s = times["last_s"]
        ended_s = last_s[~np.isnan(last_s)]
        error_names = tuple(dict.fromkeys(name for name, _ in self._failures.values()))
        error = np.zeros(len(last_s), dtype=np.int64)
        for number, (name, _) in self._failures.items():
            error[number] = error_names.index(name) + 1
        return RunColumns(
            due_s=times["due_s"],
            sent_s=times["due_s"],
            first_s=times["first_s"],
            last_s=last_s,
            prompt_tokens=_whole(self._whole["prompt_tokens"]),
            planned_tokens=_whole(self._whole["planned_tokens"]),
            received_tokens=_whole(self._whole["received_tokens"]),
            error=error,
            error_names=error_names,
            server={phase: times[phase] for phase in SERVER_PHASES},
            prefill_instance=_whole(self._whole["prefill_instance"]),
            decode_instance=_whole(self._whole["decode_instance"]),
            instance_ids=tuple(self._numbers),
            duration_s=float(ended_s.max()) if len(ended_s) else float(np.nanmax(times["due_s"])) or 1.0,
            losses={name: _floats(column) for name, column in self._losses.items()},
            gaps_s=_floats(self._gap_s),
            gap_counts=_whole(self._gap_counts),
        )


def _floats(column: "array[float]") -> Floats:
    return np.frombuffer(column, dtype=np.float64) if len(column) else np.empty(0)


def _whole(column: "array[int]") -> Whole:
    return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)
