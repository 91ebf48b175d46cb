"""How long `kaveri up` takes until a request would succeed, and how much memory each of its processes holds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.support.harness import Options, Report, run
from kaveri import Client, SamplingParams

READY_LIMIT_S = 20.0
RESIDENT_LIMIT_MB = 600.0
START_DEADLINE_S = 120.0


def measure(options: Options, report: Report) -> None:
    """Starts and stops the default stack (2 prefill, 2 decode) a few times."""
    repeats = options.choose(3, 1)
    report.workload = {"model": options.model, "prefill": 2, "decode": 2}
    ready_s: list[float] = []
    resident_mb: dict[str, list[float]] = {}
    for _ in range(repeats):
        seconds, resident = start_once(options.model)
        ready_s.append(seconds)
        for role, megabytes in resident.items():
            resident_mb.setdefault(role, []).append(megabytes)
    median = report.row("time until ready", ready_s, "s")
    report.ratio("20 s / time until ready", READY_LIMIT_S / median, target=1.0)
    for role in sorted(resident_mb):
        largest = max(resident_mb[role])
        report.row("largest resident set after a request", resident_mb[role], "MB", process=role)
        if role in ("prefill", "decode"):
            report.ratio(f"600 MB / resident set of {role}", RESIDENT_LIMIT_MB / largest, target=1.0)
    report.note("time until ready runs from the start of the command to its ready line, Python start-up included")


def start_once(model: str) -> tuple[float, dict[str, float]]:
    """Seconds until ready, and the largest resident set in MB of each role's processes after one request."""
    command = [str(Path(sys.executable).parent / "kaveri"), "up", "--model", model, "--port", "0"]
    began = time.monotonic()
    stack = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert stack.stdout is not None
        line = stack.stdout.readline()
        seconds = time.monotonic() - began
        match = re.search(r"ready at (\S+)", line)
        if match is None:
            raise RuntimeError(f"kaveri up did not become ready: {line!r}")
        with Client(match[1]) as client:
            client.generate("count from 1 to 20", params=SamplingParams(max_tokens=32, temperature=0), timeout_s=60)
        return seconds, resident_by_role(stack.pid)
    finally:
        stack.send_signal(signal.SIGTERM)
        stack.wait(timeout=START_DEADLINE_S)


def resident_by_role(pid: int) -> dict[str, float]:
    """The largest resident set, in MB, among the processes of each role below `pid`."""
    largest: dict[str, float] = {}
    for process in psutil.Process(pid).children(recursive=True):
        command = " ".join(process.cmdline())
        match = re.search(r"services\.(\w+)", command)
        role = match[1] if match else os.path.basename(process.name())
        largest[role] = max(largest.get(role, 0.0), process.memory_info().rss / 1e6)
    return largest


if __name__ == "__main__":
    run("serving.startup", measure, description=__doc__)
