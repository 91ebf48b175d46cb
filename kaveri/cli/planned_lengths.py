"""The lengths for which `kaveri plan` plans: from a trace, or as given."""

from pathlib import Path
from typing import TYPE_CHECKING

from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths

if TYPE_CHECKING:
    from kaveri.workload.traces import TraceEntry

_ALL = 1 << 31


def read_lengths(trace: Path | None, lengths: str, longest: int) -> tuple[list[RequestLengths], int]:
    """Those that fit, and how many were left out because they are too long."""
    from kaveri.planner.expected_load import parse_lengths

    if (trace is None) == (not lengths):
        raise ConfigError("--trace", "or --lengths must be given, and not both; or --from-cluster")
    if trace is None:
        return parse_lengths(lengths), 0
    entries, too_long = read_fitting(trace, longest)
    return [entry.lengths for entry in entries], too_long


def read_fitting(trace: Path, longest: int) -> "tuple[list[TraceEntry], int]":
    """The requests of a trace that fit, in the order of their arrival, and how many were left out."""
    from kaveri.workload.traces import read_trace

    entries = read_trace(trace, _ALL)
    fitting = [one for one in entries if one.lengths.prompt_tokens + one.lengths.output_tokens <= longest]
    if not fitting:
        raise ConfigError("--trace", f"no request fits into {longest} tokens")
    return fitting, len(entries) - len(fitting)
