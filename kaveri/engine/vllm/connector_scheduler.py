"""The connector's side in vLLM's scheduler: translates between vLLM's requests and Kaveri's, without decisions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kaveri.engine.vllm.life import OF_PREFILL, VllmComputed
from kaveri.engine.vllm.rank import PromptChunk, StepOrders
from kaveri.engine.vllm.request import Entry, EntryPhase
from kaveri.engine.vllm.requests import Requests

_PARAM = "kaveri_engine_id"


class Placement(NamedTuple):
    """Report of vLLM's scheduler: blocks are allocated for a request that waits for its KV."""

    entry: Entry
    first_block: int
    """Number of leading blocks whose KV is in vLLM's prefix cache."""
    block_count: int
    """Total number of the request's blocks."""


class RequestAdvance(NamedTuple):
    """Report of vLLM's scheduler: the step computes token_count tokens of this request."""

    entry: Entry
    token_count: int
    computed: int
    """Number of tokens with KV after the step."""
    block_ids: Sequence[int]
    """The request's blocks; empty unless it is on the prefill side or copied to a replica."""


StepListener = Callable[[Sequence[Placement], Sequence[RequestAdvance], Sequence[Entry]], Sequence[PromptChunk]]
"""Called with the placements, advances and preempted requests of a step before it runs, on the thread that steps vLLM.
Returns the prompt chunks whose KV the ranks push."""


def transfer_params(engine_id: str) -> dict[str, Any]:
    """Return the SamplingParams.extra_args by which the hooks recognize a request of Kaveri's engine."""
    return {"kv_transfer_params": {_PARAM: engine_id}}


def engine_id_of(extra_args: Mapping[str, Any]) -> str:
    """Return the id of Kaveri's request from a vLLM request's extra_args; empty if Kaveri did not submit it."""
    return str(extra_args.get("kv_transfer_params", {}).get(_PARAM, ""))


class SchedulerSide:
    """Scheduler-side hooks of the connector. Ignores requests that Kaveri's engine did not submit."""

    def __init__(self, block_tokens: int) -> None:
        self._requests: Requests | None = None
        self._on_step: StepListener | None = None
        self._block_tokens = block_tokens
        self._entries: dict[str, Entry] = {}
        self._placements: list[Placement] = []
        self._next_orders = StepOrders()

    def attach(self, requests: Requests, on_step: StepListener) -> None:
        """Serve an engine from the next step on, until detach(). on_step: called with the start of each step."""
        self._requests, self._on_step = requests, on_step

    def detach(self) -> None:
        self._requests = self._on_step = None

    def left(self, block_ids: Sequence[int]) -> None:
        """Order the ranks to make these blocks readable for pushes at the next step; their requests compute no more."""
        self._next_orders.left_block_ids += block_ids

    def landed(self, block_ids: Sequence[int]) -> None:
        """Order the ranks to take over blocks that a transfer has written, at the next step, which reads them."""
        self._next_orders.landed_block_ids += block_ids

    def release(self, entry: Entry) -> None:
        """Return an ended request's blocks to vLLM with the next step. Called once per request."""
        entry.phase = EntryPhase.RELEASED
        self._next_orders.released.append(entry.vllm_id)

    @property
    def has_reports(self) -> bool:
        """True if a step is needed to carry orders to the ranks, even without tokens to compute."""
        return bool(self._next_orders.released or self._next_orders.left_block_ids)

    def requested(self, request: Any) -> None:
        """Register a request that vLLM has accepted, if Kaveri's engine submitted it."""
        engine_id = (request.kv_transfer_params or {}).get(_PARAM)
        ours = self._requests.by_id.get(engine_id) if self._requests is not None and engine_id is not None else None
        if ours is not None:
            self._entries[request.request_id] = ours.enter(request.request_id, request)
            if ours.held_tokens is not None:
                # vLLM looks for these blocks in its prefix cache. At least one is left for the transfer, so that the
                # request waits for it; VllmCore.begin_answer adds the hashes of the others.
                del request.block_hashes[(ours.held_tokens - 1) // self._block_tokens :]

    def matched(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens whose KV a transfer brings beyond vLLM's prefix cache, and True if vLLM must wait
        for it.

        Covers the whole prompt (vLLM still computes the last token, which prefill samples), or the tokens of the
        replica for a resumed request.
        """
        entry = self._entries.get(request.request_id)
        if entry is None or entry.phase is not EntryPhase.AWAITING_BLOCKS:
            return 0, False
        held_tokens = entry.owner.held_tokens
        return (request.num_tokens if held_tokens is None else held_tokens) - computed_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        entry = self._entries[request.request_id]
        if entry.phase is EntryPhase.AWAITING_BLOCKS:
            facts = entry.owner.state.facts
            first_block = ((facts.held_tokens or request.num_tokens) - external_tokens) // self._block_tokens
            entry.phase = EntryPhase.AWAITING_KV
            entry.landing_blocks = block_ids[first_block : facts.block_count(facts.landing_tokens)]
            self._placements.append(Placement(entry, first_block, len(block_ids)))

    def stepping(self, scheduler_output: Any) -> StepOrders:
        """Return the orders for the ranks in the step that vLLM has just scheduled."""
        chunks = self._tell_hooks(scheduler_output)
        orders, self._next_orders = self._next_orders, StepOrders()
        orders.chunks = chunks
        return orders

    def _tell_hooks(self, scheduler_output: Any) -> Sequence[PromptChunk]:
        if self._on_step is None:
            return ()
        advances: list[RequestAdvance] = []
        for vllm_id, token_count in scheduler_output.num_scheduled_tokens.items():
            entry = self._entries.get(vllm_id)
            if entry is not None:
                entry.phase = EntryPhase.COMPUTING
                block_ids: Sequence[int] = ()
                computed = entry.record.num_computed_tokens + token_count
                is_prefill = isinstance(entry.owner.state, OF_PREFILL)
                if is_prefill or entry.owner.is_copied:
                    block_ids = scheduler_output.kv_connector_block_state.get_block_ids(vllm_id)[0]
                    if not is_prefill:
                        known = len(entry.owner.whole_block_ids)
                        self._next_orders.completed_block_ids += block_ids[known : computed // self._block_tokens]
                advances.append(RequestAdvance(entry, token_count, computed, block_ids))
        entries = self._entries
        preempted = [entries[vllm_id] for vllm_id in scheduler_output.preempted_req_ids if vllm_id in entries]
        placements, self._placements = self._placements, []
        return self._on_step(placements, advances, preempted)

    def finished(self, request: Any) -> bool:
        """Handle a request's end in vLLM. Returns True if its blocks stay allocated until release()."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None or self._requests is None:
            return False
        # vLLM itself keeps the blocks of a request that still waits for its KV.
        waits = entry.phase in (EntryPhase.AWAITING_BLOCKS, EntryPhase.AWAITING_KV)
        entry.phase = EntryPhase.KEPT
        # A prompt that ran ahead to the end of its answer may still be pushed.
        state = entry.owner.state
        return not waits and (state.transfer_id is not None or isinstance(state, VllmComputed))
