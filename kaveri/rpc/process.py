"""Runs a service as a process: settings, logs, signals, event loop, exit status."""

import asyncio
import dataclasses
import gc
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import uvloop

from kaveri.addresses import host_text, is_all_addresses, join_address
from kaveri.cluster.store import DEFAULT_CLUSTER
from kaveri.config.redis_url import shown
from kaveri.config.settings import MAX_PORT, name_text, present, read_settings, setting
from kaveri.config.sources import SERVICE_LINKS_ADVICE
from kaveri.errors import ConfigError
from kaveri.rpc.server import check_address
from kaveri.rpc.tls import RpcTls, use_tls
from kaveri.security.posture import A_CERTIFICATE, ListeningPort
from kaveri.security.settings import TlsSettings
from kaveri.security.tls_files import WatchedTlsFiles, is_named
from kaveri.telemetry.logs import configure_logs, get_logger
from kaveri.telemetry.metrics import serve_metrics
from kaveri.telemetry.readiness import before_ready, is_ready
from kaveri.telemetry.tracing import close_tracing, configure_tracing
from kaveri.timeouts import LEASE_S

MAX_DRAIN_S = 7 * 86_400.0
MAX_LEASE_S = 86_400.0
MAX_REDIS_WAIT_S = 7 * 86_400.0
CONFIG_ERROR_STATUS = 2
"""Exit status for invalid settings at start."""


def cluster_name_text(text: str) -> str:
    """Parse a cluster name from a setting. Raises ValueError for an empty or invalid name."""
    return name_text(present(text))


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(TlsSettings):
    """Settings that all services share."""

    HELP_TITLE: ClassVar = "Process and cluster"

    instance_id: str = setting(
        "name of this instance, stable over restarts; empty: the role and random digits", "", name_text
    )
    cluster_name: str = setting(
        "name of the cluster; clusters of other names can share a Redis", DEFAULT_CLUSTER, cluster_name_text
    )
    host: str = setting("address to listen on; '::' is all of IPv6 and IPv4", "127.0.0.1", host_text)
    port: int = setting("port to listen on; 0: a free one, found by others through Redis", 0, least=0, most=MAX_PORT)
    advertise_host: str = setting(
        "host name under which others reach this instance; empty: the value of --host, or this machine's name where "
        "--host is all addresses",
        "",
        host_text,
    )
    redis_url: str = setting(
        "where the cluster's state is held; give a password by the variable or the file, not on the command line",
        "redis://127.0.0.1:6379/0",
        present,
        mask=shown,
    )
    redis_wait_s: float = setting(
        "seconds to wait at the start for a Redis that does not answer; health is NOT_SERVING meanwhile",
        60.0,
        least=0,
        most=MAX_REDIS_WAIT_S,
    )
    metrics_port: int = setting(
        "port for Prometheus metrics and health over HTTP, with --tls-cert over mutual TLS; 0: none",
        0,
        least=0,
        most=MAX_PORT,
    )
    health_port: int = setting(
        "port for /livez and /readyz alone over plain HTTP, for probes that show no certificate; 0: none",
        0,
        least=0,
        most=MAX_PORT,
    )
    log_level: str = setting(
        "least level of log lines: debug, info, warning or error", "info", choices=("debug", "info", "warning", "error")
    )
    drain_timeout_s: float = setting(
        "seconds that requests in flight get to finish after SIGTERM", 30.0, least=0, most=MAX_DRAIN_S
    )
    heartbeat_interval_s: float = setting(
        "seconds between two heartbeats while the load changes; else a third of the lease", 0.1, above=0
    )
    lease_ttl_s: float = setting(
        "seconds without a heartbeat after which this instance counts as gone; more than --heartbeat-interval-s",
        LEASE_S,
        above=0,
        most=MAX_LEASE_S,
    )

    def __post_init__(self) -> None:
        if self.lease_ttl_s <= self.heartbeat_interval_s:
            # A shorter lease would expire between heartbeats, and the instance never get a request.
            reason = (
                f"is {self.lease_ttl_s:g}; it must be more than --heartbeat-interval-s, {self.heartbeat_interval_s:g}"
            )
            raise ConfigError("--lease-ttl-s", reason)

    @property
    def reached_host(self) -> str:
        """Host name under which other processes reach this instance."""
        return self.advertise_host or (socket.gethostname() if is_all_addresses(self.host) else self.host)

    @property
    def ports(self) -> tuple[ListeningPort, ...]:
        """All listening ports except --health-port, which reveals only readiness."""
        asks_for = A_CERTIFICATE if self.tls_cert else ""
        found = {"--port": self.port, "--metrics-port": self.metrics_port or None}
        return tuple(
            ListeningPort(flag=flag, host=self.host, port=port, is_encrypted=bool(asks_for), asks_for=asks_for)
            for flag, port in found.items()
            if port is not None
        )

    def advertised_address(self, port: int) -> str:
        """Return the "host:port" at which other processes reach this instance. port: its listening port."""
        return join_address(self.reached_host, port)


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


def run_service(
    role: str,
    config_type: type[ConfigT],
    serve: Callable[[ConfigT, asyncio.Event], Awaitable[int]],
    find_sections: Callable[[], Mapping[str, Collection[str]]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a service in this process; return the exit status. serve(config, stopping) does the work and returns the
    status; the first SIGTERM or SIGINT sets `stopping`, upon which it must drain, and a second one cancels it.
    find_sections: see read_settings. A ConfigError, from the settings or from serve, becomes one line on stderr."""
    program = f"kaveri {role}"
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        read = read_settings(config_type, program, arguments, os.environ, find_sections)
        config = read.config
        if not config.instance_id:
            config = dataclasses.replace(config, instance_id=f"{role}-{secrets.token_hex(3)}")
        configure_logs(role, config.instance_id, config.log_level)
        configure_tracing(role, config.instance_id)
        before_ready(_spare_what_is_loaded)
        if read.service_links:
            get_logger().warning(
                "service_links_ignored", variables=", ".join(read.service_links), advice=SERVICE_LINKS_ADVICE
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_until_stopped(config, serve))
    except (ConfigError, BaseExceptionGroup) as error:
        # A group if raised inside a task group, by a heartbeat for example.
        refusal = error if isinstance(error, ConfigError) else _config_error_in(error)
        if refusal is None:
            raise
        print(f"{program}: {refusal}", file=sys.stderr)
        return CONFIG_ERROR_STATUS
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 128 + signal.SIGTERM
    finally:
        close_tracing()


def _spare_what_is_loaded() -> None:
    """Exempt all loaded objects from garbage collection. A full collection visits every object and holds the GIL: 0.2 s
    with PyTorch's 380,000 objects, in which no token or beat is sent, so that peers suspect this process."""
    gc.collect()
    gc.freeze()


def _config_error_in(group: BaseExceptionGroup[BaseException]) -> ConfigError | None:
    """First ConfigError in the group; None if the group holds any other error, which must not be hidden."""
    _, rest = group.split(ConfigError)
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if rest is None and isinstance(found, ConfigError) else None


async def _serve_until_stopped(config: ConfigT, serve: Callable[[ConfigT, asyncio.Event], Awaitable[int]]) -> int:
    # Before any load, which takes seconds or minutes.
    check_address(config.host, config.port)
    tls: ssl.SSLContext | None = None
    if config.tls is not None:
        use_tls(RpcTls(config.tls))
        tls = WatchedTlsFiles(config.tls).server_context()

    def is_welcome(certificate: Mapping[str, Any] | None) -> bool:
        return tls is None or is_named(certificate, config.tls_name)

    async with (
        serve_metrics(config.host, config.metrics_port, is_ready, tls=tls, is_welcome=is_welcome),
        serve_metrics(config.host, config.health_port, is_ready, registry=None),
    ):
        return await _serve(config, serve)


async def _serve(config: ConfigT, serve: Callable[[ConfigT, asyncio.Event], Awaitable[int]]) -> int:
    stopping = asyncio.Event()
    serving = asyncio.ensure_future(serve(config, stopping))

    def stop() -> None:
        if stopping.is_set():
            serving.cancel()
        get_logger().info("service_stopping", drain_timeout_s=config.drain_timeout_s, at_once=stopping.is_set())
        stopping.set()

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop)
    return await serving
