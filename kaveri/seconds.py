"""Validates durations from external input: infinity or NaN would break clocks and waits."""

import math

from kaveri.errors import InvalidArgument

DAY_S = 86_400.0


def require_seconds(field: str, value_s: float, *, least_s: float = 0.0, most_s: float = DAY_S) -> float:
    """Return `value_s`. Raises InvalidArgument, naming `field`, unless it is finite and in [least_s, most_s]."""
    if not (math.isfinite(value_s) and least_s <= value_s <= most_s):
        raise InvalidArgument(field, value_s, f"a number of seconds in [{least_s:g}, {most_s:g}]")
    return value_s
