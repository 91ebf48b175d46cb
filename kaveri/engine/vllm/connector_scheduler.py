"""The connector's side in vLLM's scheduler: vLLM's words for our requests, and back. Decides nothing by itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kaveri.engine.vllm.hosted import Hosted
from kaveri.engine.vllm.orders import Chunk, StepOrders

_PARAM = "kaveri_number"


class Placement(NamedTuple):
    """A request whose KV a transfer brings has its blocks."""

    hosted: Hosted
    first_block: int
    """Those before it have their KV already, from vLLM's prefix cache."""
    block_ids: Sequence[int]
    """All of them."""


class Advance(NamedTuple):
    """A request is computed by a step."""

    hosted: Hosted
    computed: int
    """Tokens whose KV it has behind the step."""
    block_ids: Sequence[int]
    """All of its blocks, on the prefill side."""


class Desk(Protocol):
    """The engine, as the scheduler's side sees it. Called by vLLM on the thread that steps it."""

    def find(self, number: str) -> Hosted | None:
        """The request that vLLM was given under this number of ours."""

    def stepping(
        self, placements: Sequence[Placement], advances: Sequence[Advance], preempted: Sequence[Hosted]
    ) -> Sequence[Chunk]:
        """A step begins: who was given blocks for KV that a transfer brings, who is computed, and who gave its blocks
        up for it. Returns the prompts that the ranks are to follow."""

    def keeps_blocks(self, hosted: Hosted, token_id: int | None) -> bool:
        """vLLM is done with a request, whose last token this is; whether its blocks are to be kept until we say."""


def transfer_params(number: str) -> dict[str, Any]:
    """What goes into vLLM's SamplingParams.extra_args, so that the hooks know a request for ours."""
    return {"kv_transfer_params": {_PARAM: number}}


class SchedulerSide:
    """Answers vLLM's scheduler. Requests that are not ours are left alone."""

    def __init__(self, block_tokens: int) -> None:
        self.desk: Desk | None = None
        self._block_tokens = block_tokens
        self._hosted: dict[str, Hosted] = {}
        self._placements: list[Placement] = []
        # For the next step's orders.
        self._landed_block_ids: list[int] = []
        self._released: list[str] = []

    def landed(self, block_ids: Sequence[int]) -> None:
        """The next step may read these blocks, which a transfer has written."""
        self._landed_block_ids += block_ids

    def report_released(self, vllm_id: str) -> None:
        """With the next step vLLM takes back the blocks of a request that has ended. Once for each."""
        self._released.append(vllm_id)

    @property
    def has_reports(self) -> bool:
        """Whether vLLM is to be told something."""
        return bool(self._released)

    def requested(self, request: Any) -> None:
        """vLLM has taken a request in."""
        number = (request.kv_transfer_params or {}).get(_PARAM)
        hosted = self.desk.find(number) if self.desk is not None and number is not None else None
        if hosted is not None:
            hosted.vllm_id = request.request_id
            hosted.vllm_request = request
            self._hosted[request.request_id] = hosted

    def leave_to(self, left: Hosted) -> None:
        """What vLLM has for a request is this one's from now on."""
        if left.vllm_id in self._hosted:
            self._hosted[left.vllm_id] = left

    def matched(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond its own cache's a transfer will bring, and that vLLM shall wait for them.

        All of them: vLLM computes the last one all the same, which is the one that prefill draws.
        """
        hosted = self._hosted.get(request.request_id)
        if hosted is None or not hosted.by_transfer or hosted.placed:
            return 0, False
        return request.num_tokens - computed_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM has placed a request that waits for its KV."""
        hosted = self._hosted[request.request_id]
        if not hosted.placed:
            hosted.placed = True
            first_block = (request.num_tokens - external_tokens) // self._block_tokens
            self._placements.append(Placement(hosted, first_block, block_ids))

    def stepping(self, scheduler_output: Any) -> StepOrders:
        """vLLM has decided what the next step computes."""
        chunks = self._tell_desk(scheduler_output)
        orders = StepOrders(tuple(chunks), tuple(self._landed_block_ids), tuple(self._released))
        self._landed_block_ids, self._released = [], []
        return orders

    def _tell_desk(self, scheduler_output: Any) -> Sequence[Chunk]:
        if self.desk is None:
            return ()
        advances: list[Advance] = []
        for vllm_id, token_count in scheduler_output.num_scheduled_tokens.items():
            hosted = self._hosted.get(vllm_id)
            if hosted is not None:
                block_ids: Sequence[int] = ()
                if hosted.is_source:
                    block_ids = scheduler_output.kv_connector_block_state.get_block_ids(vllm_id)[0]
                advances.append(Advance(hosted, hosted.vllm_request.num_computed_tokens + token_count, block_ids))
        preempted = [self._hosted[vllm_id] for vllm_id in scheduler_output.preempted_req_ids if vllm_id in self._hosted]
        placements, self._placements = self._placements, []
        return self.desk.stepping(placements, advances, preempted)

    def finished(self, request: Any) -> bool:
        """vLLM computes a request no more. Whether it keeps its blocks until the worker's side reports it."""
        hosted = self._hosted.pop(request.request_id, None)
        if hosted is None or self.desk is None:
            return False
        hosted.stopped = True
        drawn = request.output_token_ids
        return self.desk.keeps_blocks(hosted, drawn[-1] if len(drawn) else None)
