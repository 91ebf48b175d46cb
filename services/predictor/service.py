"""Builds a predictor instance from its settings and runs it: load, register, serve, drain."""

import asyncio
import contextlib
import importlib.metadata
import secrets
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceState, Role
from kaveri.errors import ConfigError
from kaveri.hosting.store import open_store
from kaveri.rpc.server import RpcServer
from kaveri.telemetry.logs import get_logger
from kaveri.v1.predictor_pb2_grpc import add_LengthPredictorServiceServicer_to_server
from services.predictor.batcher import LengthModel, PredictionBatcher, check_rows
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.predictor.server import SERVICE_NAME, PredictorServer
from services.predictor.worker import WorkerThread

_STOP_GRACE_S = 1.0
"""Seconds for the last answers to be sent once nothing is in flight."""


async def serve(config: PredictorConfig, stopping: asyncio.Event) -> int:
    """Serves until `stopping`, then drains. Returns the exit status. Raises ConfigError."""
    worker = WorkerThread("predictor")
    try:
        async with open_store(config, stopping) as store:
            if store is None:
                return 0
            # Load before registering: callers must not find this instance while the model loads.
            model = await _load_unless_stopped(config, worker, stopping)
            if model is not None:
                await PredictorHost(config, model, worker, store).serve(stopping)
        return 0
    finally:
        worker.close()


class PredictorHost:
    """Runs one predictor as a service: registers it, serves it, drains it."""

    def __init__(
        self,
        config: PredictorConfig,
        model: LengthModel,
        worker: WorkerThread,
        store: ClusterStore,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """worker: the thread on which `model` computes; the caller closes it. store: connected already."""
        metrics = PredictorMetrics(registry)
        self._config = config
        self._store = store
        self._version = model.version
        self._batcher = PredictionBatcher(
            model, worker, config.batch_prompts, config.long_prompt_tokens, config.max_queue, metrics
        )
        self._servicer = PredictorServer(model, config.model_name, self._batcher, config.max_call_prompts, metrics)
        self._server = RpcServer(config.host, config.port, [SERVICE_NAME])
        self._server.add(partial(add_LengthPredictorServiceServicer_to_server, self._servicer))
        self._state = InstanceState.READY
        self.started = asyncio.Event()
        """Set once calls are accepted."""
        self.address = ""
        """The advertised address; empty before `started`."""

    async def serve(self, stopping: asyncio.Event) -> None:
        """Serves until `stopping` is set, then drains. Raises ConfigError when the address cannot be bound."""
        await self._server.start()
        self.address = self._config.advertised_address(self._server.port)
        heartbeat = Heartbeat(self._store, self._record(), self.load, self._config.heartbeat_interval_s)
        try:
            async with asyncio.TaskGroup() as tasks:
                computing = tasks.create_task(self._batcher.run())
                beating = tasks.create_task(heartbeat.run())
                await self._server.ready()
                self.started.set()
                get_logger().info(
                    "service_started", address=self.address, model=self._config.model_name, predictor=self._version
                )
                await stopping.wait()
                self._state = InstanceState.DRAINING
                self._servicer.drain()
                heartbeat.beat_now()
                await self._server.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.drain_timeout_s):
                        await self._batcher.wait_idle()
                await self._server.stop(_STOP_GRACE_S)
                heartbeat.stop()
                await beating
                computing.cancel()
        finally:
            await self._server.stop(0)

    def load(self) -> InstanceLoad:
        """The load that the next heartbeat reports; its requests are prompts."""
        return InstanceLoad(
            state=self._state,
            waiting_requests=self._batcher.waiting_count,
            running_requests=self._batcher.computing_count,
        )

    def _record(self) -> InstanceRecord:
        return InstanceRecord(
            instance_id=self._config.instance_id,
            incarnation=secrets.randbits(63),
            role=Role.PREDICTOR,
            address=self.address,
            model=self._config.model_name,
            engine=f"predictor {self._version}",
            lease_ttl_s=self._config.lease_ttl_s,
            version=importlib.metadata.version("kaveri"),
        )


def check_model(model: LengthModel, config: PredictorConfig) -> None:
    """Raises ConfigError when the predictor was trained for another model, or cannot predict.

    Blocks. Predicts once, so the first caller does not wait for torch's set-up.
    """
    if model.model not in (config.model, config.model_name):
        reason = f"{config.predictor_path} was made for model {model.model!r}, not for {config.model_name!r}"
        raise ConfigError("--predictor", reason)
    try:
        check_rows(model.predict([[0]]), 1, model.bucket_count)
    except Exception as error:
        raise ConfigError("--predictor", f"{config.predictor_path} cannot predict: {error!r:.200}") from error


async def _load_unless_stopped(
    config: PredictorConfig, worker: WorkerThread, stopping: asyncio.Event
) -> LengthModel | None:
    """None: `stopping` was set first."""
    loading = asyncio.ensure_future(worker.call(_load, config))
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        return loading.result() if loading.done() else None
    except ConfigError as error:
        raise ConfigError(error.field if error.field.startswith("-") else "--predictor", error.reason) from error
    finally:
        stopped.cancel()
        loading.cancel()


def _load(config: PredictorConfig) -> LengthModel:
    # Imports torch, which takes seconds: do it only when a model is loaded.
    from transformers.utils import logging

    from kaveri.predictor.bundle import LengthPredictor

    logging.disable_progress_bar()
    model = LengthPredictor.load(config.predictor_path, device=config.device)
    check_model(model, config)
    return model
