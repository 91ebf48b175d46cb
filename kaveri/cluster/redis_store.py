"""The cluster's state in Redis (6.2 or newer).

    {prefix}:instance:<id>   "<registration>:<incarnation>:<InstanceStatus>", expires with the lease
    {prefix}:request:<id>    the RequestRecord as JSON, expires with the request
    {prefix}:events          channel: "+<InstanceStatus>" per heartbeat, "-<InstanceStatus>" per deregistration

One heartbeat is one script: it renews the lease and publishes, so that watchers learn loads by push. The registration
is Redis's own time at which that life registered: it orders the lives of one instance id, also over Redis's restarts.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from google.protobuf.message import DecodeError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from kaveri.cluster.membership import Membership
from kaveri.cluster.store import RequestRecord
from kaveri.cluster.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus
from kaveri.errors import ConfigError
from kaveri.rpc.messages import load_from_proto, record_from_proto, status_to_proto
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import cluster_pb2

ResultT = TypeVar("ResultT")

_CONNECT_TIMEOUT_S = 0.5
_COMMAND_TIMEOUT_S = 0.9
_START_TIMEOUT_S = 3.0
_RECONNECT_MIN_S = 0.02
# With the connect timeout this stays under the default lease, so that everybody is back within one lease of Redis.
_RECONNECT_MAX_S = 0.25
_PING_AFTER_S = 0.1
_LOST_AFTER_S = 1.0
_MAX_CONNECTIONS = 16
_SCAN_COUNT = 500

# KEYS: the instance. ARGV: registration or "", incarnation, status, lease in ms, channel.
# Returns the registration, or nothing when a newer life holds the lease.
_HEARTBEAT = """
local registration = ARGV[1]
local held = redis.call('GET', KEYS[1])
local newest, holder
if held then newest, holder = string.match(held, '^(%d+):(%d+):') end
if registration == '' then
  if holder == ARGV[2] then
    registration = newest
  else
    local now = redis.call('TIME')
    local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
    if newest then now_us = math.max(now_us, tonumber(newest) + 1) end
    registration = string.format('%.0f', now_us)
  end
elseif newest and holder ~= ARGV[2] and tonumber(newest) > tonumber(registration) then
  return false
end
redis.call('SET', KEYS[1], registration .. ':' .. ARGV[2] .. ':' .. ARGV[3], 'PX', ARGV[4])
redis.call('PUBLISH', ARGV[5], '+' .. ARGV[3])
return registration
"""

# KEYS: the instance. ARGV: incarnation, status, channel.
_DEREGISTER = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+:(%d+):') == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[3], '-' .. ARGV[2])
end
"""

# KEYS: the request. ARGV: router id, the new record.
_UPDATE_REQUEST = """
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held).router_id == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2], 'KEEPTTL') end
"""

# KEYS: the request. ARGV: router id.
_CLOSE_REQUEST = """
local held = redis.call('GET', KEYS[1])
if held and cjson.decode(held).router_id == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class RedisStore:
    """A ClusterStore on Redis."""

    def __init__(self, url: str, prefix: str = "kaveri") -> None:
        """url: redis://[[user]:password@]host:port/db, rediss://... or unix://path. prefix: of all its keys."""
        self._url = url
        self._prefix = prefix
        self._channel = f"{prefix}:events"
        self._membership = Membership()
        self._registrations: dict[tuple[str, int], bytes] = {}
        self._client: Redis | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._client = await self._connect()
        self._heartbeat_script = self._client.register_script(_HEARTBEAT)
        self._deregister_script = self._client.register_script(_DEREGISTER)
        self._update_script = self._client.register_script(_UPDATE_REQUEST)
        self._close_script = self._client.register_script(_CLOSE_REQUEST)
        loaded = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(loaded), name="redis store: watch")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await loaded.wait()
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise ConfigError("--redis-url", f"Redis at {_shown(self._url)} went away at the start") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None, "left without being entered"
        assert self._watching is not None, "left without being entered"
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.aclose(close_connection_pool=True)

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> None:
        life = (record.instance_id, record.incarnation)
        arguments: list[bytes | str | int] = [
            self._registrations.get(life, b""),
            str(record.incarnation),
            status_to_proto(InstanceStatus(record, load)).SerializeToString(),
            _milliseconds(record.lease_ttl_s),
            self._channel,
        ]
        answer = await self._unless_away(
            self._heartbeat_script(keys=[self._instance_key(record.instance_id)], args=arguments), b""
        )
        if answer is None:
            get_logger().warning("a newer life of this instance holds its lease", id=record.instance_id)
        elif answer:
            self._registrations[life] = cast(bytes, answer)

    async def deregister(self, record: InstanceRecord) -> None:
        self._registrations.pop((record.instance_id, record.incarnation), None)
        arguments: list[bytes | str | int] = [
            str(record.incarnation),
            status_to_proto(InstanceStatus(record, InstanceLoad())).SerializeToString(),
            self._channel,
        ]
        await self._unless_away(
            self._deregister_script(keys=[self._instance_key(record.instance_id)], args=arguments), None
        )

    def view(self) -> ClusterView:
        return self._membership.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        return await self._membership.wait_for_change(timeout_s)

    async def claim_request(self, record: RequestRecord, ttl_s: float) -> bool:
        claiming = self._redis.set(
            self._request_key(record.request_id), _encode_request(record), nx=True, px=_milliseconds(ttl_s)
        )
        return await self._unless_away(claiming, True) is not None

    async def update_request(self, record: RequestRecord) -> None:
        arguments: list[bytes | str | int] = [record.router_id, _encode_request(record)]
        await self._unless_away(self._update_script(keys=[self._request_key(record.request_id)], args=arguments), None)

    async def close_request(self, request_id: str, router_id: str) -> None:
        await self._unless_away(self._close_script(keys=[self._request_key(request_id)], args=[router_id]), None)

    async def requests(self) -> tuple[RequestRecord, ...]:
        return await self._unless_away(self._load_requests(), ())

    @property
    def _redis(self) -> Redis:
        assert self._client is not None, "used before being entered"
        return self._client

    def _instance_key(self, instance_id: str) -> str:
        return f"{self._prefix}:instance:{instance_id}"

    def _request_key(self, request_id: str) -> str:
        return f"{self._prefix}:request:{request_id}"

    async def _unless_away(self, command: Awaitable[ResultT], otherwise: ResultT) -> ResultT:
        # While Redis is away nobody waits for it: only the watcher tries to reach it again.
        if not self._membership.connected:
            if asyncio.iscoroutine(command):
                command.close()
            return otherwise
        cancellations = _cancellations()
        try:
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                answer = await command
        except (RedisError, OSError) as error:
            get_logger().warning("redis command failed", error=_why(error))
            answer = otherwise
        if _cancellations() > cancellations:
            raise asyncio.CancelledError
        return answer

    async def _connect(self) -> Redis:
        try:
            pool = BlockingConnectionPool.from_url(
                self._url,
                max_connections=_MAX_CONNECTIONS,
                timeout=_COMMAND_TIMEOUT_S,
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                socket_timeout=_COMMAND_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except ValueError as error:
            raise ConfigError("--redis-url", f"{_shown(self._url)!r} is no Redis URL: {error}") from error
        client = Redis(connection_pool=pool)
        give_up_at_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                await cast(Awaitable[Any], client.ping())
                return client
            except (RedisError, OSError) as error:
                refused = isinstance(error, AuthenticationError | ResponseError)
                if refused or time.monotonic() > give_up_at_s:
                    await client.aclose(close_connection_pool=True)
                    reason = f"no Redis answers at {_shown(self._url)}: {_why(error)}"
                    raise ConfigError("--redis-url", reason) from error
            except BaseException:
                await client.aclose(close_connection_pool=True)
                raise
            await asyncio.sleep(_RECONNECT_MAX_S)

    async def _watch(self, loaded: asyncio.Event) -> None:
        """Follows the channel for ever, and finds Redis again when it was away."""
        delay_s = _RECONNECT_MIN_S
        while not _cancellations():
            try:
                async with self._redis.pubsub() as channel:
                    # Subscribe before loading: a change in between is seen twice rather than never.
                    await channel.subscribe(self._channel)
                    async with asyncio.timeout(_LOST_AFTER_S):
                        await self._load_instances()
                    if not self._membership.connected:
                        get_logger().info("redis is back", url=_shown(self._url))
                    self._membership.store_returned()
                    loaded.set()
                    delay_s = _RECONNECT_MIN_S
                    await self._follow(channel)
            except (RedisError, OSError) as error:
                if self._membership.connected:
                    get_logger().warning("redis is away; the last view stays in use", error=_why(error))
                self._membership.store_lost()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RECONNECT_MAX_S)

    async def _follow(self, channel: PubSub) -> None:
        """Takes in events until Redis is gone or this task is cancelled. Raises RedisError or OSError."""
        silent_since_s = time.monotonic()
        pings = 0
        while not _cancellations():
            message = await channel.get_message(timeout=_PING_AFTER_S)
            if message is not None:
                self._membership.tick()
                silent_since_s, pings = time.monotonic(), 0
                if message["type"] == "message":
                    self._take_in(message["data"])
                # One task in many: a full socket must not keep the others from running.
                await asyncio.sleep(0)
            elif pings and time.monotonic() - silent_since_s > _LOST_AFTER_S:
                raise TimeoutError(f"silent for {_LOST_AFTER_S} s")
            else:
                if not pings:
                    # Counted from the first ping, so that a stall of this process is not taken for Redis's.
                    silent_since_s = time.monotonic()
                await channel.ping()
                pings += 1

    def _take_in(self, event: bytes) -> None:
        status = self._read(event[1:])
        if status is None:
            return
        if event[:1] == b"-":
            self._membership.forget(status.record.instance_id, status.record.incarnation)
        else:
            self._learn(status, None)

    def _read(self, value: bytes) -> cluster_pb2.InstanceStatus | None:
        """None for a stranger's: garbage must not end the watch."""
        try:
            return cluster_pb2.InstanceStatus.FromString(value)
        except DecodeError as error:
            get_logger().warning("unreadable instance status ignored", error=_why(error))
            return None

    def _learn(self, status: cluster_pb2.InstanceStatus, remaining_s: float | None) -> None:
        known = self._membership.record_of(status.record.instance_id, status.record.incarnation)
        try:
            self._membership.learn(known or record_from_proto(status.record), load_from_proto(status.load), remaining_s)
        except KeyError as error:
            # Of a newer version, with a role or a state unknown here: nothing that we could use.
            get_logger().warning("unreadable instance status ignored", error=_why(error))

    async def _load_instances(self) -> None:
        keys = await self._scan(self._instance_key("*"))
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.get(key)
            pipeline.pttl(key)
        answers = await pipeline.execute()
        for value, remaining_ms in zip(answers[::2], answers[1::2], strict=True):
            # Without its registration it is a stranger's; without a time to live it has just ended, or is one too.
            held = re.fullmatch(rb"\d+:\d+:(.*)", value or b"", re.DOTALL)
            if held and remaining_ms > 0 and (status := self._read(held[1])) is not None:
                self._learn(status, remaining_ms / 1000)

    async def _load_requests(self) -> tuple[RequestRecord, ...]:
        keys = await self._scan(self._request_key("*"))
        values = await cast(Awaitable[list[bytes | None]], self._redis.mget(keys)) if keys else []
        return tuple(RequestRecord(**json.loads(value)) for value in values if value is not None)

    async def _scan(self, pattern: str) -> list[bytes]:
        # SCAN may name a key twice.
        return list({key async for key in self._redis.scan_iter(match=pattern, count=_SCAN_COUNT)})


def _cancellations() -> int:
    """How often this task was cancelled.

    redis-py sends through asyncio.wait_for(), which up to Python 3.11 loses a cancellation that arrives together with
    its result (cpython issue 86296): the exception never comes, so whoever must not miss it asks here.
    """
    task = asyncio.current_task()
    assert task is not None, "outside of a task"
    return task.cancelling()


def _encode_request(record: RequestRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def _milliseconds(duration_s: float) -> int:
    # Redis refuses a time to live of 0.
    return max(1, round(duration_s * 1000))


def _shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
