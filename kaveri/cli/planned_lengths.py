"""The lengths for which `kaveri plan` plans: from a trace, or as given."""

from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths, Workload


def read_lengths(trace: Path | None, lengths: str, longest: int) -> tuple[list[RequestLengths], int]:
    """Those that fit, and how many were left out because they are too long."""
    from kaveri.planner.expected_load import parse_lengths

    if (trace is None) == (not lengths):
        raise ConfigError("--trace", "or --lengths must be given, and not both; or --from-cluster")
    if trace is None:
        return parse_lengths(lengths), 0
    from kaveri.workload.traces import read_trace

    load = Workload(lengths=[entry.lengths for entry in read_trace(trace, 1 << 31)])
    fitting = load.fitting(longest)
    if not fitting.lengths:
        raise ConfigError("--trace", f"no request fits into {longest} tokens")
    return list(fitting.lengths), len(load.lengths) - len(fitting.lengths)
