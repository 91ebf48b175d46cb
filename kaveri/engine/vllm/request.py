"""A request of the vLLM engine, and its entry in vLLM. No I/O, no locks; needs no vLLM."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.vllm.life import State, VllmEnded, VllmReserved

RAISED_DRAWS: dict[str, str] = {}
"""Error of each failed sampling, by engine id. A vLLM logits processor cannot end a single request of a step, so it
records the error here, and the engine removes it after the step."""


class EntryPhase(enum.Enum):
    """Phase of a request inside vLLM."""

    QUEUED = enum.auto()
    """Not started by vLLM."""
    AWAITING_BLOCKS = enum.auto()
    """Waits for blocks of vLLM to receive a transfer's KV."""
    AWAITING_KV = enum.auto()
    """Has blocks and waits for KV; vLLM counts it as unfinished but cannot compute it."""
    COMPUTING = enum.auto()
    """Computed by vLLM, now or when blocks are free."""
    KEPT = enum.auto()
    """No longer computed by vLLM, but may keep its blocks."""
    RELEASED = enum.auto()
    """Its blocks return to vLLM with the next step."""


@dataclass(eq=False, slots=True)
class VllmRequest:
    """Mutable record of a request and its current state. The engine's lock guards the state."""

    request: EngineRequest
    state: State
    entry: "Entry | None" = None
    """The request's current entry in vLLM. Used by the engine thread only."""
    drawn: list[int] = field(default_factory=list)
    """Tokens generated so far on this engine, including the one that prefill sampled."""
    is_copied: bool = False
    """True if the request's blocks are copied to a replica."""
    whole_block_ids: tuple[int, ...] = ()
    """Leading blocks that are full and whose KV is in the pool. Set by the landing, and by each step while the request
    is copied."""
    tail_block_ids: tuple[int, ...] | None = None
    """Partly filled block after the full ones, if any, of a released request. None: not in the pool yet."""
    generation: int = 0
    """Number of times that the request gave its blocks up."""

    @property
    def engine_id(self) -> str:
        return self.state.facts.engine_id

    @property
    def key(self) -> EngineKey:
        return self.state.facts.key

    @property
    def prompt_tokens(self) -> int:
        return self.state.facts.prompt_tokens

    @property
    def held_tokens(self) -> int | None:
        return self.state.facts.held_tokens

    @property
    def source(self) -> str:
        """Key of the request's blocks at the ranks."""
        return self.engine_id

    @property
    def done(self) -> bool:
        return isinstance(self.state, VllmEnded)

    @property
    def transfer_id(self) -> bytes | None:
        return self.state.transfer_id

    @property
    def draw_index(self) -> int:
        """Index within the answer of the next token to sample."""
        return self.request.generated_count + len(self.drawn)

    @property
    def is_suspect(self) -> bool:
        """True if vLLM must compute no other suspect request at the same time."""
        suspect_until = self.request.suspect_until
        return suspect_until > 0 and not self.done and self.draw_index < suspect_until

    @property
    def awaits_kv(self) -> bool:
        """True if vLLM has allocated blocks but waits for their KV."""
        return self.entry is not None and self.entry.phase is EntryPhase.AWAITING_KV

    def give_up_blocks(self) -> None:
        """Release the blocks for other requests."""
        self.whole_block_ids = ()
        self.generation += 1

    def enter(self, vllm_id: str, record: Any) -> "Entry":
        """Record that vLLM has accepted the request."""
        awaits_blocks = isinstance(self.state, VllmReserved)
        phase = EntryPhase.AWAITING_BLOCKS if awaits_blocks else EntryPhase.QUEUED
        self.entry = Entry(self, vllm_id, record, phase)
        return self.entry

    def leave_entry(self) -> "VllmRequest | None":
        """Detach the entry in vLLM and return an ended stand-in that owns it; None if there is no entry."""
        if self.entry is None:
            return None
        left = VllmRequest(self.request, VllmEnded(facts=self.state.facts), self.entry)
        self.entry.owner, self.entry = left, None
        return left


@dataclass(eq=False, slots=True)
class Entry:
    """State of a request inside vLLM; a resubmitted request has a new entry. Used by the engine thread only."""

    owner: VllmRequest
    vllm_id: str
    record: Any
    """vLLM's own record; only VllmCore.begin_answer writes to it (the last token)."""
    phase: EntryPhase
    landing_blocks: Sequence[int] = ()
    """Blocks that wait for KV."""
