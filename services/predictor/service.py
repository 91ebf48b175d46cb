"""Builds a predictor instance from its settings and runs it: load, register, serve, drain."""

import asyncio
from dataclasses import replace
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry

from kaveri.cluster.store import ClusterStore, ViewSource
from kaveri.domain.view import Role
from kaveri.errors import ConfigError
from kaveri.hosting.service_host import ServiceHost, new_incarnation, service_record
from kaveri.hosting.store import open_store
from kaveri.v1.predictor_pb2_grpc import add_LengthPredictorServiceServicer_to_server
from services.predictor.batcher import LengthModel, PredictionBatcher, check_rows
from services.predictor.config import PredictorConfig
from services.predictor.metrics import PredictorMetrics
from services.predictor.server import SERVICE_NAME, PredictorServer
from services.predictor.worker import WorkerThread


async def serve(config: PredictorConfig, stopping: asyncio.Event) -> int:
    """Run a predictor instance until `stopping`, then drain. Returns the exit status. Raises ConfigError."""
    worker = WorkerThread("predictor")
    try:
        async with open_store(config, stopping, ViewSource.BROADCASTS) as store:
            if store is None:
                return 0
            # Load before registering: callers must not find this instance while the model loads.
            model = await _load_unless_stopped(config, worker, stopping)
            if model is not None:
                return await predictor_host(config, model, worker, store).serve(stopping)
        return 0
    finally:
        worker.close()


def predictor_host(
    config: PredictorConfig,
    model: LengthModel,
    worker: WorkerThread,
    store: ClusterStore,
    registry: CollectorRegistry = REGISTRY,
) -> ServiceHost:
    """Build the gRPC host of a predictor. worker: thread for all calls of `model`; the caller closes it."""
    metrics = PredictorMetrics(registry)
    batcher = PredictionBatcher(
        model, worker, config.batch_prompts, config.long_prompt_tokens, config.max_queue, metrics
    )
    servicer = PredictorServer(model, config.model_name, batcher, config.max_call_prompts, metrics)
    record = service_record(config, Role.PREDICTOR, config.model_name, new_incarnation())
    return ServiceHost(
        config,
        store,
        replace(record, engine=f"predictor {model.version}"),
        servicer,
        [SERVICE_NAME],
        partial(add_LengthPredictorServiceServicer_to_server, servicer),
    )


def check_model(model: LengthModel, config: PredictorConfig) -> None:
    """Raise ConfigError if the predictor is for another model or cannot predict. Blocks: predicts once to warm up."""
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
