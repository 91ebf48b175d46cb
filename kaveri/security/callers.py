"""Who calls a port that asks for API keys: finds the key of each request, and holds it to its limits."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaveri.errors import ConfigError, Unauthenticated
from kaveri.security.api_keys import ApiKey, limit_reached
from kaveri.security.keys_file import KeysFile

if TYPE_CHECKING:
    from kaveri.security.key_usage import KeyUsage

MAX_HEADER_BYTES = 512
_SCHEME = b"bearer "
_RETRY_AFTER_S = 1.0
"""Nothing says when a request that is answered will end."""


@dataclass(slots=True)
class Caller:
    """Who has sent one request."""

    key: ApiKey
    tokens: int = 0
    """Of the request's prompts and answers, known when it ends."""


class Callers:
    """For one event loop. Its owner runs it."""

    def __init__(self, keys: KeysFile, usage: "KeyUsage") -> None:
        self._keys = keys
        self._usage = usage
        self._in_flight: Counter[str] = Counter()
        """By the key's name; those that have none are not in it."""

    async def run(self) -> None:
        """Takes up changes of the keys file, until cancelled."""
        try:
            await self._keys.follow()
        finally:
            await self._usage.close()

    @contextlib.asynccontextmanager
    async def admit(self, authorization: bytes | None) -> AsyncIterator[Caller]:
        """One request is in flight while the context lasts. authorization: the header, "Bearer KEY".

        Raises Unauthenticated without a good key, and NoCapacity past a limit.
        """
        key = self._find(authorization)
        most = key.limits.in_flight
        if most and self._in_flight[key.name] >= most:
            raise limit_reached(key, f"{most} requests in flight", _RETRY_AFTER_S)
        # Before anything is awaited, so that requests that come together are counted.
        self._in_flight[key.name] += 1
        try:
            await self._usage.take_request(key)
            caller = Caller(key)
            try:
                yield caller
            finally:
                await self._usage.add_tokens(key, caller.tokens)
        finally:
            self._in_flight[key.name] -= 1
            if not self._in_flight[key.name]:
                del self._in_flight[key.name]

    def _find(self, authorization: bytes | None) -> ApiKey:
        if authorization is None:
            raise Unauthenticated("no API key was given; send it as `Authorization: Bearer KEY`")
        secret = authorization[len(_SCHEME) :].strip()
        if authorization[: len(_SCHEME)].lower() != _SCHEME or not secret or len(authorization) > MAX_HEADER_BYTES:
            raise Unauthenticated("the Authorization header is not `Bearer KEY`")
        key = self._keys.find(secret)
        if key is None:
            raise Unauthenticated("this API key is unknown, or was revoked")
        return key


def make_callers(keys_file: str, redis_url: str, cluster_name: str) -> Callers | None:
    """For a port of this process; None without a keys file. redis_url: where all processes of the cluster count what
    keys use; empty: in this process only. Raises ConfigError."""
    if not keys_file:
        return None
    try:
        # Only here: without a keys file the package is not needed.
        from kaveri.security.key_usage import KeyUsage
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed: pip install 'kaveri[gateway]'"
        raise ConfigError("--keys-file", reason) from error
    return Callers(KeysFile(keys_file), KeyUsage(redis_url, cluster_name))
