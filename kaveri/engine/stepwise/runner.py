"""Interface to the model of a stepwise engine: one packed batch in, one drawn token per sequence out.

The engine owns requests, blocks, chunks, batches and transfers; a runner owns weights and arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kaveri.domain.sampling import Logprobs, ResolvedParams
from kaveri.engine.token_rules import TokenRules
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Part of one sequence that one step computes: positions [start, start + len(token_ids))."""

    token_ids: Sequence[int]
    start: int
    """KV of positions [0, start) is in the blocks already."""
    block_ids: Sequence[int]
    """Block i holds positions [i * block_tokens, (i + 1) * block_tokens); covers at least start + len(token_ids)."""
    draw: bool
    """True to draw the token after the last position. False for a chunk that does not end its prompt."""
    draw_index: int
    """Index within the answer of the token to draw; with params.seed, the key of the random number."""
    params: ResolvedParams
    rules: TokenRules | None = None
    """Changes of the logits, at draw_index, that the parameters ask for; None: none."""
    scored_ids: Sequence[int] = ()
    """Prompt tokens whose log-probabilities are requested: those at positions [start + 1, ...), one per position of the
    slice except the prompt's last. Empty: none requested."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """Result of one sequence in a step: the drawn token, with its requested log-probabilities."""

    token_id: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class NoToken:
    """Result of one sequence in a step: no token could be drawn, so its request ends. Others are not affected."""

    reason: str
    is_final: bool = False
    """True if an exception was raised for this slice alone."""
    by_rules: bool = False
    """True if the request's rules leave no token or fail. Every instance would fail alike."""


NOT_FINITE = "the model's logits are NaN or infinite"
"""Reason of a NoToken if the largest logit is not finite."""


@dataclass(frozen=True, slots=True)
class ScoredSlice:
    """Result of one sequence in a step: log-probabilities of its prompt tokens, and the drawn token if requested."""

    entries: tuple[Logprobs, ...]
    """One per id in scored_ids, with the params.prompt_logprobs likeliest tokens."""
    drawn: DrawnToken | NoToken | None


Drawn = DrawnToken | NoToken | ScoredSlice | None
"""Result of a step for one slice; None if no token was requested."""

LayerListener = Callable[[int], None]
"""Called with the index of a layer, in order, when its KV of the whole step is in the pool; on the runner's thread."""


class ModelRunner(Protocol):
    """Weights and arithmetic of a model, without scheduling. Called from one thread only."""

    name: str
    """Such as "transformers" or "fake"; becomes EngineInfo.engine."""
    device: str
    """Device that it computes on: "cpu" or "cuda[:index]"."""
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def attach(self, pool: KvPool) -> None:
        """Set the KV pool whose blocks run() reads and writes. Called once, before the first step."""

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Compute one step: write the KV of every slice into its blocks, then draw where requested.

        Slices of one token (decode) and of many (prefill chunks) may be mixed. A sequence's tokens must not depend on
        the rest of the batch, up to floating-point rounding. Ids in stopping.barred_token_ids() are not drawn, and
        nothing that the slice's rules rule out.
        """

    def completed(self, block_ids: Sequence[int]) -> None:
        """Make blocks that run() has filled readable in the host pool. Runners with device memory copy them to it."""

    def landed(self, block_ids: Sequence[int]) -> None:
        """Take over blocks that a transfer has written to the host pool. Runners with device memory copy them there."""
