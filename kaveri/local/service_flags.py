"""Decides which services of a local cluster receive a flag or setting."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from kaveri.config.services import INSTANCES, ServiceKind
from kaveri.config.settings import names_of
from kaveri.config.sources import SettingNames, flag_of, nearest, take_value
from kaveri.errors import ConfigError
from kaveri.programs import settings_types
from kaveri.rpc.process import ServiceConfig

ROLES = tuple(ServiceKind)
_OF_THE_STACK = frozenset({"instance_id", "advertise_host", "routers", "health_port"})
"""Settings that a local stack itself sets for each instance."""


@cache
def names_of_role(role: ServiceKind) -> SettingNames:
    return names_of(settings_types()[role])


@cache
def roles_of(name: str) -> tuple[ServiceKind, ...]:
    """Return the kinds of services that receive a setting given without a role: all that have it, if it means the same
    in each; else only those with engines, since the predictor's --device and --max-queue differ."""
    having = tuple(role for role in ROLES if name in names_of_role(role).own)
    if name in names_of(ServiceConfig).own or name in ("model", "served_model_name"):
        return having
    return tuple(role for role in having if role in INSTANCES) or having


@dataclass(frozen=True, slots=True)
class ServiceFlags:
    shared: Mapping[str, str] = field(default_factory=dict)
    """Settings by name, for every service in roles_of(name)."""
    of_role: Mapping[ServiceKind, tuple[str, ...]] = field(default_factory=dict)


def read_service_flags(words: Sequence[str], roles: Iterable[ServiceKind], own_flags: Collection[str]) -> ServiceFlags:
    """Sort flags such as `--engine fake --prefill.chunk-tokens 512` by service. roles: those with instances. own_flags:
    the program's, to suggest for an unknown flag. Raises ConfigError for a flag that no running service accepts."""
    running = tuple(roles)
    shared: dict[str, str] = {}
    of_role: dict[ServiceKind, tuple[str, ...]] = {}
    remaining = deque(words)
    while remaining:
        flag, equals, text = (word := remaining.popleft()).partition("=")
        if not flag.startswith("--"):
            raise ConfigError("flags", f"{word!r} is no flag; write --name value")
        takers = _roles_taking(flag, running, own_flags)
        if not equals:
            name = flag.rpartition(".")[2].removeprefix("--").replace("-", "_")
            text = take_value(flag, remaining, is_switch=any(name in names_of_role(role).switches for role in ROLES))
        if not text.strip():
            raise ConfigError(flag, "is empty")
        role, dot, name = flag.removeprefix("--").rpartition(".")
        if dot:
            of_role[ServiceKind(role)] = (*of_role.get(ServiceKind(role), ()), f"--{name}", text)
        elif takers:
            shared[name.replace("-", "_")] = text
    return ServiceFlags(shared, of_role)


def _roles_taking(flag: str, running: Sequence[ServiceKind], own_flags: Collection[str]) -> Sequence[ServiceKind]:
    """Return the kinds of running services that accept this flag. Raises ConfigError if there is none."""
    role, dot, name = flag.removeprefix("--").rpartition(".")
    setting = name.replace("-", "_")
    if dot and role not in ROLES:
        raise ConfigError(flag, f"{role!r} is no role; choose {', '.join(ROLES)}{nearest(role, ROLES)}")
    taking = (ServiceKind(role),) if dot else roles_of(setting)
    known = [
        flag_of(known) for taker in (taking if dot else ROLES) for known in names_of_role(taker).own - _OF_THE_STACK
    ]
    if flag_of(setting) not in known or "_" in name:
        hint = nearest(f"--{name}", known if dot else [*known, *own_flags])
        reason = f"is no flag of kaveri {role}{hint}" if dot else f"is no flag of kaveri up or of a service{hint}"
        raise ConfigError(flag, reason)
    if found := [taker for taker in taking if taker in running]:
        return found
    raise ConfigError(flag, f"would change nothing: no {' or '.join(taking)} instance is started")
