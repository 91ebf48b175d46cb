"""The KV connector that vLLM loads: passes each hook to the side that it belongs to, and does nothing else.

vLLM makes one with the scheduler and one in each worker. Order of the hooks in a step, as tests/vllm/test_hooks.py
verifies: the scheduler calls get_num_new_matched_tokens and update_state_after_alloc for each request that it places,
then build_connector_meta; the worker calls handle_preemptions before the model runs, save_kv_layer after each layer's
attention, wait_for_save after all, then get_transfer_results; the scheduler calls request_finished_all_groups for each
request that has ended, and frees the blocks of those in the results.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kaveri.engine.vllm.connector_scheduler import SchedulerSide
from kaveri.engine.vllm.connector_worker import WorkerSide
from kaveri.engine.vllm.rank import StepOrders

CONNECTOR_NAME = "KaveriConnector"


class KaveriConnector(KVConnectorBase_V1, SupportsHMA):
    """Kaveri's KV connector for vLLM. scheduler_side is set in vLLM's scheduler, worker_side in its workers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler_side = SchedulerSide(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        else:
            extra = self._kv_transfer_config.kv_connector_extra_config
            self.worker_side = WorkerSide(
                vllm_config,
                kv_cache_config,
                extra["model_fingerprint"],
                ranks_at=extra["ranks_at"],
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """True: a prompt preempted during its computation is recomputed, never transferred."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: full CUDA graphs skip save_kv_layer, but on a device KV is copied after the step anyway."""
        return False

    # The scheduler's hooks.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.requested(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduler.stepping(scheduler_output))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    # The worker's hooks.

    def get_mem_pool_context(self) -> Any:
        return self._worker.cache

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.begin_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: transfers write by themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is computed only after all of its KV has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Landed KV is reported before a step (VllmCore.begin_answer), which saves the request one.
        return KVConnectorTransferResults(finished_sending=self._worker.take_released())

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None, "a hook of the scheduler was called in a worker"
        return self.scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None, "a hook of the worker was called in the scheduler"
        return self.worker_side


class StepMetadata(KVConnectorMetadata):
    """Per-step message from the scheduler's connector to the workers'."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders
