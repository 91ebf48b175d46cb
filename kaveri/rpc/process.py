"""What every service process does around its own work: flags, logs, signals, event loop, exit status."""

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import uvloop

from kaveri.config import parse_config, setting
from kaveri.errors import ConfigError
from kaveri.rpc.server import check_address
from kaveri.telemetry.logs import configure_logs, get_logger

MAX_PORT = 65_535
ALL_ADDRESSES = ("0.0.0.0", "::", "[::]")
"""Values of --host under which nobody can be reached."""
CONFIG_ERROR_STATUS = 2
"""Exit status of a process that could not start with the settings it was given."""


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Settings that all services share."""

    instance_id: str = setting("name of this instance, stable over restarts; empty: the role and random digits", "")
    host: str = setting("address to listen on", "127.0.0.1")
    port: int = setting("port to listen on; 0: a free one, found by others through Redis", 0, least=0, most=MAX_PORT)
    advertise_host: str = setting(
        "host name under which others reach this instance; empty: the value of --host, or this machine's name where "
        "--host is all addresses",
        "",
    )
    redis_url: str = setting("where the cluster's state is held", "redis://127.0.0.1:6379/0")
    metrics_port: int = setting("port for Prometheus metrics over HTTP; 0: none", 0, least=0, most=MAX_PORT)
    log_level: str = setting("debug, info, warning or error", "info", choices=("debug", "info", "warning", "error"))
    drain_timeout_s: float = setting("seconds that requests in flight get to finish after SIGTERM", 30.0, least=0)
    heartbeat_interval_s: float = setting(
        "seconds between two heartbeats; a tenth of the lease loses no lease", 0.1, above=0
    )
    lease_ttl_s: float = setting("seconds without a heartbeat after which this instance counts as gone", 1.0, above=0)

    @property
    def reached_host(self) -> str:
        """The host name under which others reach this instance."""
        return self.advertise_host or (socket.gethostname() if self.host in ALL_ADDRESSES else self.host)

    def advertised_address(self, port: int) -> str:
        """Where others reach this instance, given the port it listens on."""
        return f"{self.reached_host}:{port}"


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


def run_service(
    role: str,
    config_type: type[ConfigT],
    serve: Callable[[ConfigT, asyncio.Event], Awaitable[int]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a service until it ends by itself or is told to, and returns the process's exit status.

    serve(config, stopping) does the work and returns the status; `stopping` is set by the first SIGTERM or SIGINT, upon
    which it drains. A second signal cancels it. ConfigError, from the flags or from serve, becomes one line on stderr.
    """
    program = f"kaveri {role}"
    try:
        config = parse_config(config_type, program, sys.argv[1:] if arguments is None else arguments, os.environ)
        if not config.instance_id:
            config = dataclasses.replace(config, instance_id=f"{role}-{secrets.token_hex(3)}")
        configure_logs(role, config.instance_id, config.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_until_stopped(config, serve))
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 128 + signal.SIGTERM


async def _serve_until_stopped(config: ConfigT, serve: Callable[[ConfigT, asyncio.Event], Awaitable[int]]) -> int:
    # Before anything is loaded, which takes seconds or minutes.
    check_address(config.host, config.port)
    stopping = asyncio.Event()
    serving = asyncio.ensure_future(serve(config, stopping))

    def stop() -> None:
        if stopping.is_set():
            serving.cancel()
        get_logger().info("stopping", drain_timeout_s=config.drain_timeout_s, at_once=stopping.is_set())
        stopping.set()

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop)
    return await serving
