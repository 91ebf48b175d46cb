"""The properties of a machine that determine an engine's speed."""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware description; a step takes the same time on equal machines."""

    cpu: str
    threads: int
    """Number of threads that a step may use."""
    accelerator: str
    """Name of the GPU; empty: no GPU is used."""

    def __str__(self) -> str:
        return f"{self.accelerator or self.cpu}, {self.threads} {'thread' if self.threads == 1 else 'threads'}"


def this_machine(device: str) -> Machine:
    """Describe this machine. device: "cpu" or "cuda[:index]". Uses torch only if it is already imported."""
    torch = sys.modules.get("torch")
    # torch reads OMP_NUM_THREADS once and then keeps its own number.
    threads = torch.get_num_threads() if torch is not None else len(os.sched_getaffinity(0))
    accelerator = torch.cuda.get_device_name(device) if torch is not None and device.startswith("cuda") else ""
    return Machine(cpu=_cpu(), threads=threads, accelerator=accelerator)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
