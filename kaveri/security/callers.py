"""Authenticates requests by API key, and enforces the key's limits."""

import contextlib
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kaveri.errors import ConfigError, Unauthenticated
from kaveri.extras import lacks
from kaveri.security.api_keys import ApiKey, limit_reached

if TYPE_CHECKING:
    from kaveri.security.key_usage import KeyUsage
    from kaveri.security.keys_file import KeysFile

MAX_HEADER_BYTES = 512
_SCHEME = b"bearer "
_RETRY_AFTER_S = 1.0
"""Fixed retry delay, since the end of a running request is unknown."""


@dataclass(slots=True)
class Caller:
    """API key of one request, and the tokens that the request used."""

    key: ApiKey
    tokens: int = 0
    """Number of prompt and answer tokens of the request, set when it ends."""


class Callers:
    """Admits requests by API key, within its limits. Not thread-safe. The owner must run run()."""

    def __init__(self, keys: "KeysFile", usage: "KeyUsage") -> None:
        self.keys = keys
        self._usage = usage
        self._in_flight: dict[str, dict[Hashable, int]] = {}
        """Number of active calls of each request, by name of the API key; only keys in use."""

    async def run(self) -> None:
        """Apply changes of the keys file until cancelled."""
        try:
            await self.keys.follow()
        finally:
            await self._usage.close()

    @contextlib.asynccontextmanager
    async def admit(self, authorization: bytes | None, request_id: str = "") -> AsyncIterator[Caller]:
        """Count a request as in flight during the context. authorization: the header, "Bearer KEY". request_id: calls
        with the same id count once. Raises Unauthenticated without a valid key, NoCapacity past a limit."""
        key = self.find(authorization)
        request: Hashable = request_id or object()
        most, in_flight = key.limits.in_flight, self._in_flight.setdefault(key.name, {})
        if most and len(in_flight) >= most and request not in in_flight:
            raise limit_reached(key, f"{most} requests in flight", _RETRY_AFTER_S)
        # Count before the first await, so that concurrent requests see each other.
        in_flight[request] = in_flight.get(request, 0) + 1
        try:
            await self._usage.take_request(key)
            caller = Caller(key)
            try:
                yield caller
            finally:
                await self._usage.add_tokens(key, caller.tokens)
        finally:
            in_flight[request] -= 1
            if not in_flight[request]:
                del in_flight[request]
            if not in_flight and self._in_flight.get(key.name) is in_flight:
                del self._in_flight[key.name]

    def check_admin(self, authorization: bytes | None) -> None:
        """Raise Unauthenticated unless the header holds an admin key."""
        key = self.find(authorization)
        if not key.is_admin:
            raise Unauthenticated(f"the API key {key.name} is no admin key; make one by `kaveri key new NAME --admin`")

    def find(self, authorization: bytes | None) -> ApiKey:
        """Return the API key in an Authorization header, without checking limits. Raises Unauthenticated."""
        if authorization is None:
            reason = "no API key was given; send it as `Authorization: Bearer KEY`, with Kaveri's SDK as api_key"
            raise Unauthenticated(reason)
        secret = authorization[len(_SCHEME) :].strip()
        if authorization[: len(_SCHEME)].lower() != _SCHEME or not secret or len(authorization) > MAX_HEADER_BYTES:
            raise Unauthenticated("the Authorization header is not `Bearer KEY`")
        key = self.keys.find(secret)
        if key is None:
            raise Unauthenticated("this API key is unknown, or was revoked")
        return key


def make_callers(keys_file: str, redis_url: str, cluster_name: str) -> Callers | None:
    """Create a Callers, or None without a keys file. redis_url: for usage of the whole cluster; empty: of this process
    only. Raises ConfigError."""
    if not keys_file:
        return None
    try:
        # Import here: without a keys file neither the package nor the metric is needed.
        from kaveri.security.key_usage import KeyUsage
        from kaveri.security.keys_file import KeysFile
    except ModuleNotFoundError as error:
        raise ConfigError("--keys-file", lacks(str(error.name), "gateway")) from error
    return Callers(KeysFile(keys_file), KeyUsage(redis_url, cluster_name))
