"""Provenance of a measurement: version and commit, machine, Python, and the command line."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kaveri.latency.machine import this_machine

_GIT_TIMEOUT_S = 5.0


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """Return version, machine and command line as JSON values. arguments: command line without the program."""
    return {
        "version": importlib.metadata.version("kaveri"),
        "commit": _commit(),
        "machine": {**asdict(this_machine("cpu")), "platform": platform.platform(), "load": os.getloadavg()[0]},
        "python": platform.python_version(),
        "arguments": list(arguments),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """Return the commit of the source tree, with "+" if files differ from it; None outside one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + "+" if _git(root, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
    )
    return ended.stdout.strip()
