"""Who calls a port that asks for API keys: finds the key of each request, and holds it to its limits."""

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
"""Nothing says when a request that is answered will end."""


@dataclass(slots=True)
class Caller:
    """Who has sent one request."""

    key: ApiKey
    tokens: int = 0
    """Of the request's prompts and answers, known when it ends."""


class Callers:
    """For one event loop. Its owner runs it."""

    def __init__(self, keys: "KeysFile", usage: "KeyUsage") -> None:
        self.keys = keys
        self._usage = usage
        self._in_flight: dict[str, dict[Hashable, int]] = {}
        """How often each request is being answered, by the key's name. Keys that have none are not in it."""

    async def run(self) -> None:
        """Takes up changes of the keys file, until cancelled."""
        try:
            await self.keys.follow()
        finally:
            await self._usage.close()

    @contextlib.asynccontextmanager
    async def admit(self, authorization: bytes | None, request_id: str = "") -> AsyncIterator[Caller]:
        """One request is in flight while the context lasts. authorization: the header, "Bearer KEY". request_id: given
        where only one request of an id can be answered at a time: a call that follows on another one is not counted
        as another request in flight.

        Raises Unauthenticated without a good key, and NoCapacity past a limit.
        """
        key = self.find(authorization)
        request: Hashable = request_id or object()
        most, in_flight = key.limits.in_flight, self._in_flight.setdefault(key.name, {})
        if most and len(in_flight) >= most and request not in in_flight:
            raise limit_reached(key, f"{most} requests in flight", _RETRY_AFTER_S)
        # Before anything is awaited, so that requests that come together are counted.
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
        """Raises Unauthenticated unless it is the key of an operator."""
        key = self.find(authorization)
        if not key.is_admin:
            raise Unauthenticated(f"the API key {key.name} is no admin key; make one by `kaveri key new NAME --admin`")

    def find(self, authorization: bytes | None) -> ApiKey:
        """The key that a request gives; its limits are not asked. Raises Unauthenticated."""
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
    """For a port of this process; None without a keys file. redis_url: where all processes of the cluster count what
    keys use; empty: in this process only. Raises ConfigError."""
    if not keys_file:
        return None
    try:
        # Only here: without a keys file neither the package nor the metric is needed.
        from kaveri.security.key_usage import KeyUsage
        from kaveri.security.keys_file import KeysFile
    except ModuleNotFoundError as error:
        raise ConfigError("--keys-file", lacks(str(error.name), "gateway")) from error
    return Callers(KeysFile(keys_file), KeyUsage(redis_url, cluster_name))
