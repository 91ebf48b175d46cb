"""Prints a report of runs (kaveri.loadgen.report)."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "jct_s")
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def show_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print a benchmark report: figures of one run, or median and range of several, and a goodput search's result."""
    figures, count = report["over_runs"], len(report["runs"])
    if report["goodput"] is None:
        _show_latencies(console, report, figures)
        console.print(
            f"{_value(figures['answered'], 0)} of {_value(figures['requests'], 0)} requests answered in "
            f"{_value(figures['duration_s'], 1)} s: {_value(figures['requests_per_s'], 2)} requests/s, "
            f"{_value(figures['output_tokens_per_s'], 1)} tokens/s{_left_out(report)}"
        )
        if "offered_per_s" in figures:
            console.print(f"sent at {_value(figures['offered_per_s'], 2)} requests/s")
        if "slo_attainment" in figures:
            console.print(
                f"SLO met by {_value(figures['slo_attainment'], 1, 100)} %: "
                f"goodput {_value(figures['goodput_requests_per_s'], 2)} requests/s"
            )
        losses = figures["losses"]
        if losses["requests"]["max"]:
            console.print(
                f"lost with an instance: {_value(losses['requests'], 0)} requests, "
                f"{_value(losses['resumes'], 0)} resumes from copies, "
                f"{_value(losses['recomputed_tokens'], 0)} tokens computed again, "
                f"stalls of {_value(losses['stall_s']['mean'], 3)} s on average"
            )
        for phases, times in figures["resource_time"].items():
            console.print(
                f"{phases}: busy for {_value(times['busy_s'], 1)} s of {_value(times['held_s'], 1)} s "
                f"on {_value(times['instances'], 0)} instances"
            )
        if count > 1:
            console.print(f"median, least and greatest of {count} runs")
    else:
        _show_goodput(console, report)
    if report["lengths"]["known_to_the_cluster"]:
        console.print("answers had forced lengths, which the cluster could tell before: as with a perfect predictor")


def show_warnings(console: Console, report: Mapping[str, Any]) -> None:
    """Print a report's problems: failed or unsent requests, an interruption, a client that was too slow."""
    for number, run in enumerate(report["runs"]):
        where = f"run {number + 1}: " if len(report["runs"]) > 1 else ""
        for name, count in run["errors"].items():
            reason = next(row["reason"] for row in run["rows"] if row["error"] == name)
            console.print(f"{where}failed: {count} with {name}, the first: {reason}", markup=False)
        client = run["client"]
        if not client["kept_schedule"]:
            late, delay = (
                part["p99"] * 1e3 if part is not None else 0.0
                for part in (client["sent_late_s"], client["loop_delay_s"])
            )
            console.print(
                f"{where}the client did not keep the schedule, and these latencies are partly its own: "
                f"sent late by {late:.0f} ms (p99), loop late by {delay:.0f} ms"
            )
    if report["interrupted"]:
        console.print(f"interrupted: runs complete by then: {len(report['runs'])}")
    if report["too_long"]:
        console.print(
            f"not sent: {report['too_long']} requests are longer than the model; the others are a lighter mix"
        )


def _show_latencies(console: Console, report: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    table = Table(box=SIMPLE_HEAD, title=f"{report['model']} at {report['target']}", title_justify="left")
    table.add_column("ms")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for name in _LATENCIES:
        values = figures.get(name)
        title = name.removesuffix("_s").upper()
        if values is None:
            table.add_row(title, *["-"] * len(_COLUMNS))
        elif len(report["runs"]) == 1:
            table.add_row(title, *(f"{values[key]['median'] * 1e3:.1f}" for key in _COLUMNS))
        else:
            for what in ("median", "min", "max"):
                table.add_row(f"{title} {what}", *(f"{values[key][what] * 1e3:.1f}" for key in _COLUMNS))
    console.print(table)


def _show_goodput(console: Console, report: Mapping[str, Any]) -> None:
    goodput = report["goodput"]
    table = Table(box=SIMPLE_HEAD, title=f"{report['model']} at {report['target']}", title_justify="left")
    for name in ("asked requests/s", "sent requests/s", "SLO met by", "TTFT p90 ms", "TPOT p90 ms"):
        table.add_column(name, justify="right")
    for run in sorted(report["runs"], key=lambda run: run["rate_per_s"]):
        p90 = [f"{run[name]['p90'] * 1e3:.1f}" if run[name] is not None else "-" for name in ("ttft_s", "tpot_s")]
        sent = f"{run['offered_per_s']:.3f}" if run["offered_per_s"] is not None else "-"
        table.add_row(f"{run['rate_per_s']:.3f}", sent, f"{run['slo_attainment']:.1%}", *p90)
    console.print(table)
    target = f"{goodput['attainment_target']:.0%} of requests meet the SLOs"
    if goodput["rate_per_s"] is None:
        console.print(f"at no rate that was tried {target}")
        return
    least = "at least " if goodput["failed_at_per_s"] is None else ""
    per_instance = goodput["rate_per_s_per_instance"]
    each = "" if per_instance is None else f", {per_instance:.3f} per engine instance"
    console.print(
        f"goodput: {least}{goodput['rate_per_s']:.3f} requests/s{each}: so much and {target}{_left_out(report)}"
    )
    if not goodput["kept_schedule"]:
        console.print("the client was late in some of these runs; the cluster alone may do better")


def _left_out(report: Mapping[str, Any]) -> str:
    return f", without {report['too_long']} that are too long for the model" if report["too_long"] else ""


def _value(figure: Mapping[str, float], digits: int, factor: float = 1.0) -> str:
    middle, least, most = (f"{figure[key] * factor:.{digits}f}" for key in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least} - {most})"
