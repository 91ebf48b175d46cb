"""GPUs and machines, as data. Pure."""

from dataclasses import dataclass

from kaveri.planner.bundled_table import read_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of GPU, and the machines that hold it."""

    name: str
    accelerator: str
    """Part of the name that the GPU reports, such as A100. A profile must have been measured on one."""
    memory_bytes: int
    """Memory of one GPU."""
    gpus_per_node: int
    link_in_node: float
    """Bytes per second between two GPUs of one machine."""
    link_between_nodes: float
    """Bytes per second between two machines."""
    price_per_hour: float
    """Price of one GPU, in US dollars."""


def read_hardware(name_or_file: str) -> Hardware:
    """Read a bundled kind by its name, or a TOML file with the same fields. Raises ConfigError."""
    return read_entry(name_or_file, "hardware", Hardware, "--hardware")
