"""Formats simulated runs as the JSON of `kaveri bench`, and compares them with measured runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kaveri.errors import ConfigError
from kaveri.simulator.table import RunTable
from kaveri.workload.requests import PlannedRequest, RequestLengths
from kaveri.workload.summary import Slo, over_runs, summarize, unless_nan

_COMPARED = ("ttft_s", "tpot_s", "jct_s")
_FIGURES = ("mean", "p50", "p90")


def report_of(
    tables: Sequence[RunTable],
    slo: Slo,
    phases: Mapping[str, tuple[str, ...]],
    *,
    model: str,
    seed: int,
    rate_per_s: float | None,
    lengths_known: bool,
    too_long: int,
    all_rows: bool,
) -> dict[str, Any]:
    """Return simulated runs in the format of `kaveri bench --json`. all_rows: if False, list failed requests only."""
    summaries = [summarize(table.columns(), slo, phases) for table in tables]
    return {
        "target": "simulated",
        "model": model,
        "seed": seed,
        "slo": asdict(slo) if slo.is_set else None,
        "lengths": {"forced": True, "known_to_the_cluster": lengths_known},
        "interrupted": False,
        "too_long": too_long,
        "over_runs": over_runs(summaries),
        "goodput": None,
        "runs": [
            {"rate_per_s": rate_per_s, **summary, "rows": list(rows(table, all_rows))}
            for table, summary in zip(tables, summaries, strict=True)
        ],
    }


def rows(table: RunTable, all_rows: bool = True) -> Iterator[dict[str, Any]]:
    """Yield each request as a row of `kaveri bench --json`. all_rows: if False, failed requests only."""
    run = table.columns()
    ttft_s, tpot_s, jct_s = run.ttft_s(), run.tpot_s(), run.jct_s()
    # The name of the unknown instance, -1, comes last.
    instance_ids = (*run.placements.instance_ids, "")
    for number in range(len(run.due_s)):
        error = str(run.errors[number]) or None
        server: dict[str, Any] | None = None
        if error is None:
            if not all_rows:
                continue
            server = {name: float(column[number]) for name, column in run.server.items()}
            server["prefill_instance_id"] = instance_ids[run.placements.prefill[number]]
            server["decode_instance_id"] = instance_ids[run.placements.decode[number]]
            server["attempts"] = table.attempts[number]
        yield {
            "number": number,
            "prompt_tokens": int(run.tokens.prompt[number]),
            "output_tokens": int(run.tokens.planned[number]),
            "received_tokens": int(run.tokens.received[number]),
            "due_s": float(run.due_s[number]),
            "sent_s": float(run.sent_s[number]),
            "ttft_s": unless_nan(ttft_s[number]),
            "tpot_s": unless_nan(tpot_s[number]),
            "jct_s": unless_nan(jct_s[number]),
            "error": error,
            "reason": table.reason(number),
            "server": server,
        }


def requests_of(run: Mapping[str, Any]) -> list[PlannedRequest]:
    """Return a `kaveri bench --json` run's requests; arrival times count from the first. Raises ConfigError."""
    try:
        found = [
            (float(row["due_s"]), RequestLengths(int(row["prompt_tokens"]), int(row["output_tokens"])))
            for row in run["rows"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("--compare", f"has no rows of `kaveri bench --json`: {error!r}") from error
    if not found:
        raise ConfigError("--compare", "has a run without requests")
    found.sort(key=lambda entry: entry[0])
    start_s = found[0][0]
    return [PlannedRequest(number, due_s - start_s, lengths) for number, (due_s, lengths) in enumerate(found)]


def differences(measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compare a measured and a simulated run: relative difference of latencies, attainment in percentage points."""
    found: list[dict[str, Any]] = []
    for name in _COMPARED:
        for figure in _FIGURES:
            real, ours = ((run.get(name) or {}).get(figure) for run in (measured, simulated))
            if real and ours is not None:
                entry = {"figure": f"{name} {figure}", "measured": real, "simulated": ours}
                found.append({**entry, "difference": ours / real - 1, "unit": "share"})
    real, ours = measured.get("slo_attainment"), simulated.get("slo_attainment")
    if real is not None and ours is not None:
        entry = {"figure": "slo_attainment", "measured": real, "simulated": ours}
        found.append({**entry, "difference": (ours - real) * 100, "unit": "points"})
    return found
