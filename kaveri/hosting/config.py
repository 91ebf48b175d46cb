"""The settings that every engine instance has, and the engine that they describe."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kaveri.config.settings import present, setting, size_bytes
from kaveri.engine.factory import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_CHUNK_TOKENS,
    BuiltEngine,
    EngineSettings,
    build_engine,
)
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.engine.vllm.options import parse_engine_args
from kaveri.errors import ConfigError
from kaveri.latency.profile import Profile, read_profile
from kaveri.models import KAVERI_TINY
from kaveri.policy.placement import HeavyThresholds
from kaveri.rpc.process import ServiceConfig

_FLAG_OF_SETTING = {"kv_cache_memory_bytes": "kv_cache_memory", "kv_advertise_host": "advertise_host"}

LEAST_MODEL_LEN = 2
"""One token of a prompt and one of its answer: a lower limit refuses every request."""
_PATH_STARTS = ("/", "./", "../", "~")


def model_len(text: str) -> int:
    """For `setting`: 0, or a length that a request can have. Raises ValueError."""
    try:
        length = int(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no whole number") from error
    if length != 0 and length < LEAST_MODEL_LEN:
        raise ValueError(f"is {length}; it must be 0 or at least {LEAST_MODEL_LEN}: one token of prompt, one of answer")
    return length


def _profile_at(path: str) -> Profile | None:
    """For `setting`. Raises ValueError."""
    try:
        return read_profile(path) if path else None
    except ConfigError as error:
        raise ValueError(error.reason) from error


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, whoever runs it."""

    model: str = setting("model to serve: a path, a hub id or a bundled name", KAVERI_TINY, present)
    engine: str = setting("transformers, vllm, fake (made-up tokens) or timed (--latency-model)", "transformers")
    engine_args: Mapping[str, Any] | None = setting(
        "vllm engine: its own options, a JSON object or a YAML or JSON file; None: vLLM's defaults",
        None,
        parse_engine_args,
    )
    dtype: str = setting(
        "element type: auto (the checkpoint's), float32, bfloat16 or float16",
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting("auto, cpu, cuda or cuda:N", "auto")
    max_model_len: int = setting(
        f"most tokens of prompt and answer together, at least {LEAST_MODEL_LEN}; 0: what model and KV pool allow",
        0,
        model_len,
    )
    kv_cache_memory: int = setting(
        "size of the KV pool, all of it resident from the start: 512MiB, 2GB or a number of bytes",
        128 * 2**20,
        size_bytes,
    )
    block_tokens: int | None = setting(
        f"tokens per KV block, alike on all vllm instances; None: {DEFAULT_BLOCK_TOKENS}, with vllm on CPUs 32",
        None,
        least=1,
    )
    max_batch: int = setting("most requests in one decode step", 64, least=1)
    latency_model: str = setting(
        "timed engine: whose time it takes, a bundled name, a JSON file or a file of `kaveri profile`", ""
    )
    fake_step_s: float = setting("fake engine: seconds that a step takes", 0.0, least=0)
    fake_prefill_token_s: float = setting("fake engine: seconds that a prompt token adds to its step", 0.0, least=0)
    fake_eos_probability: float = setting("fake engine: chance of each token to end its answer", 0.0, least=0, most=1)
    fake_verify_kv: bool = setting("fake engine: check all earlier KV in every step", True)

    def engine_settings(self, receives: bool) -> EngineSettings:
        """receives: whether KV is pushed to this instance."""
        return EngineSettings(
            receives=receives,
            engine=self.engine,
            model=self.model,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            kv_cache_memory_bytes=self.kv_cache_memory,
            block_tokens=self.block_tokens,
            max_batch=self.max_batch,
            engine_args=self.engine_args or {},
            latency_model=self.latency_model,
            fake_model=FakeModel(
                eos_probability=self.fake_eos_probability,
                step_s=self.fake_step_s,
                prefill_token_s=self.fake_prefill_token_s,
                verify=self.fake_verify_kv,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(EngineConfig, ServiceConfig):
    """Settings of an engine instance, whatever its role."""

    served_model_name: str = setting("name under which the model is asked for; empty: the value of --model", "")
    chunk_tokens: int = setting(
        f"most prompt tokens computed in one step; 0: the profile's, {DEFAULT_CHUNK_TOKENS} without one", 0, least=0
    )
    """Never 0 once the settings are made, so that whoever reads it reads what holds."""
    profile: Profile | None = setting(  # noqa: RUF009
        "file of `kaveri profile`, measured on this model, dtype, device and engine", None, _profile_at
    )
    heavy_output_tokens: int = setting("a request with a longer predicted answer is heavy in decode", 128, least=0)
    heavy_prompt_tokens: int = setting("with nothing predicted, one with a longer prompt is heavy", 512, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_tokens == 0:
            profiled = self.profile.chunk_tokens if self.profile is not None else DEFAULT_CHUNK_TOKENS
            object.__setattr__(self, "chunk_tokens", profiled)

    @property
    def model_name(self) -> str:
        """The name under which the cluster knows the model."""
        return self.served_model_name or self.model

    @property
    def heavy_thresholds(self) -> HeavyThresholds:
        """What counts as heavy, here and in the loads of decode instances; all instances should agree."""
        return HeavyThresholds(self.heavy_output_tokens, self.heavy_prompt_tokens)

    def engine_settings(self, receives: bool) -> EngineSettings:
        """receives: whether KV is pushed to this instance."""
        return replace(
            super().engine_settings(receives),
            chunk_tokens=self.chunk_tokens,
            profile=self.profile,
            kv_advertise_host=self.reached_host,
        )


async def load_engine(settings: EngineSettings, stopping: asyncio.Event) -> BuiltEngine | None:
    """Builds the engine on a thread; takes seconds or minutes. Raises ConfigError, naming the flag.

    None: `stopping` was set first. The thread is left to itself then, and ends with the process.
    """
    built: Future[BuiltEngine] = Future()
    building = asyncio.wrap_future(built)
    threading.Thread(target=_build_on_thread, args=(settings, built), name="load", daemon=True).start()
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
        return building.result() if building.done() else None
    except ConfigError as error:
        raise name_flag(error) from error
    finally:
        stopped.cancel()
        building.cancel()


def name_flag(error: ConfigError) -> ConfigError:
    """What an engine says of its settings, said of the flags that they come from."""
    name = _FLAG_OF_SETTING.get(error.field, error.field)
    return ConfigError(name if name.startswith("-") else "--" + name.replace("_", "-"), error.reason)


def _build_on_thread(settings: EngineSettings, built: "Future[BuiltEngine]") -> None:
    # From here on it cannot be cancelled, so that setting its outcome is allowed although nobody may wait for it.
    built.set_running_or_notify_cancel()
    try:
        built.set_result(_build_engine(settings))
    # SystemExit too, which would end this thread without notice. Raised where it is awaited.
    except BaseException as error:
        if not isinstance(error, Exception):
            error = ConfigError("engine", f"ended while it was loaded: {error!r}")
        built.set_exception(error)


def _build_engine(settings: EngineSettings) -> BuiltEngine:
    model = settings.model
    if (
        settings.engine in ("transformers", "vllm")
        and model.startswith(_PATH_STARTS)
        and not Path(model).expanduser().exists()
    ):
        # Found out before torch is imported, which takes seconds.
        raise ConfigError("model", f"{model} is no folder")
    return build_engine(settings)
