"""Runs `kaveri profile`: builds the engine's runner, measures, fits, writes, plots, and prints the findings."""

import importlib.metadata
import statistics
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kaveri.engine.factory import build_runner, profiled_engine
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.errors import ConfigError
from kaveri.hosting.config import name_flag
from kaveri.latency.fit import fit_decode, fit_prefill
from kaveri.latency.machine import this_machine
from kaveri.latency.model import LatencyModel
from kaveri.latency.profile import FitError, Profile, ProfiledEngine, write_profile
from kaveri.latency.saturation import find_saturation, throughput_curve
from kaveri.profiling.config import ProfileConfig
from kaveri.profiling.measure import measure_steps
from kaveri.profiling.output import check_output, check_plot, not_written
from kaveri.profiling.plan import StepLimits, plan_steps
from kaveri.profiling.plot import draw_profile

_ROUNDS, _QUICK_ROUNDS = 9, 3
_POOR_FIT = 0.15
"""Mean error above which the output warns about the predictions. Chosen, not measured."""
_UNSTEADY = 1.25
"""Median over steps of (median time / shortest time) above which the output warns. Chosen, not measured."""


def run_profile(config: ProfileConfig) -> None:
    """Measure and write a profile; takes minutes. Prints results to stdout, progress to stderr. Raises ConfigError."""
    out = Path(config.out).expanduser()
    plot = Path(config.plot).expanduser() if config.plot else None
    # Check the outputs before minutes of measuring.
    check_output("--out", out)
    if plot is not None:
        check_plot(plot)
    errors = Console(stderr=True, highlight=False)
    try:
        with errors.status("loading"):
            runner, total_blocks = build_runner(config)
        profile = profile_runner(runner, total_blocks, profiled_engine(runner, config), config, errors)
    except ConfigError as error:
        raise name_flag(error) from error
    # Print first, so a full disk does not lose the findings.
    for line in describe(profile):
        print(line)
    try:
        write_profile(profile, out)
    except OSError as error:
        raise not_written("--out", out, error) from error
    print(f"written: {out}")
    if plot is not None:
        try:
            draw_profile(profile, plot)
        except OSError as error:
            raise not_written("--plot", plot, error) from error
        print(f"drawn: {plot}")


def profile_runner(
    runner: ModelRunner,
    total_blocks: int,
    engine: ProfiledEngine,
    config: ProfileConfig,
    console: Console,
) -> Profile:
    """Profile a runner that has no KV pool yet. console: for the progress bar. Raises ConfigError."""
    limits = StepLimits(
        max_chunk_tokens=config.max_chunk_tokens,
        max_batch=config.max_batch,
        max_model_len=runner.max_model_len,
        total_blocks=total_blocks,
        block_tokens=runner.layout.block_tokens,
    )
    plan = plan_steps(limits, config.quick)
    rounds = _QUICK_ROUNDS if config.quick else _ROUNDS
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("steps", total=(rounds + 1) * (len(plan.prefill) + len(plan.decode)))
        prefill, decode = measure_steps(runner, total_blocks, plan, rounds, lambda: progress.advance(bar))
    prefill_latency, prefill_error = fit_prefill(prefill)
    decode_latency, decode_error = fit_decode(decode)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    machine = this_machine(runner.device)
    return Profile(
        created=created,
        kaveri=importlib.metadata.version("kaveri"),
        engine=engine,
        machine=machine,
        saturation=find_saturation(throughput_curve(prefill), config.saturation_share),
        latency_model=LatencyModel(
            name=f"{engine.model} on {machine}",
            source=f"kaveri profile, {created}",
            prefill=prefill_latency,
            decode=(decode_latency,),
        ),
        prefill_error=prefill_error,
        decode_error=decode_error,
        prefill=prefill,
        decode=decode,
    )


def describe(profile: Profile) -> list[str]:
    """Summarize a profile in a few lines for the terminal."""
    engine, found = profile.engine, profile.saturation
    lines = [f"{engine.model} on the {engine.engine} engine, {engine.dtype}, {engine.device}: {profile.machine}"]
    if found.reached:
        lines.append(
            f"chunk_tokens: {found.chunk_tokens}, the smallest chunk with {found.share:.0%} of the best throughput, "
            f"{found.best_tokens_per_s:.0f} tokens/s"
        )
    else:
        lines.append(
            f"chunk_tokens: {found.chunk_tokens}, the largest chunk measured; throughput still rises there, to "
            f"{found.best_tokens_per_s:.0f} tokens/s: see --max-chunk-tokens"
        )
    prefill, decode = profile.latency_model.prefill, profile.latency_model.decode[0]
    lines.append(
        f"prefill step: {prefill.step_s * 1e3:.3g} ms + {prefill.token_s * 1e6:.3g} us per token "
        f"+ {prefill.token_squared_s * 1e9:.3g} ns per squared token; {_off(profile.prefill_error)}"
    )
    lines.append(
        f"decode step: {decode.step_s * 1e3:.3g} ms + {decode.context_token_s * 1e6:.3g} us per token of context "
        f"+ {decode.request_s * 1e6:.3g} us per request; {_off(profile.decode_error)}"
    )
    for phase, error in (("prefill", profile.prefill_error), ("decode", profile.decode_error)):
        if error.mean > _POOR_FIT:
            lines.append(f"the form of DistServe's latency model describes {phase} steps poorly here")
    times = [point.times for point in profile.prefill] + [point.times for point in profile.decode]
    unsteadiness = statistics.median(entry.median_s / entry.min_s for entry in times)
    if unsteadiness > _UNSTEADY:
        lines.append(
            f"unsteady: the median step usually took {unsteadiness:.1f} times its shortest time; "
            "is something else running on this machine?"
        )
    return lines


def _off(error: FitError) -> str:
    return f"on steps it was not fitted to {error.mean:.1%} off in the mean, {error.largest:.1%} at most"
