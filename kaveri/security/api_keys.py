"""API keys: generation, stored digests, and the text of a keys file. Pure, except for new_secret().

A keys file is TOML, one table for each key:

    [alice]
    sha256 = "9f86d0…"          # of the key; the key itself is not kept anywhere
    requests_per_s = 10         # 0 or left out: no limit
    tokens_per_min = 100_000
    in_flight = 8
    admin = false               # left out: false
    revoked = false             # left out: false. A revoked key stays in the file, so that no file without keys is good
"""

import hashlib
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kaveri.errors import ConfigError, NoCapacity

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECRET_BYTES = 32
MAX_LIMIT = 10**9
MAX_KEYS = 10_000
USAGE_COMMANDS = ("EVALSHA", "SCRIPT LOAD", "INCRBY", "EXPIRE", "GET", "TTL")
"""Redis commands that count usage for a whole cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Usage limits of one API key; 0: no limit."""

    requests_per_s: int = 0
    tokens_per_min: int = 0
    """Max tokens of prompts and answers together."""
    in_flight: int = 0
    """Max concurrent requests."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Table of the keys file: an API key's digest, limits and rights."""

    name: str
    digest: bytes
    """SHA-256 of the key."""
    limits: KeyLimits
    is_admin: bool = False
    """True for an operator's key: it may drain instances, and see the cluster and finished requests."""
    is_revoked: bool = False


def new_secret() -> str:
    """Generate an API key: 256 random bits as text."""
    return "kaveri-" + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Return the digest stored for a key. A slow hash would add nothing: 256 random bits cannot be guessed."""
    return hashlib.sha256(secret).digest()


def key_table(name: str, secret: str, limits: KeyLimits, is_admin: bool = False) -> str:
    lines = [f"\n[{name}]", f'sha256 = "{digest_of(secret.encode()).hex()}"']
    given = {limit.name: getattr(limits, limit.name) for limit in fields(limits)}
    lines += [f"{limit} = {value}" for limit, value in given.items() if value]
    lines += ["admin = true"] * is_admin
    return "\n".join([*lines, ""])


def with_key_revoked(text: str, name: str, path: str) -> str:
    """Mark a key as revoked in a keys file's text, keeping comments. path: for errors. Raises ConfigError."""
    keys = parse_keys(text, path)
    if all(key.name != name or key.is_revoked for key in keys):
        raise ConfigError("NAME", f"is {name:.80}, and {path} has no key of this name that is not revoked")
    header = re.compile(rf"""^[ \t]*\[[ \t]*["']?{name}["']?[ \t]*\][ \t]*(#.*)?$""", re.MULTILINE)
    changed = header.sub(lambda found: f"{found[0]}\nrevoked = true", text, count=1)
    wanted = tuple(replace(key, is_revoked=key.is_revoked or key.name == name) for key in keys)
    try:
        is_done = parse_keys(changed, path) == wanted
    except ConfigError:
        is_done = False
    if not is_done:
        raise ConfigError("NAME", f"is {name}, whose table {path} writes in another way; add `revoked = true` to it")
    return changed


def usage_prefix(cluster_name: str) -> str:
    return f"kaveri:{cluster_name}:limits"


def limit_reached(key: ApiKey, limit: str, retry_after_s: float) -> NoCapacity:
    return NoCapacity(f"API key {key.name}", round(retry_after_s, 3), f"its limit of {limit} is reached")


def parse_keys(text: str, path: str) -> tuple[ApiKey, ...]:
    """Parse a keys file. path: for errors. Raises ConfigError, naming the table and the field."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(path, f"is no keys file: {error}") from error
    if len(tables) > MAX_KEYS:
        raise ConfigError(path, f"has {len(tables)} keys; at most {MAX_KEYS} are read")
    keys = tuple(_read_key(name, table, path) for name, table in tables.items())
    by_digest: dict[bytes, str] = {}
    for key in keys:
        if by_digest.setdefault(key.digest, key.name) != key.name:
            raise ConfigError(f"{path} [{key.name}]", f"has the same sha256 as [{by_digest[key.digest]}]")
    return keys


def check_name(name: str, place: str) -> str:
    """Validate an API key's name and return it. Raises ConfigError for the field `place`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(place, f"is {name!r:.80}; write up to 64 letters, digits, '_' and '-'")
    return name


def check_limit(value: object, place: str) -> int:
    """Validate an API key's limit and return it. Raises ConfigError for the field `place`."""
    if type(value) is not int or not 0 <= value <= MAX_LIMIT:
        raise ConfigError(place, f"is {value!r:.80}; write a whole number from 0 (no limit) to {MAX_LIMIT}")
    return value


def _read_key(name: str, table: Any, path: str) -> ApiKey:
    place = f"{path} [{name:.80}]"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path} {name:.80}", "stands outside of a table; write [NAME] above it")
    check_name(name, place)
    known = [limit.name for limit in fields(KeyLimits)]
    for field in table:
        if field not in ("sha256", "admin", "revoked", *known):
            written = ", ".join(["sha256", "admin", "revoked", *known])
            raise ConfigError(f"{place} {field:.80}", f"is no field of a key; write {written}")
    digest = table.get("sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        # Do not show the value: it may be the key itself.
        raise ConfigError(f"{place} sha256", "must be the SHA-256 of the key, 64 hexadecimal digits in lower case")
    limits = {limit: check_limit(table.get(limit, 0), f"{place} {limit}") for limit in known}
    is_admin, is_revoked = (_read_switch(table, field, place) for field in ("admin", "revoked"))
    return ApiKey(name, bytes.fromhex(digest), KeyLimits(**limits), is_admin, is_revoked)


def _read_switch(table: Mapping[str, Any], field: str, place: str) -> bool:
    value = table.get(field, False)
    if type(value) is not bool:
        raise ConfigError(f"{place} {field}", f"is {value!r:.80}; write true or false")
    return value
