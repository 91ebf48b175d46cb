"""The model below an engine that Kaveri drives step by step: one packed batch in, one drawn token per sequence out.

The engine owns requests, blocks, chunks, batches and transfers; a runner owns weights and arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.domain.sampling import Logprobs, ResolvedParams
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of one sequence that one step computes: positions [start, start + len(token_ids))."""

    token_ids: Sequence[int]
    start: int
    """KV of positions [0, start) is in the blocks already."""
    block_ids: Sequence[int]
    """Block i holds positions [i * block_tokens, (i + 1) * block_tokens); covers at least start + len(token_ids)."""
    draw: bool
    """Draw the token after the last position. False for a chunk that does not end its prompt."""
    draw_index: int
    """Index within the answer of the token to draw; keys the random number together with params.seed."""
    params: ResolvedParams
    scored_ids: Sequence[int] = ()
    """The tokens after the slice's first positions, whose log-probabilities are requested: one for each position,
    without the last one of a prompt. Empty: none are."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token with its requested log-probabilities."""

    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class NoToken:
    """Failure to draw a token: the request cannot continue. The other slices of the batch are not affected."""

    reason: str
    is_final: bool = False
    """True if an exception was raised for this slice alone."""


NOT_FINITE = "the model's logits are NaN or infinite"
"""Reason for drawing no token if the largest logit is not finite."""


@dataclass(frozen=True, slots=True)
class ScoredSlice:
    """Result of a slice with scored_ids."""

    entries: tuple[Logprobs, ...]
    """One for each of scored_ids, with params.prompt_logprobs likeliest tokens."""
    drawn: DrawnToken | NoToken | None


Drawn = DrawnToken | NoToken | ScoredSlice | None
"""Result of a step for one slice; None if no token was requested."""

LayerListener = Callable[[int], None]
"""Called when a layer's KV of the whole step is in the pool, in layer order, on the runner's thread."""


class ModelRunner(Protocol):
    """Weights and arithmetic. Called from one thread only."""

    name: str
    """"transformers" or "fake"; becomes EngineInfo.engine."""
    device: str
    """"cpu" or "cuda[:index]": the device that it computes on."""
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def attach(self, pool: KvPool) -> None:
        """Give the runner its blocks, once, before the first step."""

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Compute one step: write the KV of every slice into its blocks, then draw where requested.

        Slices of one token (decode) and of many (prefill chunks) may be mixed. A sequence's tokens must not depend on
        the rest of the batch, up to floating-point rounding. The ids in stopping.barred_token_ids are not drawn.
        """

    def completed(self, block_ids: Sequence[int]) -> None:
        """Make these blocks readable in the pool, after run(). A runner with a device copies them from there."""

    def landed(self, block_ids: Sequence[int]) -> None:
        """Take over blocks of the pool that a transfer has written. A runner with a device copies them there."""
