"""One request of the vLLM engine, and its entry in vLLM. No I/O, no locks; needs no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.vllm.life import State, VllmEnded, VllmReserved

RAISED_DRAWS: dict[str, str] = {}
"""Error of each draw that has raised, by engine id. A logits processor of vLLM cannot end one request of a step: it
enters the error here, and the engine removes it after the step."""


@dataclass(eq=False, slots=True)
class VllmRequest:
    """The cell that holds a request's state. The engine's lock guards its state."""

    request: EngineRequest
    state: State
    entry: "Entry | None" = None
    """Its entry in vLLM now. Used by the engine thread only."""
    drawn: list[int] = field(default_factory=list)
    """Tokens after those of the request, including the one that prefill drew."""
    is_copied: bool = False
    """Its blocks are copied to a replica."""
    whole_block_ids: tuple[int, ...] = ()
    """Its first blocks whose last token is computed and whose KV is in the pool. Known from its landing, and from the
    steps that compute it while it is copied."""
    tail_block_ids: tuple[int, ...] | None = None
    """The part-full block after the whole ones, if any, of a request that has left. None: not in the pool yet."""
    generation: int = 0
    """Times that it has given its blocks up."""

    @property
    def engine_id(self) -> str:
        """The request's id in vLLM."""
        return self.state.facts.engine_id

    @property
    def key(self) -> EngineKey:
        """The service's key of the request."""
        return self.state.facts.key

    @property
    def prompt_tokens(self) -> int:
        return self.state.facts.prompt_tokens

    @property
    def held_tokens(self) -> int | None:
        return self.state.facts.held_tokens

    @property
    def source(self) -> str:
        """Key of its blocks at the ranks."""
        return self.engine_id

    @property
    def done(self) -> bool:
        return isinstance(self.state, VllmEnded)

    @property
    def transfer_id(self) -> bytes | None:
        return self.state.transfer_id

    @property
    def draw_index(self) -> int:
        """Index within the answer of the next token to draw."""
        return self.request.generated_count + len(self.drawn)

    @property
    def is_suspect(self) -> bool:
        """True if vLLM computes no other suspect at the same time."""
        suspect_until = self.request.suspect_until
        return suspect_until > 0 and not self.done and self.draw_index < suspect_until

    @property
    def awaits_kv(self) -> bool:
        """True if vLLM has given it blocks, and does not compute it before it is told of their KV."""
        return self.entry is not None and isinstance(self.entry.state, AwaitingKv)

    def give_up_blocks(self) -> None:
        """Give its blocks up to others."""
        self.whole_block_ids = ()
        self.generation += 1

    def enter(self, vllm_id: str, record: Any) -> "Entry":
        """Record that vLLM has accepted it."""
        self.entry = Entry(
            self, vllm_id, record, AwaitingBlocks() if isinstance(self.state, VllmReserved) else EntryQueued()
        )
        return self.entry

    def leave_entry(self) -> "VllmRequest | None":
        """Detach its entry in vLLM: that belongs to the returned stand-in, which has ended. None: it has none."""
        if self.entry is None:
            return None
        left = VllmRequest(self.request, VllmEnded(facts=self.state.facts), self.entry)
        self.entry.owner, self.entry = left, None
        return left


@dataclass(frozen=True, slots=True)
class EntryQueued:
    """Not begun by vLLM."""


@dataclass(frozen=True, slots=True)
class AwaitingBlocks:
    """Waits for blocks of vLLM for the KV that a transfer brings."""


@dataclass(frozen=True, slots=True)
class AwaitingKv:
    """Has blocks, and waits for KV: vLLM counts it as unfinished, but cannot compute it."""

    landing_blocks: Sequence[int]
    """Blocks that the transfer writes."""


@dataclass(frozen=True, slots=True)
class EntryComputing:
    """Computed by vLLM, now or when there are blocks."""


@dataclass(frozen=True, slots=True)
class EntryKept:
    """Not computed by vLLM any more, which may keep its blocks."""


@dataclass(frozen=True, slots=True)
class EntryReleased:
    """Blocks go back to vLLM with the next step."""


@dataclass(eq=False, slots=True)
class Entry:
    """State of a request that vLLM was given. A request that is given again has another. Used by the engine thread
    only."""

    owner: VllmRequest
    vllm_id: str
    record: Any
    """vLLM's own record; VllmCore.begin_answer writes its last token, nothing else is written."""
    state: EntryQueued | AwaitingBlocks | AwaitingKv | EntryComputing | EntryKept | EntryReleased
