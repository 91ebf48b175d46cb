"""The model below an engine that we drive step by step: one packed batch in, one drawn token per sequence out.

engine/stepwise.py owns requests, blocks, chunks, batches and transfers; a runner owns weights and arithmetic. The
transformers runner computes; the fake runner makes tokens up; both work on the same pool of blocks.
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
    """The tokens behind the slice's first positions, whose log-probabilities are wanted: one for each position, without
    the last one of a prompt. Empty: none are."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token with what was asked about it."""

    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class NoToken:
    """No token could be drawn: the request cannot go on. Its neighbours in the batch are not affected."""

    reason: str
    is_final: bool = False
    """As of RequestFailed: an exception was raised for this slice alone."""


NOT_FINITE = "the model's logits are NaN or infinite"
"""Why no token is drawn where the largest logit is no finite number."""


@dataclass(frozen=True, slots=True)
class ScoredSlice:
    """What a slice with scored_ids has given."""

    entries: tuple[Logprobs, ...]
    """One for each of scored_ids, with params.prompt_logprobs likeliest tokens."""
    drawn: DrawnToken | NoToken | None


Drawn = DrawnToken | NoToken | ScoredSlice | None
"""What a step has drawn for one slice; None where no token was asked for."""

LayerListener = Callable[[int], None]
"""Told that a layer's KV of the whole step is in the pool, in layer order, on the runner's thread."""


class ModelRunner(Protocol):
    """Weights and arithmetic. Called from one thread only."""

    name: str
    """"transformers" or "fake"; becomes EngineInfo.engine."""
    device: str
    """"cpu" or "cuda[:index]": where it computes."""
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def attach(self, pool: KvPool) -> None:
        """Gives the runner its blocks, once, before the first step."""

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Computes one step: writes the KV of every slice into its blocks, then draws where asked.

        Slices of one token (decode) and of many (prefill chunks) may be mixed. A sequence's tokens must not depend on
        what else is in the batch, up to floating-point rounding. What stopping.barred_token_ids names is not drawn.
        """

    def completed(self, block_ids: Sequence[int]) -> None:
        """Behind run(): these blocks are to be read from the pool. A runner with a device copies them from there."""

    def landed(self, block_ids: Sequence[int]) -> None:
        """These blocks of the pool were written by a transfer. A runner with a device copies them there."""
