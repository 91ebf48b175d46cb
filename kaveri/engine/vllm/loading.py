"""Loads a model on vLLM and builds an engine, or raises ConfigError with a one-line reason."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kaveri.engine.checkpoint import auto_dtype, quantization_method, read_config_json, refusal, stored_dtype
from kaveri.engine.onednn import limit_primitive_cache
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.models import resolve_model
from kaveri.telemetry.logs import get_logger
from kaveri.text.generation_config import end_token_ids, read_generation_config

if TYPE_CHECKING:
    from kaveri.engine.vllm.connector_worker import WorkerSide
    from kaveri.engine.vllm.core import VllmCore
    from kaveri.engine.vllm.engine import VllmEngine
    from kaveri.engine.vllm.rank import Rank

_PREFILLS_AT_ONCE = 64
"""Most prompts that one step packs; vLLM keeps buffers for each."""
_LEAST_FREE_SHARE = 0.01
"""Share of a GPU's memory that must be free at an engine's start: several instances may share one GPU."""
_GLOO_THREAD = "gloo_tcp_loop"
_OURS = {
    "async_scheduling": "blocks are accounted for step by step",
    "block_size": "set block_tokens",
    "data_parallel_size": "each instance is one engine",
    "decode_context_parallel_size": "each rank has all tokens of its heads",
    "disable_log_stats": "load goes out in heartbeats",
    "distributed_executor_backend": "Kaveri drives vLLM within its own process",
    "dtype": "set dtype",
    "kv_cache_memory_bytes": "set kv_cache_memory",
    "kv_transfer_config": "KV is pushed by Kaveri's own connector",
    "logits_processors": "Kaveri draws the tokens",
    "max_model_len": "set max_model_len",
    "max_num_batched_tokens": "set chunk_tokens",
    "max_num_seqs": "set max_batch",
    "model": "set model",
    "nnodes": "the ranks of an engine are on one host",
    "pipeline_parallel_size": "pushes between pipeline stages are not there yet",
    "prefill_context_parallel_size": "each rank has all tokens of its heads",
    "scheduling_policy": "order and admission are the service's",
    "skip_tokenizer_init": "texts are the router's business",
    "speculative_config": "draws are keyed by their index, one token a step",
    "watermark": "requests are promised their blocks before vLLM hears of them",
    "watermark_config": "requests are promised their blocks before vLLM hears of them",
}
"""Options of vLLM that users cannot set here, with the alternative."""
_OF_THE_MODEL = (
    "config_format",
    "convert",
    "hf_config_path",
    "hf_overrides",
    "ignore_patterns",
    "load_format",
    "model_class_overrides",
    "model_loader_extra_config",
    "model_weights",
    "quantization",
    "quantization_config",
)
"""Options that change the model computed from a checkpoint, so its KV is incompatible with that of the default."""


def load_engine(
    settings: EngineSettings, listen: Sequence[KvEndpoint], transports: Callable[[], Sequence[Transport]]
) -> "VllmEngine":
    """Load weights, allocate the KV cache and listen for KV, but do not start the engine. Raises ConfigError.

    Called at most once per process, since vLLM's state is global, by the thread that imports vLLM. listen: addresses
    for incoming KV. transports: returns the KV transports of a rank.
    """
    core = load_core(settings)
    from kaveri.engine.vllm.engine import VllmEngine

    try:
        return VllmEngine(
            core,
            max_batch=settings.max_batch,
            listen=listen,
            transports=transports,
            receiving=settings.receiving,
            replicas=settings.replicas,
        )
    except BaseException:
        core.shutdown()
        raise


def load_core(settings: EngineSettings) -> "VllmCore":
    """Load vLLM with Kaveri's KV connector. At most once per process. Raises ConfigError."""
    engine_args = settings.engine_args or {}
    _check_options(engine_args)
    _prepare_process()
    # Imported after the environment is set, which vLLM reads at import.
    from kaveri.engine.transformers.loading import local_folder
    from kaveri.engine.vllm.core import VllmCore

    folder = local_folder(resolve_model(settings.model))
    arguments = _arguments(settings, folder)
    llm, ranks = _start(folder, read_config_json(folder), arguments, engine_args.get("tensor_parallel_size", 1))
    config = llm.model_config
    ends_at = engine_args.get("generation_config", "auto")
    generation = read_generation_config(folder if ends_at in ("auto", "vllm") else ends_at, config.hf_config)
    core = VllmCore(
        llm,
        ranks,
        chunk_tokens=settings.chunk_tokens,
        max_model_len=config.max_model_len,
        vocab_size=config.get_vocab_size(),
        eos_token_ids=end_token_ids(generation, config.hf_config, config.get_vocab_size()),
        model=str(folder),
    )
    pool_tokens = core.free_blocks * ranks[0].layout.block_tokens
    if settings.max_model_len == 0 and core.max_model_len > pool_tokens:
        # vLLM has accounted for its own null block.
        core.max_model_len = pool_tokens
    if settings.max_model_len == 0 and core.max_model_len < (made_for := config.hf_text_config.max_position_embeddings):
        get_logger().warning(
            "max_model_len_reduced",
            model_tokens=made_for,
            served_tokens=core.max_model_len,
            kv_cache_memory=settings.kv_cache_memory,
        )
    return core


def _check_options(engine_args: Mapping[str, Any]) -> None:
    for key, value in engine_args.items():
        if key in _OURS:
            raise ConfigError("engine_args", f"{key} is not to be set here: {_OURS[key]}")
        if key == "tensor_parallel_size" and (type(value) is not int or value < 1):
            raise ConfigError("engine_args", f"{key} is {value!r}; it must be a whole number, at least 1")


def _prepare_process() -> None:
    """Set the environment variables that vLLM reads at import. Raises ConfigError."""
    # vLLM's scheduler must be in this process to be reachable between two steps.
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ConfigError("VLLM_ENABLE_V1_MULTIPROCESSING", "is not 0; Kaveri drives vLLM within its own process")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Without this, a request with NaN logits would get token 0; see VllmCore.undrawable.
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    # gRPC's threads in this process do not survive a fork.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    limit_primitive_cache()


def _arguments(settings: EngineSettings, folder: Path) -> dict[str, Any]:
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    from kaveri.engine.checkpoint import fingerprint
    from kaveri.engine.vllm.connector import CONNECTOR_NAME
    from kaveri.engine.vllm.draws import KeyedDraws

    engine_args = settings.engine_args or {}
    arguments: dict[str, Any] = {
        "enforce_eager": True,
        "disable_hybrid_kv_cache_manager": True,
        # vLLM refuses to start on a GPU with less than this share free, although the cache has a size of its own.
        "gpu_memory_utilization": _LEAST_FREE_SHARE,
        **engine_args,
        "model": str(folder),
        "dtype": vllm_dtype(settings.dtype, read_config_json(folder), current_platform.is_cpu()),
        # -1: the model's own length, or less when the cache holds less.
        "max_model_len": settings.max_model_len or -1,
        "kv_cache_memory_bytes": settings.kv_cache_memory,
        "max_num_batched_tokens": settings.chunk_tokens + settings.max_batch,
        "max_num_seqs": min(settings.chunk_tokens, _PREFILLS_AT_ONCE) + settings.max_batch,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "async_scheduling": False,
        # Prompts first, in our order; see VllmCore.add.
        "scheduling_policy": "priority",
        "logits_processors": [KeyedDraws],
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR_NAME,
            kv_connector_module_path="kaveri.engine.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"model_fingerprint": model_fingerprint(fingerprint(folder), engine_args)},
        ),
    }
    if settings.block_tokens is not None:
        arguments["block_size"] = settings.block_tokens
    return arguments


def vllm_dtype(dtype: str, values: Mapping[str, Any], on_cpu: bool) -> str:
    """Return the dtype option for vLLM: `dtype` itself; for "auto", auto_dtype()'s choice if this CPU lacks
    instructions for vLLM's (float16 for float16 checkpoints, else bfloat16). values: of config.json."""
    if dtype != "auto" or quantization_method(values) is not None:
        return dtype
    chosen = "float16" if stored_dtype(values) == "float16" else "bfloat16"
    computed = auto_dtype(chosen, on_cpu)
    return "auto" if computed == chosen else computed


def _start(
    folder: Path, values: Mapping[str, Any], arguments: dict[str, Any], rank_count: int
) -> "tuple[Any, Sequence[Rank]]":
    from vllm import EngineArgs, LLMEngine

    from kaveri.engine.vllm.remote_rank import RankMeeting

    with contextlib.ExitStack() as stack:
        meeting: RankMeeting | None = None
        if rank_count > 1:
            meeting = stack.enter_context(RankMeeting(rank_count))
            arguments["distributed_executor_backend"] = "mp"
        arguments["kv_transfer_config"].kv_connector_extra_config["ranks_at"] = meeting.path if meeting else ""
        try:
            llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:  # vLLM has no common class for unsupported options
            raise refusal(folder, values, error, "vllm") from error
        if meeting is None:
            _lower_gloo_priority()
            return llm, (_worker_side().plane,)
        try:
            return llm, meeting.ranks()
        except BaseException:
            llm.engine_core.shutdown()
            raise


def _lower_gloo_priority() -> None:
    """Set SCHED_IDLE for gloo's threads. vLLM creates 39 process groups on the CPU; each has a thread that polls 100
    times per second, although a group of one rank has nothing to receive."""
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if comm.read_text().strip() == _GLOO_THREAD:
                os.sched_setscheduler(int(comm.parent.name), os.SCHED_IDLE, os.sched_param(0))


def model_fingerprint(checkpoint: str, engine_args: Mapping[str, Any]) -> str:
    """Return the checkpoint's fingerprint, hashed with the vLLM options that change the model's computation, if any."""
    changes = {name: engine_args[name] for name in _OF_THE_MODEL if engine_args.get(name) is not None}
    if not changes:
        return checkpoint
    described = json.dumps([checkpoint, changes], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(described.encode())


def _worker_side() -> "WorkerSide":
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kaveri.engine.vllm.connector import KaveriConnector

    connector = get_kv_transfer_group()
    assert isinstance(connector, KaveriConnector), "vLLM runs without our connector"
    assert connector.worker_side is not None
    return connector.worker_side
