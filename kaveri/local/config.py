"""Settings of a local stack, and the command line and environment of each of its services."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from kaveri.addresses import is_all_addresses
from kaveri.cluster.store import DEFAULT_CLUSTER
from kaveri.config.services import ServiceKind, program_of
from kaveri.config.settings import MAX_PORT, read_settings
from kaveri.config.sources import CONFIG_VARIABLE, FILE_SUFFIX, flag_of, variable_of
from kaveri.errors import ConfigError
from kaveri.local.service_flags import ROLES, names_of_role, roles_of
from kaveri.models import KAVERI_TINY
from kaveri.programs import setting_sections, settings_types
from kaveri.security.posture import open_ports

PartT = TypeVar("PartT", "ListeningPorts", "Supervision")
LOOPBACK = "127.0.0.1"
PUBLIC_ROLES = (ServiceKind.ROUTER, ServiceKind.GATEWAY)
"""Roles that clients connect to: they keep their ports over restarts."""
_COUNTS: Mapping[ServiceKind, int] = {
    ServiceKind.ROUTER: 1,
    ServiceKind.PREFILL: 2,
    ServiceKind.DECODE: 2,
    ServiceKind.PREDICTOR: 1,
}


@dataclass(frozen=True, kw_only=True)
class ListeningPorts:
    """Listening host and ports of a local cluster. Instances take consecutive ports from a first one; 0: free ports."""

    host: str = LOOPBACK
    """Listening host of the routers and gateways; everything else stays on loopback."""
    port: int = 0
    """Port of the first router."""
    gateway_port: int = 0
    public_port: int = 0
    """Port of the first router for clients with API keys. 0: none."""
    metrics_port: int = 0
    """First port, on loopback, for Prometheus metrics: one port per instance, gateways' last. 0: no metrics."""


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Logs, timeouts and restarts of a local cluster's processes."""

    log_dir: Path | None = None
    """Folder of the <instance id>.log files; None: a temporary folder removed with the stack."""
    drain_timeout_s: float = 30.0
    """Seconds for requests in flight to end when the stack stops."""
    start_timeout_s: float = 300.0
    """Max seconds until every instance is ready; mostly for loading models."""
    restart: bool = True
    """True to restart a child that dies; fault tests restart children themselves."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Settings of a local stack: a cluster on this machine. Services take all others from variables and defaults."""

    model: str = KAVERI_TINY
    """Path, hub id or bundled name of the served model."""
    counts: Mapping[ServiceKind, int] = field(default_factory=lambda: _COUNTS)
    """Number of instances by role. Gateways need the extra `gateway` installed, predictors the setting `predictor`."""
    flags: Mapping[ServiceKind, tuple[str, ...]] = field(default_factory=dict)
    """Additional flags by role: ("--max-requests", "64")."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings by name, {"engine": "fake"}, for the services in roles_of(name)."""
    config_file: str = ""
    """TOML settings file of every service; empty: none."""
    redis_url: str = ""
    """URL of the Redis to use; empty: a private Redis."""
    cluster_name: str = DEFAULT_CLUSTER
    """Name of the cluster; several clusters can share one Redis."""
    name: str = ""
    """Prefix of the instance ids, so that several stacks can form one cluster: "blue-decode-0"."""
    listening: ListeningPorts = field(default_factory=ListeningPorts)
    supervision: Supervision = field(default_factory=Supervision)

    def __post_init__(self) -> None:
        """Raise ConfigError for an empty model or host, or ports above 65535."""
        for flag, text in (("--model", self.model), ("--host", self.listening.host)):
            if not text.strip():
                raise ConfigError(flag, "is empty")
        for flag, port, count in (
            ("--port", self.listening.port, self.counts.get(ServiceKind.ROUTER, 0)),
            ("--public-port", self.listening.public_port, self.counts.get(ServiceKind.ROUTER, 0)),
            ("--gateway-port", self.listening.gateway_port, self.counts.get(ServiceKind.GATEWAY, 0)),
            ("--metrics-port", self.listening.metrics_port, len(self.roles)),
        ):
            if port and port + count - 1 > MAX_PORT:
                raise ConfigError(flag, f"is {port}; {count} ports follow one another, up to {MAX_PORT}")

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Create a config from fields of it or its parts, ROLE_count, ROLE_flags, and service settings (empty or 0:
        default): `StackConfig.of(prefill_count=1, decode_flags=("--max-batch", "8"), engine="fake")`."""
        counts = {role: given.pop(f"{role}_count") for role in ROLES if f"{role}_count" in given}
        flags = {role: given.pop(f"{role}_flags") for role in ROLES if f"{role}_flags" in given}
        own: dict[str, Any] = {"listening": _take(ListeningPorts, given), "supervision": _take(Supervision, given)}
        own |= {name: given.pop(name) for name in cls.__dataclass_fields__ if name in given}
        settings = {name: value for name, value in given.items() if value or value is False}
        return cls(**own, counts={**_COUNTS, **counts}, flags=flags, settings=settings)

    @property
    def roles(self) -> dict[str, ServiceKind]:
        """Role of each instance by id, in the order in which instances are stopped."""
        return {name: role for role in ROLES for name in self.instance_ids(role)}

    def instance_ids(self, role: ServiceKind) -> tuple[str, ...]:
        has_none = role is ServiceKind.PREDICTOR and not self.settings.get("predictor")
        count = 0 if has_none else self.counts.get(role, 0)
        prefix = f"{self.name}-" if self.name else ""
        return tuple(f"{prefix}{role}-{number}" for number in range(count))

    @property
    def ports(self) -> dict[str, int]:
        """Ports of routers and gateways by instance id; 0: any free port."""
        firsts = ((ServiceKind.ROUTER, self.listening.port), (ServiceKind.GATEWAY, self.listening.gateway_port))
        return {
            name: first and first + number
            for role, first in firsts
            for number, name in enumerate(self.instance_ids(role))
        }

    def metrics_port_of(self, instance_id: str) -> int:
        # Gateways last, so that the other roles keep their former ports.
        gateways = self.instance_ids(ServiceKind.GATEWAY)
        others = [name for name in self.roles if name not in gateways]
        first = self.listening.metrics_port
        return first and first + [*others, *gateways].index(instance_id)

    @property
    def public_advertise_host(self) -> str:
        """Host under which routers and gateways are registered and reached."""
        return LOOPBACK if is_all_addresses(self.listening.host) else self.listening.host


def service_command(config: StackConfig, role: ServiceKind, instance_id: str, port: int) -> list[str]:
    """Build the command line that starts a service, without secrets: local users can read it. port: 0: a free one."""
    is_public = role in PUBLIC_ROLES
    settings: dict[str, object] = {
        "instance_id": instance_id,
        "host": config.listening.host if is_public else LOOPBACK,
        "advertise_host": config.public_advertise_host if is_public else LOOPBACK,
        "port": port,
        "metrics_port": config.metrics_port_of(instance_id),
        "health_port": 0,
        "cluster_name": config.cluster_name,
        "drain_timeout_s": config.supervision.drain_timeout_s,
    }
    if role is ServiceKind.ROUTER and config.listening.public_port:
        settings["public_port"] = config.listening.public_port + config.instance_ids(role).index(instance_id)
    if "model" in names_of_role(role).own:
        settings["model"] = config.model
    settings |= {
        name: value for name, value in _shared(config, role).items() if name not in names_of_role(role).secrets
    }
    flags = [text for name, value in settings.items() for text in (flag_of(name), str(value))]
    return [sys.executable, *program_of(role), *flags, *config.flags.get(role, ())]


def exposed_ports(config: StackConfig, inherited: Mapping[str, str]) -> list[str]:
    """Describe the ports that other machines reach unencrypted or unauthenticated. inherited: environment variables."""
    found: list[str] = []
    for role in PUBLIC_ROLES:
        program, types = program_of(role), settings_types()
        for instance_id in config.instance_ids(role):
            words = service_command(config, role, instance_id, config.ports[instance_id])[1 + len(program) :]
            environment = service_environment(config, role, config.redis_url or "unused", inherited)
            read = read_settings(types[role], f"kaveri {role}", words, environment, setting_sections)
            found += [f"{instance_id} {text}" for text in open_ports(read.config.ports)]
    return found


def service_environment(
    config: StackConfig, role: ServiceKind, redis_url: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Build a service's environment variables: `inherited`, and the settings that may hold secrets."""
    shared = {**_shared(config, role), "redis_url": redis_url}
    given = {variable_of(name): str(value) for name, value in shared.items() if name in names_of_role(role).secrets}
    if config.config_file:
        given[CONFIG_VARIABLE] = config.config_file
    # A secret and its file are mutually exclusive.
    dropped = {variable_of(name + FILE_SUFFIX) for name in names_of_role(role).secrets if variable_of(name) in given}
    return {name: value for name, value in inherited.items() if name not in dropped} | given


def _shared(config: StackConfig, role: ServiceKind) -> dict[str, object]:
    return {name: value for name, value in config.settings.items() if role in roles_of(name)}


def stack_flag(field: str) -> str:
    """Return the flag of a secret setting's KAVERI_* variable, for errors; any other name unchanged."""
    of_secrets = {variable_of(name): flag_of(name) for role in ROLES for name in names_of_role(role).secrets}
    return of_secrets.get(field, field)


def _take(kind: type[PartT], given: dict[str, Any]) -> PartT:
    return kind(**{name: given.pop(name) for name in kind.__dataclass_fields__ if name in given})
