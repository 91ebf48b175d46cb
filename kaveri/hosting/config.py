"""Settings of every engine instance, and the engine built from them."""

import asyncio
import contextlib
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kaveri.addresses import is_all_addresses
from kaveri.config.settings import name_text, setting
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.kv.transports import MOCK, PATH_NAMES, TLS
from kaveri.policy.placement import HeavyThresholds
from kaveri.rpc.process import ServiceConfig
from kaveri.security.posture import A_TICKET, ListeningPort
from kaveri.security.tls_files import TlsFiles

if TYPE_CHECKING:
    from kaveri.engine.factory import BuiltEngine

_FLAG_OF_SETTING = {"kv_advertise_host": "advertise_host"}

_PATH_STARTS = ("/", "./", "../", "~")


@dataclass(frozen=True, kw_only=True)
class InstanceConfig(EngineSettings, ServiceConfig):
    """Settings of an engine instance, whatever phases it serves."""

    HELP_TITLE: ClassVar = "Instance"

    served_model_name: str = setting("name under which the model is asked for; empty: the value of --model", "")
    stuck_after_s: float = setting(
        "seconds without a step, with something to compute, after which the engine counts as stuck and the instance "
        "ends; 20 times its longest step where that is more",
        30.0,
        above=0,
        most=86_400.0,
    )
    orphan_grace_s: float = setting(
        "seconds that requests go on, and ended answers are kept, for a client that re-attaches after its router was "
        "lost; 0: not at all",
        10.0,
        least=0,
        most=3600.0,
    )
    failure_domain: str = setting(
        "instances that may fail together have the same name here, that of their host or rack; empty: not known",
        "",
        name_text,
    )
    heavy_output_tokens: int = setting("a request with a longer predicted answer is heavy in decode", 128, least=0)
    heavy_prompt_tokens: int = setting("with nothing predicted, one with a longer prompt is heavy", 512, least=0)

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)
        EngineSettings.__post_init__(self)

    @property
    def model_name(self) -> str:
        """Name of the served model in the cluster."""
        return self.served_model_name or self.model

    @property
    def heavy_thresholds(self) -> HeavyThresholds:
        """Lengths in tokens above which a request counts as heavy for decode; must agree on all instances."""
        return HeavyThresholds(self.heavy_output_tokens, self.heavy_prompt_tokens)

    @property
    def kv_tls(self) -> TlsFiles | None:
        return super().kv_tls or self.tls

    @property
    def ports(self) -> tuple[ListeningPort, ...]:
        names = [name for name in self.kv_transports if name not in (*PATH_NAMES, MOCK)]
        if not names:
            return super().ports
        kv = ListeningPort(
            flag=f"--kv-port ({','.join(names)})",
            host=self.kv_listen_host,
            port=self.kv_port,
            is_encrypted=names == [TLS],
            asks_for=A_TICKET,
        )
        return (*super().ports, kv)

    @property
    def kv_listen_host(self) -> str:
        return self.kv_host or self.host

    @property
    def kv_advertise_host(self) -> str | None:
        # A separate --kv-host is a network for KV only: tickets name it unchanged.
        return self.reached_host if not self.kv_host or is_all_addresses(self.kv_host) else None


async def load_engine(settings: EngineSettings, stopping: asyncio.Event) -> "BuiltEngine | None":
    """Build the engine on a thread, which takes seconds or minutes. Raises ConfigError, naming the flag.

    Returns None if `stopping` was set first. The thread is then abandoned, and ends with the process."""
    if settings.engine == "vllm":
        # The engine's process wakes this one after each step. Under SCHED_BATCH that does not preempt its next step.
        with contextlib.suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
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
    """Convert an engine's ConfigError, which names a setting, to one that names the command-line flag."""
    name = _FLAG_OF_SETTING.get(error.field, error.field)
    return ConfigError(name if name.startswith("-") else "--" + name.replace("_", "-"), error.reason)


def _build_on_thread(settings: EngineSettings, built: "Future[BuiltEngine]") -> None:
    # It can no longer be cancelled, so its outcome may be set.
    built.set_running_or_notify_cancel()
    try:
        built.set_result(_build_engine(settings))
    # Also SystemExit, which would end this thread silently. Raised where it is awaited.
    except BaseException as error:
        if not isinstance(error, Exception):
            error = ConfigError("engine", f"ended while it was loaded: {error!r}")
        built.set_exception(error)


def _build_engine(settings: EngineSettings) -> "BuiltEngine":
    model = settings.model
    if (
        settings.engine in ("transformers", "vllm")
        and model.startswith(_PATH_STARTS)
        and not Path(model).expanduser().exists()
    ):
        # Checked before torch is imported, which takes seconds.
        raise ConfigError("model", f"{model} is no folder")
    # Import here: --help and `kaveri config show` need only the settings.
    if settings.engine == "vllm":
        from kaveri.engine.own_process import OwnProcessEngine

        return OwnProcessEngine(settings)
    from kaveri.engine.factory import build_engine

    return build_engine(settings)
