"""Results of a simulated run as columns, filled while it runs."""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from kaveri.simulator.instance import SimulatedAttempt, SimulatedRequest
from kaveri.workload.run_columns import (
    SERVER_LOSSES,
    SERVER_PHASES,
    Floats,
    Placements,
    RunColumns,
    TokenCounts,
    TokenGaps,
    Whole,
)


class RunTable:
    """Results of a simulated run, one row per request in planned order. Times are simulated seconds."""

    def __init__(self, count: int, instance_ids: tuple[str, ...], losses: Sequence[str] = SERVER_LOSSES) -> None:
        """losses: columns for the cost of lost instances; empty if none can be lost."""
        self._numbers = {instance_id: number for number, instance_id in enumerate(instance_ids)}
        self.times = {name: array("d", [math.nan]) * count for name in ("due_s", "first_s", "last_s", *SERVER_PHASES)}
        self._losses = {name: array("d", [0.0]) * count for name in losses}
        self._tokens = {name: array("q", [0]) * count for name in ("prompt", "planned", "received")}
        self._placements = {name: array("q", [-1]) * count for name in ("prefill", "decode")}
        self._failures: dict[int, tuple[str, str]] = {}
        """Error name and reason, by request number."""
        self.attempts = array("q", [0]) * count
        self.preemptions = array("q", [0]) * count
        self.ends = array("q", [0]) * count
        """How often each request has ended: once, if the simulation is correct."""
        self._gaps = array("d"), array("q")

    def gaps(self, gap_s: float, count: int) -> None:
        """Record `count` tokens, at least 1, that each followed the previous one of its answer after gap_s seconds."""
        seconds, counts = self._gaps
        seconds.append(gap_s)
        counts.append(count)

    def plan(self, number: int, due_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.times["due_s"][number] = due_s
        self._tokens["prompt"][number] = prompt_tokens
        self._tokens["planned"][number] = output_tokens

    def place(self, number: int, prefill_id: str, decode_id: str = "") -> None:
        """Record the instances that served a request. decode_id: empty if it was not decoded."""
        self._placements["prefill"][number] = self._numbers[prefill_id]
        if decode_id:
            self._placements["decode"][number] = self._numbers[decode_id]

    def end(self, number: int, attempts: int, received_tokens: int) -> None:
        self.ends[number] += 1
        self.attempts[number] = attempts
        self._tokens["received"][number] = received_tokens

    def failed(self, request: SimulatedRequest, error: str, reason: str) -> None:
        self.end(request.number, request.attempt_count, request.generated)
        self._failures[request.number] = error, reason

    def answered(
        self, attempt: SimulatedAttempt, last_s: float, first_step_s: float, end_s: float, preemptions: int
    ) -> None:
        """Record a complete answer. last_s: arrival of the last token at the client. first_step_s: end of the first
        decode step, negative if none. end_s: time at which the last token was sampled."""
        request, times = attempt.request, self.times
        number = request.number
        self.end(number, request.attempt_count, request.generated)
        if request.losses is not None:
            for name, column in self._losses.items():
                column[number] = getattr(request.losses, name)
        self.preemptions[number] = preemptions
        times["last_s"][number] = last_s
        computed = attempt.resumed_from or attempt
        times["prefill_queue_s"][number] = computed.started_s - computed.arrived_s
        times["prefill_s"][number] = computed.first_token_s - computed.started_s
        decode_id = "" if attempt.decode is None else attempt.decode.record.instance_id
        self.place(number, attempt.prefill.record.instance_id, decode_id)
        handed = computed.landed_s >= 0
        times["kv_transfer_s"][number] = computed.landed_s - computed.push.since_s if handed and computed.push else 0.0
        times["kv_tail_s"][number] = computed.landed_s - computed.first_token_s if handed else 0.0
        times["decode_queue_s"][number] = first_step_s - attempt.landed_s if first_step_s >= 0 else 0.0
        times["decode_s"][number] = end_s - first_step_s if first_step_s >= 0 else 0.0

    def reason(self, number: int) -> str:
        """Return why a request failed; empty if it did not."""
        return self._failures.get(number, ("", ""))[1]

    def tpot_s(self, number: int) -> float:
        """Return a request's seconds per output token after the first: NaN for an answer of one token, infinite if it
        failed."""
        if number in self._failures:
            return math.inf
        more = self._tokens["received"][number] - 1
        return (self.times["last_s"][number] - self.times["first_s"][number]) / more if more else math.nan

    def columns(self) -> RunColumns:
        times = {name: _floats(column) for name, column in self.times.items()}
        ended_s = times["last_s"][~np.isnan(times["last_s"])]
        errors = [""] * len(times["last_s"])
        for number, (name, _) in self._failures.items():
            errors[number] = name
        seconds, counts = self._gaps
        return RunColumns(
            due_s=times["due_s"],
            sent_s=times["due_s"],
            first_s=times["first_s"],
            last_s=times["last_s"],
            tokens=TokenCounts(*map(_whole, self._tokens.values())),
            errors=np.array(errors),
            server={name: times[name] for name in SERVER_PHASES}
            | {name: _floats(column) for name, column in self._losses.items()},
            placements=Placements(
                _whole(self._placements["prefill"]), _whole(self._placements["decode"]), tuple(self._numbers)
            ),
            gaps=TokenGaps(_floats(seconds), _whole(counts)),
            duration_s=float(ended_s.max()) if len(ended_s) else float(np.nanmax(times["due_s"])) or 1.0,
        )


def _floats(column: "array[float]") -> Floats:
    return np.frombuffer(column, dtype=np.float64) if len(column) else np.empty(0)


def _whole(column: "array[int]") -> Whole:
    return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)
