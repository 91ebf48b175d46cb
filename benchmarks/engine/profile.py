"""An engine's profile on this machine: the saturating chunk, and how well steps are predicted.

Each repeat is a whole `kaveri profile` in its own process, with one thread as under `kaveri up`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.support.harness import Options, Report, run
from kaveri.engine.factory import DEFAULT_CHUNK_TOKENS
from kaveri.latency.profile import Profile, read_profile
from kaveri.latency.saturation import throughput_curve

_TIMEOUT_S = 900.0
_POOL = {"cpu": (), "cuda": ("--kv-cache-memory", "8GiB")}
"""The largest batches and contexts of a plan need more than the default."""


def measure(options: Options, report: Report) -> None:
    """Profiles the model a few times, and the timed engine, whose latency model is known, once."""
    repeats = options.choose(3, 1)
    report.workload = {"model": options.model, "device": options.device, "threads": 1, "quick_profile": options.quick}
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", options.model, "--device", options.device, *_POOL[options.device]]
        profiles = [profile_once(Path(folder) / f"{number}.json", model, options.quick) for number in range(repeats)]
        known = profile_once(
            Path(folder) / "timed.json", ["--engine", "timed", "--latency-model", "opt-13b-a100-tp1"], quick=True
        )
    report.row("saturating chunk", [entry.chunk_tokens for entry in profiles], "tokens")
    best = report.row("best prefill throughput", [entry.saturation.best_tokens_per_s for entry in profiles], "tokens/s")
    default = report.row("throughput at the default chunk", [default_rate(entry) for entry in profiles], "tokens/s")
    report.ratio(f"throughput at {DEFAULT_CHUNK_TOKENS} tokens / best", default / best)
    report_errors(report, "transformers", profiles)
    report_errors(report, "timed", [known])
    if not all(entry.saturation.reached for entry in profiles):
        report.note("throughput still rises at the largest chunk measured")
    report.note("errors are relative to the measured median, on steps left out of the fit (five parts in turn)")
    report.note("the timed engine spends what DistServe's fit of OPT-13B on an A100 says, so its error is the method's")


def report_errors(report: Report, engine: str, profiles: list[Profile]) -> None:
    """Adds the fit's errors of both phases."""
    for phase, errors in (
        ("prefill", [entry.prefill_error for entry in profiles]),
        ("decode", [entry.decode_error for entry in profiles]),
    ):
        report.row("mean error of unseen steps", [error.mean for error in errors], "share", engine=engine, phase=phase)
        report.row(
            "largest error of unseen steps", [error.largest for error in errors], "share", engine=engine, phase=phase
        )


def default_rate(profile: Profile) -> float:
    """Tokens/s of the measured chunk that is nearest to the default."""
    return min(throughput_curve(profile.prefill), key=lambda entry: abs(entry[0] - DEFAULT_CHUNK_TOKENS))[1]


def profile_once(path: Path, flags: list[str], quick: bool) -> Profile:
    """Raises CalledProcessError."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "kaveri.profiling",
        *flags,
        "--out",
        str(path),
        "--quick",
        str(quick).lower(),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=_TIMEOUT_S, stdout=subprocess.DEVNULL)
    return read_profile(path)


if __name__ == "__main__":
    run("engine.profile", measure, description=__doc__)
