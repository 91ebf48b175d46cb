"""One request of the vLLM engine, and what vLLM keeps for it. No I/O, no locks; needs no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kaveri.engine.blame import is_suspect
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.vllm.life import State, VllmEnded, VllmReserved


@dataclass(eq=False, slots=True)
class VllmRequest:
    """The cell that holds a request's state. The engine's lock guards its state."""

    request: EngineRequest
    state: State
    entry: "Entry | None" = None
    """What vLLM keeps for it now. The engine thread's own."""
    drawn: list[int] = field(default_factory=list)
    """Tokens behind those of the request, the one that prefill drew included."""
    is_copied: bool = False
    """Its blocks are copied to a replica."""
    whole_block_ids: tuple[int, ...] = ()
    """Its first blocks whose last token is computed and whose KV is in the pool. Known from its landing, and from the
    steps that compute it while it is copied."""
    tail_block_ids: tuple[int, ...] | None = None
    """Of one that has left: the part-full block behind the whole ones, if there is one. None: not in the pool yet."""
    generation: int = 0
    """How often it has given its blocks up."""

    @property
    def engine_id(self) -> str:
        """What vLLM is given as the request's id."""
        return self.state.facts.engine_id

    @property
    def key(self) -> EngineKey:
        """What the service calls it."""
        return self.state.facts.key

    @property
    def prompt_tokens(self) -> int:
        return self.state.facts.prompt_tokens

    @property
    def held_tokens(self) -> int | None:
        return self.state.facts.held_tokens

    @property
    def source(self) -> str:
        """What the ranks know its blocks by."""
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
        """Whether vLLM computes no other suspect beside it."""
        return not self.done and is_suspect(self.draw_index, self.request.suspect_until)

    def give_up_blocks(self) -> None:
        """Its blocks are others' from now on."""
        self.whole_block_ids = ()
        self.generation += 1

    def enter(self, vllm_id: str, record: Any) -> "Entry":
        """vLLM has taken it in."""
        self.entry = Entry(
            self, vllm_id, record, AwaitingBlocks() if isinstance(self.state, VllmReserved) else EntryQueued()
        )
        return self.entry

    def leave_entry(self) -> "VllmRequest | None":
        """Parts with what vLLM keeps for it: that belongs to the returned stand-in, which has ended. None: nothing."""
        if self.entry is None:
            return None
        left = VllmRequest(self.request, VllmEnded(facts=self.state.facts), self.entry)
        self.entry.owner, self.entry = left, None
        return left


@dataclass(frozen=True, slots=True)
class EntryQueued:
    """vLLM has not begun it."""


@dataclass(frozen=True, slots=True)
class AwaitingBlocks:
    """vLLM is to give it blocks for the KV that a transfer brings."""


@dataclass(frozen=True, slots=True)
class AwaitingKv:
    """vLLM has, and counts it as unfinished, but can do nothing for it."""

    landing_blocks: Sequence[int]
    """Those that the transfer writes."""


@dataclass(frozen=True, slots=True)
class EntryComputing:
    """vLLM computes it, or will when there are blocks."""


@dataclass(frozen=True, slots=True)
class EntryKept:
    """vLLM computes it no more, and may keep its blocks."""


@dataclass(frozen=True, slots=True)
class EntryReleased:
    """vLLM is to take the blocks back with the next step."""


@dataclass(eq=False, slots=True)
class Entry:
    """What vLLM keeps for a request that it was given. A request that is given again has another. The engine thread's
    own."""

    owner: VllmRequest
    vllm_id: str
    record: Any
    """vLLM's own; VllmCore.begin_answer writes its last token, nothing else is written."""
    state: EntryQueued | AwaitingBlocks | AwaitingKv | EntryComputing | EntryKept | EntryReleased
