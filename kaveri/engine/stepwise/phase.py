"""Phases of a request inside an engine."""

import enum


class SequencePhase(enum.Enum):
    """Phase of a request. The prefill side uses the first two, the decode side the others."""

    PREFILLING = enum.auto()
    """Submitted, the prompt not fully computed."""
    COMPUTED = enum.auto()
    """The first token is drawn; the KV waits to be accepted elsewhere."""
    RESERVED = enum.auto()
    """Blocks are leased to a transfer that has not landed."""
    LANDED = enum.auto()
    """The KV is here, or must be recomputed after a preemption; not admitted."""
    WAITING = enum.auto()
    """Admitted, not in the running batch: the batch is full, or the blocks were given up."""
    RUNNING = enum.auto()
    """Drawing tokens in the running batch, or recomputing."""
    STOPPING = enum.auto()
    """Being released: it joins no further step. Its last block is not in the pool yet."""
    STOPPED = enum.auto()
    """All its KV is in the pool, for the holder of its replica."""
