"""What a step of vLLM asks of the connector's worker sides. Plain values, which go to other processes where there are
several ranks."""

from dataclasses import dataclass
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """A step computes tokens of a prompt whose KV is to be pushed."""

    engine_id: str
    token_count: int
    """Of the whole prompt."""
    new_block_ids: tuple[int, ...]
    """Blocks that it was given for this step; they follow those that it has."""
    before: int
    """How many tokens it had computed, those of the prefix cache not counted."""
    computed: int
    """How many it has behind the step, those counted."""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """Of one step, the same for every rank."""

    chunks: tuple[PromptChunk, ...] = ()
    landed_block_ids: tuple[int, ...] = ()
    """Blocks that transfers have written, and that may be read from this step on."""
    released: tuple[str, ...] = ()
    """vLLM's ids of requests that have ended and whose blocks nothing touches any more."""
    completed_block_ids: tuple[int, ...] = ()
    """Blocks that the step completes and that are copied to replicas behind it."""
    left_block_ids: tuple[int, ...] = ()
    """Blocks that no step computes any more, and that are copied to replicas."""
