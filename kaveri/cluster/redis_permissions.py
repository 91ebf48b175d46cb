"""Redis permissions that services need, and a check of them at start. The list follows from the store's Lua scripts and
commands; tests verify that it is sufficient and that each entry is needed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import AskError, ClusterCrossSlotError, ClusterDownError, NoPermissionError, ResponseError

from kaveri.cluster import redis_scripts

_SENT_COMMANDS = (
    "SET",
    "GET",
    "PTTL",
    "SMEMBERS",
    "EVAL",
    "EVALSHA",
    "SCRIPT LOAD",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "PING",
)
_CALLED = re.compile(r"redis\.call\('([A-Z]+)'")
_KEYS = ("instance:*", "instances", "request:*", "leader", "counters")
_CHANNELS = ("events", "loads")
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("GET", "PTTL", "TTL", "SMEMBERS", "EXISTS", "DEL"), ("{key}",)),
    **dict.fromkeys(("SET", "HGET", "SADD", "SREM", "PEXPIRE", "EXPIRE", "INCRBY"), ("{key}", "1")),
    **dict.fromkeys(("HSET", "HINCRBY"), ("{key}", "1", "1")),
    "EVAL": ("return 1", "1", "{key}"),
    "EVALSHA": ("0" * 40, "1", "{key}"),
    "SCRIPT LOAD": ("return 1",),
    "SUBSCRIBE": ("{channel}",),
    "UNSUBSCRIBE": ("{channel}",),
    "PUBLISH": ("{channel}", ""),
    "PING": (),
}
"""Arguments for a probe of each command: Redis accepts it in a transaction."""


CLUSTER_MODE = "it is in cluster mode, which Kaveri does not support: name a Redis without it"


@dataclass(frozen=True, slots=True)
class RedisNeeds:
    """Permissions that a Redis user needs: commands, and patterns of keys and channels."""

    commands: frozenset[str]
    """Names in upper case: "SCRIPT LOAD"."""
    keys: tuple[str, ...]
    channels: tuple[str, ...] = ()

    def __or__(self, other: "RedisNeeds") -> "RedisNeeds":
        return RedisNeeds(self.commands | other.commands, self.keys + other.keys, self.channels + other.channels)

    def rules(self) -> tuple[str, ...]:
        """Return the ACL rules (for ACL SETUSER), with those that the check itself needs."""
        return "+multi", *(rule for rule, _ in self.probes()), "+discard"

    def probes(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield an (ACL rule, command that needs it) pair per permission."""
        for command in sorted(self.commands):
            rule = "+" + command.lower().replace(" ", "|")
            yield rule, _written(command, self.keys[0], "".join(self.channels[:1]))
        for key in self.keys:
            yield f"~{key}", _written("EVAL", key.replace("*", "probe"), "")
        for channel in self.channels:
            yield f"&{channel}", _written("SUBSCRIBE", "", channel)


class NotPermitted(Exception):
    """Redis refuses for good, such as for a missing permission; the text gives the reason."""


def store_needs(prefix: str) -> RedisNeeds:
    """Return the permissions that RedisStore needs. prefix: beginning of its keys and channels."""
    scripts = [script for name, script in vars(redis_scripts).items() if name.isupper()]
    called = frozenset(command for script in scripts for command in _CALLED.findall(script))
    keys, channels = (tuple(f"{prefix}:{name}" for name in names) for names in (_KEYS, _CHANNELS))
    return RedisNeeds(called.union(_SENT_COMMANDS), keys, channels)


async def check_permissions(pool: BlockingConnectionPool, needs: RedisNeeds) -> None:
    """Check all permissions by probes in a transaction that is discarded: nothing is executed. Raises NotPermitted, or
    the ResponseError of a temporary refusal: READONLY, OOM, MISCONF and others."""
    connection = await pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        # Sent alone: without this permission Redis would execute the following commands.
        answers = await _ask(connection, [("+multi", ("MULTI",))])
        if not any(answers.values()):
            answers |= await _ask(connection, [*needs.probes(), ("+discard", ("DISCARD",))])
    finally:
        # A transaction that is left open ends with its connection.
        await connection.disconnect()
        await pool.release(connection)
    errors = {rule: error for rule, error in answers.items() if error is not None}
    if any(isinstance(error, AskError | ClusterCrossSlotError | ClusterDownError) for error in errors.values()):
        raise NotPermitted(CLUSTER_MODE)
    missing = [rule for rule, error in errors.items() if _is_missing(rule, error)]
    if missing:
        rules = " ".join(missing)
        raise NotPermitted(f"its user lacks {rules} (as ACL SETUSER writes it; a command may also be disabled)")
    for error in errors.values():
        raise error


async def _ask(connection: Any, probes: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, ResponseError | None]:
    """Send the probes. Returns Redis's error for each, by ACL rule; None if accepted."""
    rules, commands = zip(*probes, strict=True)
    await connection.send_packed_command(connection.pack_commands(commands))
    answers: dict[str, ResponseError | None] = dict.fromkeys(rules)
    for rule in rules:
        try:
            await connection.read_response()
        except ResponseError as error:
            answers[rule] = error
    return answers


def _is_missing(rule: str, error: ResponseError) -> bool:
    """Return True if the error means that this ACL rule is missing. Redis checks commands before keys and channels."""
    if "unknown command" in str(error):
        return rule.startswith("+")
    return isinstance(error, NoPermissionError) and rule.startswith("+") == ("command" in str(error))


def _written(command: str, key: str, channel: str) -> tuple[str, ...]:
    return (*command.split(), *(part.format(key=key, channel=channel) for part in _ARGUMENTS[command]))
