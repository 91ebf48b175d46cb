"""Request lengths for `kaveri plan`: from a trace, or as given."""

from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths, Workload

_ALL = 1 << 31


def read_lengths(trace: Path | None, lengths: str, longest: int) -> tuple[list[RequestLengths], int]:
    """Read the lengths that fit, and the number left out because they are too long."""
    from kaveri.planner.expected_load import parse_lengths

    if (trace is None) == (not lengths):
        raise ConfigError("--trace", "or --lengths must be given, and not both; or --from-cluster")
    if trace is None:
        return parse_lengths(lengths), 0
    fitting, too_long = read_fitting(trace, longest)
    return list(fitting.lengths), too_long


def read_fitting(trace: Path, longest: int) -> tuple[Workload, int]:
    """Read the requests of a trace that fit, with their times, in the order of arrival, and the number left out."""
    from kaveri.workload.traces import read_trace

    load = read_trace(trace, _ALL)
    fitting = load.fitting(longest)
    if not fitting.lengths:
        raise ConfigError("--trace", f"no request fits into {longest} tokens")
    return fitting, len(load.lengths) - len(fitting.lengths)
