"""Shared by all benchmarks: the command line, repeats with spread, and the JSON result.

A benchmark compares in one run and reports ratios; a time alone is a note. Each is a module with::

    def measure(options: Options, report: Report) -> None: ...

    if __name__ == "__main__":
        run("kv.transfer", measure, description=__doc__)
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.results import write_result

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    quick: bool
    """End within a minute: fewer repeats, smaller work, the same comparisons."""
    model: str
    """Model to serve, where the benchmark serves one."""
    device: str = "cpu"
    """Where engines compute, where the benchmark builds them itself."""
    data: Path | None = None
    """Folder of published data, where the benchmark reads some: see its docstring."""
    programs: Mapping[str, Path] = field(default_factory=dict)
    """Programs of other projects to measure beside ours, by the names that the benchmark's docstring gives them."""

    def choose(self, full: Any, quick: Any) -> Any:
        """`full`, or `quick` on a quick run."""
        return quick if self.quick else full


@dataclass
class Report:
    """The findings of a run. Rows are raw; ratios are the result; notes explain them."""

    workload: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    """The targets of some ratios: their smallest accepted value."""
    comparisons: list[dict[str, str]] = field(default_factory=list)
    """A paper's figures beside those of this run."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why nothing was measured. Empty: not skipped."""

    def row(self, name: str, values: Sequence[float], unit: str, **labels: Any) -> float:
        """Adds one figure measured `len(values)` times, prints it, and returns its median."""
        median = statistics.median(values)
        spread = {"min": min(values), "median": median, "max": max(values), "repeats": len(values)}
        self.rows.append({"name": name, "unit": unit, **labels, **spread})
        text = " ".join(f"{key}={value}" for key, value in labels.items())
        print(
            f"  {name:40s} {text:30s} {median:12.4g} {unit}  (min {min(values):.4g}, max {max(values):.4g})", flush=True
        )
        return median

    def ratio(self, name: str, value: float, target: float | None = None) -> None:
        """Adds a ratio. `target`: its smallest accepted value, shown beside it."""
        self.ratios[name] = round(value, 4)
        if target is not None:
            self.asked[name] = target
        aim = "" if target is None else f"  (asked for: at least {target:g})"
        print(f"  ratio {name:34s} {value:.3f}{aim}", flush=True)

    def compare(self, figure: str, paper: str, ours: str, why: str = "") -> None:
        """Compares a paper's figure with ours. `why`: the reason for a difference."""
        self.comparisons.append({"figure": figure, "paper": paper, "ours": ours, "why": why})
        print(f"  {figure}: {ours} (paper: {paper}){f'; {why}' if why else ''}", flush=True)

    def note(self, text: str) -> None:
        """Adds a sentence and prints it."""
        self.notes.append(text)
        print(f"  note: {text}", flush=True)

    def skip(self, reason: str) -> None:
        """Records that nothing can be measured here. An earlier result stays unchanged."""
        self.skipped = reason
        print(f"  skipped: {reason}", flush=True)


def run(name: str, measure: Callable[[Options, Report], None], description: str | None) -> None:
    """Runs the benchmark `benchmarks.{name}` from the command line; writes its JSON to --json."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--model", default="kaveri-tiny", help="path, hub id or bundled name")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of engine/ and serving.colocated")
    parser.add_argument("--data", type=Path, help="folder of published data, of the benchmarks that read some")
    parser.add_argument(
        "--program", action="append", default=[], type=_program, metavar="NAME=PATH", help="measured beside ours"
    )
    given = parser.parse_args()
    report = Report()
    started = time.monotonic()
    print(f"{name}:", flush=True)
    options = Options(
        quick=given.quick, model=given.model, device=given.device, data=given.data, programs=dict(given.program)
    )
    measure(options, report)
    if report.skipped:
        return
    result = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": _machine(given.device),
        "quick": given.quick,
        "duration_s": round(time.monotonic() - started, 1),
        "workload": report.workload,
        "ratios": report.ratios,
        "asked": report.asked,
        "comparisons": report.comparisons,
        "rows": report.rows,
        "notes": report.notes,
    }
    if given.json is not None:
        write_result(given.json, result)


def _program(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with the path of a file")
    return name, Path(path).absolute()


def _commit() -> str:
    """The checked-out commit, with "+" when files differ from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    return (head or "unknown") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=False, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _machine(device: str) -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        **({"accelerator": _accelerator()} if device == "cuda" else {}),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load_average": round(os.getloadavg()[0], 2),
    }


def _accelerator() -> str:
    # Not at the top: most benchmarks need no torch.
    import torch

    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__.partition('+')[0]}"
