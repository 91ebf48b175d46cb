"""How much memory processes have, from the kernel's own account. Linux only."""

import re
from collections.abc import Iterable
from pathlib import Path

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def proportional_bytes(pids: Iterable[int]) -> int:
    """What belongs to these processes: memory that several processes map counts once, split between them (PSS)."""
    return sum(1024 * int(_PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) for pid in pids)
