"""Orders of a step to the connector's worker sides. Plain values, which are sent to other processes if there are
several ranks."""

from dataclasses import dataclass
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """Tokens of one prompt that a step computes and whose KV is pushed."""

    engine_id: str
    token_count: int
    """Tokens of the whole prompt."""
    new_block_ids: tuple[int, ...]
    """Blocks that it was given for this step, after those that it has."""
    before: int
    """Tokens computed before the step, without those of the prefix cache."""
    computed: int
    """Tokens computed after the step, including those of the prefix cache."""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Orders of one step, the same for every rank."""

    chunks: tuple[PromptChunk, ...] = ()
    landed_block_ids: tuple[int, ...] = ()
    """Blocks that transfers have written, and that may be read from this step on."""
    released: tuple[str, ...] = ()
    """vLLM's ids of requests that have ended and whose blocks nothing touches any more."""
    completed_block_ids: tuple[int, ...] = ()
    """Blocks that the step completes and that are copied to replicas after it."""
    left_block_ids: tuple[int, ...] = ()
    """Blocks that no step computes any more, and that are copied to replicas."""
