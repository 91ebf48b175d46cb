"""The cluster's state in Redis (6.2 or newer).

    {prefix}:instance:<id>   "<registration>:<incarnation>:<InstanceStatus>", expires with the lease
    {prefix}:request:<id>    the RequestRecord as JSON, expires with the request
    {prefix}:leader          "<fencing token>:<candidate>" of the cluster monitor, expires with the leader's lease
    {prefix}:fencing         the last fencing token
    {prefix}:events          channel: "+<InstanceStatus>" per heartbeat, "-<InstanceStatus>" per deregistration
    {prefix}:loads           channel: "=<LoadBroadcast>" of the leader, "-<InstanceStatus>" per deregistration

One heartbeat is one script: it renews the lease and publishes, so that watchers learn loads by push. The registration
is Redis's own time at which that life registered: it orders the lives of one instance id, also over Redis's restarts.
A fencing token is Redis's time at the change of leader, for the same reason.
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
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.cluster.store import Follow, RequestRecord
from kaveri.cluster.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, LoadBroadcast
from kaveri.errors import ConfigError
from kaveri.rpc.messages import broadcast_to_proto, load_from_proto, record_from_proto, status_to_proto
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

# KEYS: the instance. ARGV: incarnation, status, channels.
_DEREGISTER = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+:(%d+):') == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[3], '-' .. ARGV[2])
  redis.call('PUBLISH', ARGV[4], '-' .. ARGV[2])
end
"""

# KEYS: the leader, the last token. ARGV: candidate, lease in ms. Returns the token, or nothing when another leads.
_CAMPAIGN = """
local held = redis.call('GET', KEYS[1])
if held then
  local token, holder = string.match(held, '^(%d+):(.*)$')
  if holder ~= ARGV[1] then return false end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return token
end
local now = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[2]) or 0)
local token = string.format('%.0f', math.max(tonumber(now[1]) * 1000000 + tonumber(now[2]), last + 1))
redis.call('SET', KEYS[1], token .. ':' .. ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], token)
return token
"""

# KEYS: the leader. ARGV: candidate.
_RESIGN = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+:(.*)$') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS: the leader. ARGV: token, broadcast, channel. Returns whether the token leads.
_BROADCAST = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, '^%d+') ~= ARGV[1] then return 0 end
redis.call('PUBLISH', ARGV[3], '=' .. ARGV[2])
return 1
"""

# KEYS: the request, the instance of the router that holds it. ARGV: the value held, that router's incarnation, the new
# record, its time to live in ms. Returns whether the claim was taken over: not while that life's lease holds.
_TAKE_OVER_REQUEST = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local lease = redis.call('GET', KEYS[2])
if lease and string.match(lease, '^%d+:(%d+):') == ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return 1
"""

# In these two the incarnation is a string also in JSON: Lua's numbers have 53 bits.
# KEYS: the request. ARGV: router id, incarnation, the new record.
_UPDATE_REQUEST = """
local held = redis.call('GET', KEYS[1])
if not held then return end
local record = cjson.decode(held)
if record.router_id == ARGV[1] and record.router_incarnation == ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[3], 'KEEPTTL')
end
"""

# KEYS: the request. ARGV: router id, incarnation.
_CLOSE_REQUEST = """
local held = redis.call('GET', KEYS[1])
if not held then return 1 end
local record = cjson.decode(held)
if record.router_id == ARGV[1] and record.router_incarnation == ARGV[2] then redis.call('DEL', KEYS[1]) end
return 1
"""


class RedisStore:
    """A ClusterStore on Redis."""

    def __init__(self, url: str, prefix: str = "kaveri", follow: Follow = Follow.HEARTBEATS) -> None:
        """url: redis://[[user]:password@]host:port/db, rediss://... or unix://path. prefix: of all its keys."""
        self._url = url
        self._prefix = prefix
        self._events_channel = f"{prefix}:events"
        self._loads_channel = f"{prefix}:loads"
        self._monitored = MonitoredMembership() if follow is Follow.BROADCASTS else None
        self._membership = self._monitored or Membership()
        self._hears_heartbeats = True
        self._registrations: dict[tuple[str, int], bytes] = {}
        self._client: Redis | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._client = await self._connect()
        self._heartbeat_script = self._client.register_script(_HEARTBEAT)
        self._deregister_script = self._client.register_script(_DEREGISTER)
        self._take_over_script = self._client.register_script(_TAKE_OVER_REQUEST)
        self._update_script = self._client.register_script(_UPDATE_REQUEST)
        self._close_script = self._client.register_script(_CLOSE_REQUEST)
        self._campaign_script = self._client.register_script(_CAMPAIGN)
        self._resign_script = self._client.register_script(_RESIGN)
        self._broadcast_script = self._client.register_script(_BROADCAST)
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
            self._events_channel,
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
            self._events_channel,
            self._loads_channel,
        ]
        await self._unless_away(
            self._deregister_script(keys=[self._instance_key(record.instance_id)], args=arguments), None
        )

    def view(self) -> ClusterView:
        return self._membership.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        return await self._membership.wait_for_change(timeout_s)

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        arguments: list[bytes | str | int] = [candidate_id, _milliseconds(ttl_s)]
        token = await self._unless_away(
            self._campaign_script(keys=[self._leader_key, f"{self._prefix}:fencing"], args=arguments), None
        )
        return int(cast(bytes, token)) if token else None

    async def resign(self, candidate_id: str) -> None:
        await self._unless_away(self._resign_script(keys=[self._leader_key], args=[candidate_id]), None)

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        arguments: list[bytes | str | int] = [
            str(broadcast.fencing_token),
            broadcast_to_proto(broadcast).SerializeToString(),
            self._loads_channel,
        ]
        return bool(await self._unless_away(self._broadcast_script(keys=[self._leader_key], args=arguments), 0))

    async def claim_request(self, record: RequestRecord, ttl_s: float) -> RequestRecord | None:
        return await self._unless_away(self._claim(record, _milliseconds(ttl_s)), None)

    async def update_request(self, record: RequestRecord) -> None:
        arguments: list[bytes | str | int] = [record.router_id, str(record.router_incarnation), _encode_request(record)]
        await self._unless_away(self._update_script(keys=[self._request_key(record.request_id)], args=arguments), None)

    async def close_request(self, request_id: str, router_id: str, router_incarnation: int) -> bool:
        arguments: list[bytes | str | int] = [router_id, str(router_incarnation)]
        closing = self._close_script(keys=[self._request_key(request_id)], args=arguments)
        return bool(await self._unless_away(closing, 0))

    async def requests(self) -> tuple[RequestRecord, ...]:
        return await self._unless_away(self._load_requests(), ())

    @property
    def _redis(self) -> Redis:
        assert self._client is not None, "used before being entered"
        return self._client

    @property
    def _leader_key(self) -> str:
        return f"{self._prefix}:leader"

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
        """Follows the channels for ever, and finds Redis again when it was away."""
        delay_s = _RECONNECT_MIN_S
        while not _cancellations():
            try:
                async with self._redis.pubsub() as channel:
                    if self._monitored is not None:
                        await channel.subscribe(self._loads_channel)
                    await self._hear_heartbeats(channel)
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
                silent_since_s, pings = time.monotonic(), 0
                if self._hears_heartbeats:
                    self._membership.tick()
                if message["type"] == "message":
                    self._take_in(message["data"])
                if self._hears_heartbeats and self._monitored is not None and not self._monitored.is_silent():
                    await channel.unsubscribe(self._events_channel)
                    self._hears_heartbeats = False
                # One task in many: a full socket must not keep the others from running.
                await asyncio.sleep(0)
            elif pings and time.monotonic() - silent_since_s > _LOST_AFTER_S:
                raise TimeoutError(f"silent for {_LOST_AFTER_S} s")
            else:
                # Only here, with nothing left to read: a stall of this process is not taken for the monitor's silence.
                if not self._hears_heartbeats and self._monitored is not None and self._monitored.is_silent():
                    get_logger().warning("no cluster monitor is heard; every heartbeat is followed")
                    await self._hear_heartbeats(channel)
                if not pings:
                    # Counted from the first ping, so that a stall of this process is not taken for Redis's.
                    silent_since_s = time.monotonic()
                await channel.ping()
                pings += 1

    async def _hear_heartbeats(self, channel: PubSub) -> None:
        # Subscribe before loading: a change in between is seen twice rather than never.
        await channel.subscribe(self._events_channel)
        self._hears_heartbeats = True
        async with asyncio.timeout(_LOST_AFTER_S):
            await self._load_instances()

    def _take_in(self, event: bytes) -> None:
        """Garbage is ignored: it must not end the watch."""
        kind, value = event[:1], event[1:]
        try:
            if kind == b"=":
                self._take_in_broadcast(cluster_pb2.LoadBroadcast.FromString(value))
            elif kind == b"-":
                record = cluster_pb2.InstanceStatus.FromString(value).record
                self._membership.forget(record.instance_id, record.incarnation)
            else:
                self._learn(cluster_pb2.InstanceStatus.FromString(value), None)
        except DecodeError as error:
            get_logger().warning("unreadable event ignored", error=_why(error))

    def _take_in_broadcast(self, message: cluster_pb2.LoadBroadcast) -> None:
        if self._monitored is None:
            return
        known_token = self._monitored.fencing_token
        statuses = (self._status(status) for status in message.instances)
        broadcast = LoadBroadcast(
            message.leader_id,
            message.fencing_token,
            message.sequence_number,
            tuple(status for status in statuses if status is not None),
        )
        taken = self._monitored.take_in(broadcast)
        if taken and (self._hears_heartbeats or broadcast.fencing_token != known_token):
            get_logger().info(
                "the cluster monitor's broadcasts are followed",
                leader_id=broadcast.leader_id,
                fencing_token=broadcast.fencing_token,
            )

    def _learn(self, message: cluster_pb2.InstanceStatus, remaining_s: float | None) -> None:
        status = self._status(message)
        if status is not None:
            self._membership.learn(status.record, status.load, remaining_s)

    def _status(self, message: cluster_pb2.InstanceStatus) -> InstanceStatus | None:
        """None for one of a newer version, with a role or a state unknown here: nothing that we could use."""
        known = self._membership.record_of(message.record.instance_id, message.record.incarnation)
        try:
            record = known or record_from_proto(message.record)
            return InstanceStatus(record, load_from_proto(message.load), message.heartbeat_age_s)
        except KeyError as error:
            get_logger().warning("unreadable instance status ignored", error=_why(error))
            return None

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
            if held and remaining_ms > 0:
                try:
                    self._learn(cluster_pb2.InstanceStatus.FromString(held[1]), remaining_ms / 1000)
                except DecodeError as error:
                    get_logger().warning("unreadable instance ignored", error=_why(error))

    async def _claim(self, record: RequestRecord, ttl_ms: int) -> RequestRecord | None:
        key, encoded = self._request_key(record.request_id), _encode_request(record)
        while not await self._redis.set(key, encoded, nx=True, px=ttl_ms):
            held = cast(bytes | None, await self._redis.get(key))
            if held is None:
                continue  # It ended in between.
            holder = _decode_request(held)
            arguments: list[bytes | str | int] = [held, str(holder.router_incarnation), encoded, ttl_ms]
            keys = [key, self._instance_key(holder.router_id)]
            return None if await self._take_over_script(keys=keys, args=arguments) else holder
        return None

    async def _load_requests(self) -> tuple[RequestRecord, ...]:
        keys = await self._scan(self._request_key("*"))
        values = await cast(Awaitable[list[bytes | None]], self._redis.mget(keys)) if keys else []
        return tuple(_decode_request(value) for value in values if value is not None)

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
    return json.dumps(asdict(record) | {"router_incarnation": str(record.router_incarnation)}).encode()


def _decode_request(value: bytes) -> RequestRecord:
    fields = json.loads(value)
    return RequestRecord(**fields | {"router_incarnation": int(fields["router_incarnation"])})


def _milliseconds(duration_s: float) -> int:
    # Redis refuses a time to live of 0.
    return max(1, round(duration_s * 1000))


def _shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"//.*@", "//", url).partition("?")[0]


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
