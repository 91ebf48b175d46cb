"""Plots a profile: throughput over chunk size, and measured against predicted time of every step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kaveri.latency.fit import predict_decode_s, predict_prefill_s
from kaveri.latency.profile import Profile, StepTimes
from kaveri.latency.saturation import throughput_curve
from kaveri.profiling.output import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_profile(profile: Profile, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2))
    curve, prefill, decode = figure.subplots(1, 3)
    _draw_curve(curve, profile)
    _draw_fit(
        prefill,
        "prefill step",
        [point.times for point in profile.prefill],
        [predict_prefill_s(profile.latency_model.prefill, point) for point in profile.prefill],
        profile.prefill_error.mean,
    )
    _draw_fit(
        decode,
        "decode step",
        [point.times for point in profile.decode],
        [predict_decode_s(profile.latency_model.decode[0], point) for point in profile.decode],
        profile.decode_error.mean,
    )
    figure.suptitle(
        f"{profile.engine.model}, {profile.engine.engine} engine, {profile.engine.dtype}: {profile.machine}"
    )
    figure.tight_layout()
    save_figure(figure, path)


def _draw_curve(axes: "Axes", profile: Profile) -> None:
    curve = throughput_curve(profile.prefill)
    found = profile.saturation
    axes.plot([tokens for tokens, _ in curve], [rate for _, rate in curve], "o-", markersize=3)
    axes.axhline(found.share * found.best_tokens_per_s, color="#888888", linewidth=0.8, linestyle="--")
    label = f"{found.chunk_tokens} tokens" if found.reached else f"not saturated at {found.chunk_tokens}"
    axes.axvline(found.chunk_tokens, color="#c0392b", linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a prefill step")
    axes.set_ylabel("tokens/s")
    axes.set_title("prefill throughput")
    axes.legend()


def _draw_fit(
    axes: "Axes", title: str, times: Sequence[StepTimes], predicted_s: Sequence[float], mean_error: float
) -> None:
    measured_ms = [entry.median_s * 1e3 for entry in times]
    spread_ms = [
        [(entry.median_s - entry.min_s) * 1e3 for entry in times],
        [(entry.max_s - entry.median_s) * 1e3 for entry in times],
    ]
    predicted_ms = [value * 1e3 for value in predicted_s]
    axes.errorbar(predicted_ms, measured_ms, yerr=spread_ms, fmt="o", markersize=3, elinewidth=0.8)
    ends = [min(measured_ms + predicted_ms), max(measured_ms + predicted_ms)]
    axes.plot(ends, ends, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted ms")
    axes.set_ylabel("measured ms, median and range")
    axes.set_title(f"{title}: {mean_error:.1%} off on unseen steps")
