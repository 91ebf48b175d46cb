"""Resources that a request needs on a decode instance. A value."""

from typing import NamedTuple

from kaveri.kv.layout.layout import KvLayout


class Demand(NamedTuple):
    """Resources that a request needs on a decode instance."""

    tokens: int
    """Tokens that need room: those whose KV is pushed, plus the next one."""
    predicted: int = 0
    """Lower bound of the predicted final token count. 0: unknown."""
    heavy: bool = False
    """True if the request is long in decode (HeavyThresholds)."""
    layout: KvLayout | None = None
    """Layout of the pool that pushes its KV; only instances whose layout it can be mapped onto are chosen. None:
    any."""
