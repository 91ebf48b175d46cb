"""Chooses the steps to measure. Pure. Each series varies one term of the latency model: chunks of one prompt by size,
the same tokens as several short prompts, the same chunk after longer contexts, and batches by context."""

from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.latency.fit import COEFFICIENTS

MAX_CHUNK_TOKENS = 2048
"""Largest chunk: four times the saturating chunk of OPT-13B on an A100 in both papers."""
_PACKED_TOKENS = (256, 1024)
_PACKED_PROMPTS = (16, 64, 256)
_CHUNKS_BEHIND_CONTEXT = (64, 256, 512)
_EARLIER_CONTEXTS = (256, 512, 1024, 2048, 4096)
_DECODE_CONTEXTS = (16, 64, 256, 512, 1024, 2048, 4096)

Prompts = tuple[tuple[int, int], ...]
"""Chunk of each prompt of a step, [start, stop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    max_chunk_tokens: int
    max_batch: int
    max_model_len: int
    total_blocks: int
    block_tokens: int

    def holds(self, count: int, tokens: int) -> bool:
        """Return True if the KV pool holds `count` sequences of `tokens` tokens, and the model one of them."""
        return tokens <= self.max_model_len and count * -(-tokens // self.block_tokens) <= self.total_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Steps to measure in a profile, without duplicates."""

    prefill: tuple[Prompts, ...]
    decode: tuple[tuple[int, int], ...]
    """(batch, context tokens of each request, including the step's own token)."""


def plan_steps(limits: StepLimits, quick: bool) -> StepPlan:
    """Choose steps to measure; about a third if `quick`. Raises ConfigError if the limits allow too few for a fit."""
    chunks = chunk_sizes(limits, quick)
    prefill = [_as_few_prompts(chunk, limits.max_model_len) for chunk in chunks]
    prefill += [
        ((0, each),) * (total // each)
        for total in _PACKED_TOKENS[: 1 if quick else None]
        for each in _PACKED_PROMPTS
        if each < total <= chunks[-1] and limits.holds(total // each, each)
    ]
    prefill += [
        ((start, start + chunk),)
        for chunk in _CHUNKS_BEHIND_CONTEXT[1 if quick else 0 :: 2 if quick else 1]
        for start in _EARLIER_CONTEXTS
        if chunk <= chunks[-1] and limits.holds(1, start + chunk)
    ]
    batches = _doubling(limits.max_batch, 4 if quick else 2)
    contexts = [min(context, limits.max_model_len) for context in _DECODE_CONTEXTS[:: 2 if quick else 1]]
    # A decode context has at least two tokens: one token would be a prompt.
    decode = [
        (batch, context) for context in contexts if context > 1 for batch in batches if limits.holds(batch, context)
    ]
    for phase, steps in (("prefill", prefill), ("decode", decode)):
        if len(set(steps)) < COEFFICIENTS + 2:
            reason = f"of {limits.max_model_len} and the KV pool leave too few different {phase} steps to measure"
            raise ConfigError("max_model_len", reason)
    return StepPlan(prefill=tuple(dict.fromkeys(prefill)), decode=tuple(dict.fromkeys(decode)))


def chunk_sizes(limits: StepLimits, quick: bool) -> Sequence[int]:
    """Choose chunk sizes for the throughput curve: from 16 tokens up by a factor of at most 1.5, or 2 if `quick`."""
    longest_prompts = limits.total_blocks // -(-limits.max_model_len // limits.block_tokens)
    most = min(limits.max_chunk_tokens, longest_prompts * limits.max_model_len)
    doubling = _doubling(most, 2)
    between = [] if quick else [size * 3 // 2 for size in doubling if size >= 16 and size * 3 // 2 < most]
    return sorted({*doubling, *between})


def _doubling(most: int, factor: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * factor < most:
        sizes.append(sizes[-1] * factor)
    return [*sizes, most] if most > 1 else sizes


def _as_few_prompts(tokens: int, max_model_len: int) -> Prompts:
    full, rest = divmod(tokens, max_model_len)
    return ((0, max_model_len),) * full + (((0, rest),) if rest else ())
