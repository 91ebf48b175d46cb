"""Plots runs: distributions of latencies, and a timeline of requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kaveri.loadgen.driver import LoadRun
from kaveri.loadgen.report import columns_of
from kaveri.profiling.output import save_figure
from kaveri.workload.run_columns import Floats, RunColumns
from kaveri.workload.summary import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WAIT_COLOUR, _ANSWER_COLOUR, _FAILED_COLOUR = "#c96f3b", "#2a7f9e", "#b02a2a"


def draw_runs(runs: Sequence[tuple[str, LoadRun]], slo: Slo, title: str, path: Path) -> None:
    """Plot cumulative distributions of TTFT, TPOT and JCT, a curve per (label, run), with SLOs as dashed lines, and the
    last run's timeline. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.3))
    columns = [(label, columns_of(run)) for label, run in runs]
    measures = (("TTFT", RunColumns.ttft_s, slo.ttft_s), ("TPOT", RunColumns.tpot_s, slo.tpot_s))
    for place, (name, measure, limit_s) in enumerate((*measures, ("JCT", RunColumns.jct_s, None))):
        values_s = [(label, measure(run)[run.answered]) for label, run in columns]
        _distribution(figure.add_subplot(grid[0, place]), name, values_s, limit_s)
    _timeline(figure.add_subplot(grid[1, :]), *columns[-1])
    save_figure(figure, path)


def _distribution(axes: "Axes", name: str, values_s: Sequence[tuple[str, Floats]], limit_s: float | None) -> None:
    """Draw a curve per run. values_s: label and values of each run."""
    for label, run_s in values_s:
        values_ms = np.sort(run_s[~np.isnan(run_s)]) * 1e3
        shares = np.arange(1, len(values_ms) + 1) / len(values_ms)
        axes.step(values_ms, shares, where="post", label=label, linewidth=1.2)
    if limit_s is not None:
        axes.axvline(limit_s * 1e3, color="#555555", linestyle="--", linewidth=1)
    axes.set(xlabel=f"{name} (ms)", ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if len(values_s) > 1:
        axes.legend(fontsize="small")


def _timeline(axes: "Axes", label: str, run: RunColumns) -> None:
    """Draw a horizontal line per request, in two colors: until its first token, then until its last."""
    numbers = np.flatnonzero(~np.isnan(run.first_s))
    firsts_s, width = run.first_s[numbers], max(0.4, min(4.0, 250 / max(1, len(run.due_s))))
    waited, answered = "until the first token", "until the last token"
    axes.hlines(numbers, run.due_s[numbers], firsts_s, color=_WAIT_COLOUR, linewidth=width, label=waited)
    axes.hlines(numbers, firsts_s, run.last_s[numbers], color=_ANSWER_COLOUR, linewidth=width, label=answered)
    failed = np.flatnonzero(~run.answered)
    if len(failed):
        axes.plot(run.due_s[failed], failed, "x", color=_FAILED_COLOUR, label="failed, when due")
    axes.set(xlabel=f"seconds of {label}", ylabel="request")
    axes.legend(fontsize="small", loc="upper left")
