"""What a request asks of a decode instance. A value."""

from typing import NamedTuple

from kaveri.kv.layout.layout import KvLayout


class Demand(NamedTuple):
    """What a request asks of a decode instance."""

    tokens: int
    """Tokens to reserve room for: those whose KV is pushed, and the next one."""
    predicted: int = 0
    """Fewest tokens that it is predicted to end with. 0: unknown."""
    heavy: bool = False
    """Long in decode (HeavyThresholds)."""
    layout: KvLayout | None = None
    """Of the pool that pushes its KV: only instances onto whose layout it can be mapped are chosen. None: any."""
