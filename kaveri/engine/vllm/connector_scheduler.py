"""The connector's side in vLLM's scheduler: vLLM's words for our requests, and back. Decides nothing by itself."""

from collections.abc import Sequence
from typing import Any, Protocol

from kaveri.engine.vllm.connector_worker import StepAdvances
from kaveri.engine.vllm.hosted import Hosted

_PARAM = "kaveri_number"


class Desk(Protocol):
    """The engine, as the scheduler's side sees it. Called by vLLM on the thread that steps it."""

    def find(self, number: str) -> Hosted | None:
        """The request that vLLM was given under this number of ours."""

    def allocated(self, hosted: Hosted, first_block: int, block_ids: Sequence[int]) -> None:
        """vLLM has blocks for a request whose KV a transfer brings: all of them, of which those before first_block
        are there already."""

    def stepping(self, advances: Sequence[tuple[Hosted, int]], preempted: Sequence[Hosted]) -> StepAdvances:
        """A step begins: who is computed, up to which token; and who gave their blocks up for it. Returns what the
        worker's side is to follow."""

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

    def requested(self, request: Any) -> None:
        """vLLM has taken a request in."""
        number = (request.kv_transfer_params or {}).get(_PARAM)
        hosted = self.desk.find(number) if self.desk is not None and number is not None else None
        if hosted is not None:
            hosted.vllm_id = request.request_id
            hosted.vllm_request = request
            self._hosted[request.request_id] = hosted

    def matched(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond its own cache's a transfer will bring, and that vLLM shall wait for them."""
        hosted = self._hosted.get(request.request_id)
        if hosted is None or not hosted.by_transfer or hosted.placed:
            return 0, False
        return request.num_tokens - computed_tokens, True

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM has placed a request that waits for its KV."""
        hosted = self._hosted[request.request_id]
        if not hosted.placed:
            hosted.placed = True
            assert self.desk is not None
            self.desk.allocated(hosted, (request.num_tokens - external_tokens) // self._block_tokens, block_ids)

    def stepping(self, scheduler_output: Any) -> StepAdvances:
        """vLLM has decided what the next step computes."""
        if self.desk is None:
            return ()
        advances: list[tuple[Hosted, int]] = []
        for vllm_id, token_count in scheduler_output.num_scheduled_tokens.items():
            hosted = self._hosted.get(vllm_id)
            if hosted is not None:
                if hosted.source is not None:
                    hosted.take(scheduler_output.kv_connector_block_state.get_block_ids(vllm_id)[0])
                advances.append((hosted, hosted.vllm_request.num_computed_tokens + token_count))
        preempted = [self._hosted[vllm_id] for vllm_id in scheduler_output.preempted_req_ids if vllm_id in self._hosted]
        return self.desk.stepping(advances, preempted)

    def finished(self, request: Any) -> bool:
        """vLLM computes a request no more. Whether it keeps its blocks until the worker's side reports it."""
        hosted = self._hosted.pop(request.request_id, None)
        if hosted is None or self.desk is None:
            return False
        hosted.stopped = True
        drawn = request.output_token_ids
        return self.desk.keeps_blocks(hosted, drawn[-1] if len(drawn) else None)
