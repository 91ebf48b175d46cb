"""The connector's side in vLLM's scheduler: vLLM's words for our requests, and back. Decides nothing by itself."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kaveri.engine.vllm.life import OF_PREFILL
from kaveri.engine.vllm.orders import PromptChunk, StepOrders
from kaveri.engine.vllm.request import (
    AwaitingBlocks,
    AwaitingKv,
    Entry,
    EntryComputing,
    EntryKept,
    EntryReleased,
    VllmRequest,
)

_PARAM = "kaveri_engine_id"


class Placement(NamedTuple):
    """A request whose KV a transfer brings has its blocks."""

    entry: Entry
    first_block: int
    """Those before it have their KV already, from vLLM's prefix cache."""
    block_count: int
    """Of all that it has."""


class RequestAdvance(NamedTuple):
    """A request is computed by a step."""

    entry: Entry
    token_count: int
    """Tokens that the step computes."""
    computed: int
    """Tokens whose KV it has behind the step."""
    block_ids: Sequence[int]
    """All of its blocks, on the prefill side and where they are copied to a replica."""


class StepHooks(Protocol):
    """The engine, as the scheduler's side sees it. Called by vLLM on the thread that steps it."""

    def find(self, engine_id: str) -> VllmRequest | None:
        """The request that vLLM was given under this id of ours."""

    def stepping(
        self, placements: Sequence[Placement], advances: Sequence[RequestAdvance], preempted: Sequence[Entry]
    ) -> Sequence[PromptChunk]:
        """A step begins: it has placed, computes, and has preempted these. Returns the prompts for the ranks to
        follow."""

    def keeps_blocks(self, entry: Entry) -> bool:
        """vLLM is done with a request; whether its blocks are to be kept until we say."""


def transfer_params(engine_id: str) -> dict[str, Any]:
    """What goes into vLLM's SamplingParams.extra_args, so that the hooks know a request for ours."""
    return {"kv_transfer_params": {_PARAM: engine_id}}


def engine_id_of(extra_args: Mapping[str, Any]) -> str:
    """The engine id that transfer_params() has put there; empty: none."""
    return str(extra_args.get("kv_transfer_params", {}).get(_PARAM, ""))


class SchedulerSide:
    """Answers vLLM's scheduler. Requests that are not ours are left alone."""

    def __init__(self, block_tokens: int) -> None:
        self.hooks: StepHooks | None = None
        self._block_tokens = block_tokens
        self._entries: dict[str, Entry] = {}
        self._placements: list[Placement] = []
        # For the next step's orders.
        self._landed_block_ids: list[int] = []
        self._released: list[str] = []
        self._completed_block_ids: list[int] = []
        self._left_block_ids: list[int] = []

    def left(self, block_ids: Sequence[int]) -> None:
        """With the next step the ranks make these blocks readable, which no step computes any more."""
        self._left_block_ids += block_ids

    def landed(self, block_ids: Sequence[int]) -> None:
        """The next step may read these blocks, which a transfer has written."""
        self._landed_block_ids += block_ids

    def release(self, entry: Entry) -> None:
        """With the next step vLLM takes back the blocks of a request that has ended. Once for each."""
        entry.state = EntryReleased()
        self._released.append(entry.vllm_id)

    def release_unknown(self, vllm_id: str) -> None:
        """The same for a request without an entry here."""
        self._released.append(vllm_id)

    @property
    def has_reports(self) -> bool:
        """Whether the next step has something to report to vLLM."""
        return bool(self._released or self._left_block_ids)

    def requested(self, request: Any) -> None:
        """vLLM has taken a request in."""
        engine_id = (request.kv_transfer_params or {}).get(_PARAM)
        ours = self.hooks.find(engine_id) if self.hooks is not None and engine_id is not None else None
        if ours is not None:
            self._entries[request.request_id] = ours.enter(request.request_id, request)
            if ours.held_tokens is not None:
                # vLLM looks for these blocks in its prefix cache. At least one is left for the transfer to bring, so
                # that the request waits for it; VllmCore.begin_answer adds the hashes of the others.
                del request.block_hashes[(ours.held_tokens - 1) // self._block_tokens :]

    def matched(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond its own cache's a transfer will bring, and that vLLM shall wait for them.

        All of them: vLLM still computes the last one, which is the one that prefill draws. Of a resumed request those
        that are held.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or not isinstance(entry.state, AwaitingBlocks):
            return 0, False
        held_tokens = entry.owner.held_tokens
        return (request.num_tokens if held_tokens is None else held_tokens) - computed_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM has placed a request that waits for its KV."""
        entry = self._entries[request.request_id]
        if isinstance(entry.state, AwaitingBlocks):
            facts = entry.owner.state.facts
            first_block = ((facts.held_tokens or request.num_tokens) - external_tokens) // self._block_tokens
            entry.state = AwaitingKv(list(block_ids[first_block : facts.block_count(facts.landing_tokens)]))
            self._placements.append(Placement(entry, first_block, len(block_ids)))

    def stepping(self, scheduler_output: Any) -> StepOrders:
        """vLLM has decided what the next step computes."""
        chunks = self._tell_hooks(scheduler_output)
        completed = tuple(self._completed_block_ids)
        left = tuple(self._left_block_ids)
        orders = StepOrders(tuple(chunks), tuple(self._landed_block_ids), tuple(self._released), completed, left)
        self._landed_block_ids, self._released, self._completed_block_ids, self._left_block_ids = [], [], [], []
        return orders

    def _tell_hooks(self, scheduler_output: Any) -> Sequence[PromptChunk]:
        if self.hooks is None:
            return ()
        advances: list[RequestAdvance] = []
        for vllm_id, token_count in scheduler_output.num_scheduled_tokens.items():
            entry = self._entries.get(vllm_id)
            if entry is not None:
                entry.state = EntryComputing()
                block_ids: Sequence[int] = ()
                computed = entry.record.num_computed_tokens + token_count
                is_prefill = isinstance(entry.owner.state, OF_PREFILL)
                if is_prefill or entry.owner.is_copied:
                    block_ids = scheduler_output.kv_connector_block_state.get_block_ids(vllm_id)[0]
                    if not is_prefill:
                        known = len(entry.owner.whole_block_ids)
                        self._completed_block_ids += block_ids[known : computed // self._block_tokens]
                advances.append(RequestAdvance(entry, token_count, computed, block_ids))
        entries = self._entries
        preempted = [entries[vllm_id] for vllm_id in scheduler_output.preempted_req_ids if vllm_id in entries]
        placements, self._placements = self._placements, []
        return self.hooks.stepping(placements, advances, preempted)

    def finished(self, request: Any) -> bool:
        """vLLM computes a request no more. Whether it keeps its blocks until the worker's side reports it."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None or self.hooks is None:
            return False
        kept = self.hooks.keeps_blocks(entry)
        entry.state = EntryKept()
        return kept
