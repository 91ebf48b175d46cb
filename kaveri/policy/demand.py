"""Defines a request's resource needs on a decode instance."""

from typing import NamedTuple

from kaveri.kv.layout.layout import KvLayout


class Demand(NamedTuple):
    """Resources that a request needs on a decode instance."""

    tokens: int
    """Tokens that need KV blocks: those whose KV is pushed, plus the next one."""
    predicted: int = 0
    """Lower bound of the predicted final length, prompt plus answer, in tokens. 0: unknown."""
    heavy: bool = False
    """True if decoding is expected to be long or costly (HeavyThresholds)."""
    layout: KvLayout | None = None
    """KV layout of the pushing pool; only instances with a layout it can be converted to are chosen. None: any."""
