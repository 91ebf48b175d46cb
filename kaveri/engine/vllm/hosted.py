"""One request inside the vLLM engine: what we know of it beside what vLLM knows. No I/O, no locks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.phase import Phase
from kaveri.kv.layout.layout import KvLayout


@dataclass(eq=False, slots=True)
class Hosted:
    """One request. Guarded by the engine's lock, but for what is said to be the engine thread's own."""

    number: str
    """Ours, never used again; what vLLM is told as the request's id."""
    request: EngineRequest
    phase: Phase
    needed_blocks: int
    """Blocks that it was promised: those of its prompt, and on the decode side of one token more."""
    token_ids: list[int]
    """Prompt and every token drawn so far."""
    draw_index: int
    """Index within the answer of the next token to tell of."""
    block_ids: list[int] = field(default_factory=list)
    """Blocks that vLLM has given it, as far as they count against what was promised."""
    computed: int = 0
    """Tokens whose KV is in its blocks, as of the last step."""
    next_blocks: int = 0
    """Blocks that its next token will take: 1 between steps when its own are full, and it goes on."""
    started: bool = False
    """Its first chunk, or its first step in the running batch, has begun."""
    preempted: bool = False
    """It has given its blocks up and waits, inside vLLM, to be computed again."""
    is_source: bool = False
    """Its blocks may be pushed. Prefill side only."""
    transfer_id: bytes | None = None
    """The open transfer that reads its blocks (prefill side) or can write them (decode side)."""
    done: bool = False
    """Ended. vLLM frees its blocks as soon as no transfer can touch them."""

    # The engine thread's own.

    vllm_id: str = ""
    """vLLM's own id, while it knows of the request."""
    vllm_request: Any = None
    """vLLM's own record of it; Host.begin_answer writes its last token, nobody else anything."""
    by_transfer: bool = False
    """Its KV is to be brought by a transfer."""
    placed: bool = False
    """vLLM has given it blocks for that KV, once and for all: after a preemption it is computed here."""
    landing_blocks: list[int] = field(default_factory=list)
    """Those that the transfer writes."""
    received: bool = False
    """vLLM is told, or has been, that this KV is there."""
    behind: bool = False
    """Adopted: vLLM has been given what follows its first token, and has not begun with it."""
    stopped: bool = False
    """vLLM computes it no more."""
    released: bool = False
    """vLLM is told, or has been, to take its blocks back."""

    @classmethod
    def prefill(cls, number: str, request: EngineRequest, layout: KvLayout) -> "Hosted":
        """A prompt to be computed."""
        hosted = cls._of(number, request, Phase.PREFILLING, layout.block_count(len(request.token_ids)))
        hosted.is_source = True
        return hosted

    @classmethod
    def decode(cls, number: str, request: EngineRequest, layout: KvLayout) -> "Hosted":
        """A prompt whose KV is to be brought by a transfer."""
        hosted = cls._of(number, request, Phase.RESERVED, layout.block_count(len(request.token_ids) + 1))
        hosted.by_transfer = True
        return hosted

    @classmethod
    def _of(cls, number: str, request: EngineRequest, phase: Phase, needed_blocks: int) -> "Hosted":
        return cls(number, request, phase, needed_blocks, list(request.token_ids), request.generated_count)

    @property
    def key(self) -> EngineKey:
        """What the service calls it."""
        return self.request.key

    @property
    def prompt_tokens(self) -> int:
        """Tokens whose KV a transfer of it moves."""
        return len(self.request.token_ids)

    @property
    def source(self) -> str:
        """What the ranks know its blocks by."""
        return self.number

    @property
    def is_prefill(self) -> bool:
        """Whether it is on the prefill side."""
        return self.phase in (Phase.PREFILLING, Phase.COMPUTED)

    @property
    def promised_blocks(self) -> int:
        """Free blocks that nobody else may be promised."""
        if self.done:
            return 0
        if self.phase is Phase.RUNNING and self.started:
            return self.next_blocks
        return max(0, self.needed_blocks - len(self.block_ids)) + self.next_blocks

    def goes_on(self, max_model_len: int) -> bool:
        """Whether there is room for a token behind the one that prefill draws."""
        return len(self.request.token_ids) + 1 < max_model_len

    def take(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """vLLM has given it these blocks, all of them, in order. Returns those that are new."""
        new = tuple(block_ids[len(self.block_ids) :])
        self.block_ids += new
        return new

    def claim_next(self, block_tokens: int) -> None:
        """Between steps, of an answer: vLLM gives it a block only when it computes into it; before, that is for nobody
        else."""
        self.next_blocks = int(self.computed % block_tokens == 0)

    def draw(self, token_id: int) -> None:
        """Its next token is drawn."""
        self.token_ids.append(token_id)
        self.draw_index += 1

    def leave_behind(self) -> "Hosted":
        """Parts with what vLLM keeps for it, which is another's from now on: one that has ended, and is released."""
        left = Hosted(f"{self.number}-left", self.request, self.phase, 0, [], 0)
        left.done = True
        left.placed, left.stopped, left.vllm_id = self.placed, self.stopped, self.vllm_id
        self.vllm_id, self.vllm_request = "", None
        self.placed = self.stopped = self.released = False
        self.block_ids = []
        self.computed = self.next_blocks = 0
        return left
