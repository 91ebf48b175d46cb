"""Plots runs: distributions of latencies, and a timeline of requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.loadgen.report import Slo, jct_s, tpot_s, ttft_s
from kaveri.profiling.output import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT_COLOUR, _ANSWER_COLOUR, _FAILED_COLOUR = "#c96f3b", "#2a7f9e", "#b02a2a"


def draw_runs(runs: Sequence[tuple[str, LoadRun]], slo: Slo, title: str, path: Path) -> None:
    """Draw the cumulative distributions of TTFT, TPOT and JCT with a curve per run, and the timeline of the last run.
    Dashed lines are the SLOs. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.3))
    measures = (("TTFT", ttft_s, slo.ttft_s), ("TPOT", tpot_s, slo.tpot_s), ("JCT", jct_s, None))
    for column, (name, measure, limit_s) in enumerate(measures):
        _distribution(figure.add_subplot(grid[0, column]), name, measure, limit_s, runs)
    _timeline(figure.add_subplot(grid[1, :]), *runs[-1])
    save_figure(figure, path)


def _distribution(
    axes: "Axes",
    name: str,
    measure: Callable[[RequestRecord], float | None],
    limit_s: float | None,
    runs: Sequence[tuple[str, LoadRun]],
) -> None:
    for label, run in runs:
        answered = (record for record in run.records if record.error is None)
        values_ms = sorted(value * 1e3 for record in answered if (value := measure(record)) is not None)
        shares = [rank / len(values_ms) for rank in range(1, len(values_ms) + 1)]
        axes.step(values_ms, shares, where="post", label=label, linewidth=1.2)
    if limit_s is not None:
        axes.axvline(limit_s * 1e3, color="#555555", linestyle="--", linewidth=1)
    axes.set(xlabel=f"{name} (ms)", ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend(fontsize="small")


def _timeline(axes: "Axes", label: str, run: LoadRun) -> None:
    """Draw a line per request in planned order: until its first token, then until its last."""
    waits = [record for record in run.records if record.first_s is not None]
    numbers = [record.planned.number for record in waits]
    starts_s = [record.due_s for record in waits]
    firsts_s = [record.first_s for record in waits if record.first_s is not None]
    lasts_s = [record.last_s for record in waits if record.last_s is not None]
    width = max(0.4, min(4.0, 250 / max(1, len(run.records))))
    axes.hlines(numbers, starts_s, firsts_s, color=_WAIT_COLOUR, linewidth=width, label="until the first token")
    axes.hlines(numbers, firsts_s, lasts_s, color=_ANSWER_COLOUR, linewidth=width, label="until the last token")
    failed = [record for record in run.records if record.error is not None]
    if failed:
        places = [record.planned.number for record in failed]
        axes.plot([record.due_s for record in failed], places, "x", color=_FAILED_COLOUR, label="failed, when due")
    axes.set(xlabel=f"seconds of {label}", ylabel="request")
    axes.legend(fontsize="small", loc="upper left")
