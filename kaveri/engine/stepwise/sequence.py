"""One request inside the stepwise engine, and the steps that are formed of several. No I/O, no locks."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import MAX_SCORED_TOKENS, EngineKey
from kaveri.engine.kv_plane import Source
from kaveri.engine.stepwise.runner import SequenceSlice


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


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. Also the owner of its blocks in the allocator, so that a key used again cannot free them.

    # [0, computed) KV is in the blocks   [computed, len(token_ids)) to be computed; the next token is drawn at the end
    """

    key: EngineKey
    params: ResolvedParams
    token_ids: list[int]
    """Prompt and every token drawn so far; grows in place."""
    draw_index: int
    """Index within the answer of the next token to draw."""
    phase: SequencePhase
    held_tokens: int | None = None
    """Resumed: the KV of this many tokens lands, and the rest is computed here."""
    block_ids: list[int] = field(default_factory=list)
    """Grows in place between steps; empty after a preemption."""
    computed: int = 0
    admission: int = -1
    """Rank among the admitted; kept through preemptions."""
    source: Source | None = None
    """Its blocks that may be pushed. Prefill side only."""
    runner_unaware: bool = False
    """A transfer has written its blocks, and the runner does not know yet."""
    in_step: bool = False
    """The running step reads or writes its blocks."""
    is_saving: bool = False
    """The engine's thread is copying its last blocks to the pool."""
    transfer_id: bytes | None = None
    """The open transfer that reads its blocks (prefill side) or can write them (decode side)."""
    is_copied: bool = False
    """Its blocks are copied to a replica."""
    mirrored: int = 0
    """Whole blocks whose KV is in the pool, if the runner computes in a device's memory; kept while it is copied."""
    generation: int = 0
    """Times that it has given its blocks up."""
    done: bool = False
    """Ended. Its blocks are free as soon as neither a step nor a transfer can touch them."""
    suspect_until: int = 0
    prompt_tokens: int = 0
    """Tokens that it came with: the prompt, and those that earlier attempts have generated."""

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next one can be drawn; 1 for a decode step."""
        return len(self.token_ids) - self.computed

    @property
    def is_suspect(self) -> bool:
        """True if a step takes no other suspect at the same time."""
        return self.draw_index < self.suspect_until

    @property
    def touched(self) -> bool:
        """True if the engine's thread or a transfer can still touch its blocks."""
        return self.in_step or self.is_saving or self.transfer_id is not None

    def slice(self, token_count: int) -> SequenceSlice:
        """Return the next `token_count` tokens to compute; draws when they reach the end."""
        start, stop = self.computed, self.computed + token_count
        draw = stop == len(self.token_ids)
        scored_ids = self.token_ids[start + 1 : stop + 1] if self.is_scored else ()
        return SequenceSlice(
            self.token_ids[start:stop], start, self.block_ids, draw, self.draw_index, self.params, scored_ids
        )

    @property
    def is_scored(self) -> bool:
        """True if the log-probabilities of its tokens are reported while they are computed."""
        is_first = self.phase is SequencePhase.PREFILLING and self.draw_index == 0
        return is_first and self.params.prompt_logprobs is not None


class PlannedSlice(NamedTuple):
    """A step's part of a sequence: its next `token_count` tokens."""

    sequence: Sequence
    token_count: int


def form_step(
    running: Iterable[Sequence], prefilling: Iterable[Sequence], chunk_tokens: int, *, suspect_first: bool = True
) -> list[PlannedSlice]:
    """Form a step: one token of every running sequence that only lacks its newest, and a chunk of up to `chunk_tokens`.

    The chunk is filled in order, first with what preempted sequences recompute, then with prompts; several share a
    chunk, a long one is spread over several, and each sequence records its progress (TetriInfer, arXiv 2401.11181,
    section 3.3.3). At most MAX_SCORED_TOKENS are of prompts whose log-probabilities are reported.

    A suspect (EngineRequest.suspect_until) is computed alone: otherwise it could be blamed for a first failure of
    another. suspect_first: True to compute the first suspect, if there is one; False the others.
    """
    running, prefilling = tuple(running), tuple(prefilling)
    # Most have never been one.
    suspects = [each for each in (*running, *prefilling) if each.suspect_until and each.is_suspect]
    if suspects and suspect_first:
        return _packed((), suspects[:1], chunk_tokens)
    innocent = [each for each in running if each not in suspects] if suspects else running
    planned = _packed(innocent, [each for each in prefilling if each not in suspects], chunk_tokens)
    return planned or _packed((), suspects[:1], chunk_tokens)


def _packed(running: Iterable[Sequence], prefilling: Iterable[Sequence], chunk_tokens: int) -> list[PlannedSlice]:
    planned: list[PlannedSlice] = []
    recomputing: list[Sequence] = []
    for sequence in running:
        if sequence.pending == 1:
            planned.append(PlannedSlice(sequence, 1))
        else:
            recomputing.append(sequence)
    room, scored_room = chunk_tokens, MAX_SCORED_TOKENS
    for queue in (recomputing, prefilling):
        for sequence in queue:
            if room == 0:
                return planned
            token_count = min(room, sequence.pending)
            if sequence.is_scored:
                token_count = min(token_count, scored_room)
                scored_room -= token_count
            if token_count:
                planned.append(PlannedSlice(sequence, token_count))
                room -= token_count
    return planned
