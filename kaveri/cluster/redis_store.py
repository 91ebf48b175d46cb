"""ClusterStore in Redis (6.2 or newer).

Names begin with `kaveri:<cluster name>:<database>`; channels need the database since they are global in Redis:

    ...:instance:<id>   "<registration>:<incarnation>:<InstanceStatus>", expires with the lease
    ...:instances       set of instance ids; the next process that loads it removes those whose lease has ended
    ...:request:<id>    "<router incarnation>:<session>:<hash of the secret>:<router id>\\n<hint>" of the claim;
                        expires with the request
    ...:leader          "<fencing token>:<lease in ms>:<candidate>" of the cluster monitor, expires with that lease
    ...:counters        hash: the counters of registrations and fencing tokens
    ...:events          channel: "+<InstanceStatus>" per heartbeat, "-<InstanceStatus>" per deregistration
    ...:loads           channel: "=<LoadBroadcast>" of the leader, "-<InstanceStatus>" per deregistration

A heartbeat is one Lua script that renews the lease and publishes the load. A registration, "<state>.<number>", orders
the incarnations (process runs) of one instance id. Order depends on counters, never on Redis's clock, which may go
back. When Redis has lost its state, processes supply the greatest fencing token they know; registrations of a former
state are recognized by its name.

Redis counts as lost while its Pub/Sub connection is silent, or while it refuses heartbeats (a replica, or a Redis
without memory). The last view stays in use until neither is the case.
"""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from kaveri.cluster import redis_scripts as scripts
from kaveri.cluster.membership import MAX_TICK_S, Membership
from kaveri.cluster.metrics import REFUSED_HEARTBEATS
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.cluster.redis_batches import CommandBatches, closed_as_lost
from kaveri.cluster.redis_connection import ANSWER_TIMEOUT_S, FIRST_ANSWER_TIMEOUT_S, bad_url, connect, why
from kaveri.cluster.redis_permissions import RedisNeeds, store_needs
from kaveri.cluster.store import DEFAULT_CLUSTER, HeartbeatAnswer, RequestClaim, ViewSource
from kaveri.config.redis_url import database_of, shown
from kaveri.domain.view import WIRE, ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, LoadBroadcast
from kaveri.errors import ConfigError, InvalidArgument
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import cluster_pb2
from kaveri.wire.messages import broadcast_to_proto, record_from_proto, status_from_proto, status_to_proto

ResultT = TypeVar("ResultT")

_START_TIMEOUT_S = 15.0
_RECONNECT_MIN_S = 0.02
# With the connect timeout this stays under the default lease, so everyone is back within one lease of Redis's return.
_RECONNECT_MAX_S = 0.25
_PING_AFTER_S = MAX_TICK_S
"""Silence after which Redis is sent a ping; the leases' clock must advance this often."""
_LOST_AFTER_S = 1.0
_REPORT_AGAIN_S = 60.0
_BATCH_COUNT = 500

_REFUSALS = (ResponseError, AuthenticationError)
"""Errors with which Redis refuses a command: OOM, READONLY, MISCONF, NOAUTH and others."""


@dataclass(frozen=True, slots=True)
class _Place:
    url: str
    cluster_name: str
    wait_s: float
    also_needs: RedisNeeds


@dataclass(frozen=True, slots=True)
class _Connection:
    client: Redis
    commands: CommandBatches
    watching: asyncio.Task[None]


class RedisStore:
    def __init__(
        self,
        url: str,
        cluster_name: str = DEFAULT_CLUSTER,
        follow: ViewSource = ViewSource.HEARTBEATS,
        *,
        wait_s: float = FIRST_ANSWER_TIMEOUT_S,
        also_needs: RedisNeeds = RedisNeeds(frozenset(), ()),  # noqa: B008 - frozen
    ) -> None:
        """url: redis://[[user]:password@]host:port/db, rediss://... or unix://path?db=..., or with valkey:// and
        valkeys://. Each cluster name and database is a separate cluster. wait_s: max seconds to wait for Redis in
        __aenter__(). also_needs: permissions for other uses of Redis, checked then too."""
        self._place = _Place(url, cluster_name, wait_s, also_needs)
        self._prefix = ""
        kind = MonitoredMembership if follow is ViewSource.BROADCASTS else Membership
        self._membership = kind(time.monotonic)
        self._hears_heartbeats = True
        self._is_heard = True
        self._refusal = ""
        """Why the last heartbeat was refused; empty if it was accepted."""
        self._reported_s: dict[str, float] = {}
        """Time of the last log line per reason of a failure."""
        self._registrations: dict[tuple[str, int], bytes] = {}
        self._campaigns_token = 0
        self._connection: _Connection | None = None

    async def __aenter__(self) -> Self:
        place = self._place
        try:
            self._prefix = f"kaveri:{place.cluster_name}:{database_of(place.url)}"
        except ValueError as error:
            raise bad_url(place.url, error) from None
        client = await connect(place.url, store_needs(self._prefix) | place.also_needs, place.wait_s)
        loaded = asyncio.Event()
        watching = asyncio.create_task(self._watch(loaded), name="redis store: watch")
        commands = CommandBatches(client.connection_pool, ANSWER_TIMEOUT_S)
        self._connection = _Connection(client, commands, watching)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await loaded.wait()
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise ConfigError("--redis-url", f"Redis at {shown(place.url)} went away at the start") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._opened
        connection.watching.cancel()
        await asyncio.gather(connection.watching, return_exceptions=True)
        await connection.commands.close()
        await connection.client.aclose(close_connection_pool=True)

    async def heartbeat(self, record: InstanceRecord, load: InstanceLoad) -> HeartbeatAnswer:
        life = (record.instance_id, record.incarnation)
        keys = [self._instance_key(record.instance_id), self._key("instances"), self._key("counters")]
        arguments: list[bytes | str | int] = [
            self._registrations.get(life, b""),
            str(record.incarnation),
            record.instance_id,
            status_to_proto(InstanceStatus(record, load)).SerializeToString(),
            _milliseconds(record.lease_ttl_s),
            self._key("events"),
            secrets.token_hex(8),
            self._greatest_token,
        ]
        try:
            # Sent even while heartbeats are refused, to notice when that ends.
            answer = await self._unless_away(self._run(scripts.HEARTBEAT, keys=keys, args=arguments), None)
        except _REFUSALS as error:
            self._take_in_refusal(why(error))
            return HeartbeatAnswer()
        if answer is None:
            return HeartbeatAnswer()
        self._take_in_refusal("")
        registration, other = cast(list[bytes], answer)
        if registration:
            self._registrations[life] = registration
        return HeartbeatAnswer(holds=bool(registration), other=_record_in(other))

    async def deregister(self, record: InstanceRecord) -> None:
        self._registrations.pop((record.instance_id, record.incarnation), None)
        keys = [self._instance_key(record.instance_id), self._key("instances")]
        arguments: list[bytes | str | int] = [
            str(record.incarnation),
            record.instance_id,
            status_to_proto(InstanceStatus(record, InstanceLoad())).SerializeToString(),
            self._key("events"),
            self._key("loads"),
        ]
        await self._unless_lost(self._run(scripts.DEREGISTER, keys=keys, args=arguments), None)

    def view(self) -> ClusterView:
        return self._membership.view()

    async def wait_for_change(self, timeout_s: float) -> ClusterView:
        return await self._membership.wait_for_change(timeout_s)

    async def campaign(self, candidate_id: str, ttl_s: float) -> int | None:
        arguments: list[bytes | str | int] = [candidate_id, _milliseconds(ttl_s), self._greatest_token]
        campaigning = self._run(scripts.CAMPAIGN, keys=[self._key("leader"), self._key("counters")], args=arguments)
        answer = await self._unless_lost(campaigning, None)
        if answer is None:
            return None
        token, self._campaigns_token = map(int, cast(list[bytes], answer))
        return token or None

    async def resign(self, candidate_id: str) -> None:
        await self._unless_lost(self._run(scripts.RESIGN, keys=[self._key("leader")], args=[candidate_id]), None)

    async def broadcast(self, broadcast: LoadBroadcast) -> bool:
        arguments: list[bytes | str | int] = [
            str(broadcast.fencing_token),
            broadcast_to_proto(broadcast).SerializeToString(),
            self._key("loads"),
        ]
        return bool(
            await self._unless_lost(self._run(scripts.BROADCAST, keys=[self._key("leader")], args=arguments), 0)
        )

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        return await self._unless_lost(self._claim(claim, _milliseconds(ttl_s)), None)

    async def find_request(self, request_id: str) -> RequestClaim | None:
        held = await self._unless_lost(self._opened.client.get(self._key(f"request:{request_id}")), None)
        return None if held is None else _decode_claim(request_id, cast(bytes, held))

    async def update_requests(self, claims: Sequence[RequestClaim]) -> None:
        keys = [self._key(f"request:{claim.request_id}") for claim in claims]
        values = [_encode_claim(claim) for claim in claims]
        await self._unless_lost(
            self._opened.commands.execute("EVAL", scripts.UPDATE_REQUESTS, len(keys), *keys, *values), None
        )

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        keys = [self._key(f"request:{claim.request_id}") for claim in claims]
        values = [_encode_claim(claim) for claim in claims]
        closing = self._opened.commands.execute("EVAL", scripts.CLOSE_REQUESTS, len(keys), *keys, *values)
        return bool(await self._unless_lost(closing, 0))

    @property
    def _opened(self) -> _Connection:
        assert self._connection is not None, "used before being entered"
        return self._connection

    @property
    def _monitored(self) -> MonitoredMembership | None:
        return self._membership if isinstance(self._membership, MonitoredMembership) else None

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[bytes | str | int]) -> Any:
        return await self._opened.client.register_script(script)(keys=keys, args=args)

    @property
    def _greatest_token(self) -> int:
        return max(self._campaigns_token, self._monitored.fencing_token if self._monitored is not None else 0)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _instance_key(self, instance_id: str) -> str:
        return self._key(f"instance:{instance_id}")

    async def _unless_lost(self, command: Awaitable[ResultT], otherwise: ResultT) -> ResultT:
        """Await a command; return `otherwise` if Redis is unreachable, refuses it, or refused the last heartbeat."""
        if self._refusal:
            _drop(command)
            return otherwise
        try:
            return await self._unless_away(command, otherwise)
        except _REFUSALS as error:
            self._report_failure(why(error))
            return otherwise

    async def _unless_away(self, command: Awaitable[ResultT], otherwise: ResultT) -> ResultT:
        """Await a command; return `otherwise` if Redis is unreachable. Raises _REFUSALS."""
        if not self._is_heard:
            _drop(command)
            return otherwise
        cancellations = _cancellations()
        try:
            with closed_as_lost():
                return await command
        except _REFUSALS:
            raise
        except (RedisError, OSError) as error:
            self._report_failure(why(error))
            return otherwise
        finally:
            if _cancellations() > cancellations:
                raise asyncio.CancelledError

    def _report_failure(self, reason: str) -> None:
        now_s = time.monotonic()
        self._reported_s = {each: at_s for each, at_s in self._reported_s.items() if now_s - at_s < _REPORT_AGAIN_S}
        if reason not in self._reported_s:
            self._reported_s[reason] = now_s
            get_logger().warning("redis_command_failed", error=reason)

    def _take_in_refusal(self, reason: str) -> None:
        """Record the outcome of a heartbeat. reason: of a refusal by Redis; empty: accepted."""
        if reason:
            REFUSED_HEARTBEATS.inc()
        if reason and not self._refusal:
            get_logger().error(
                "heartbeats_refused",
                error=reason,
                url=shown(self._place.url),
                effect="the last view stays in use, and nothing is entered into Redis",
            )
        if self._refusal and not reason:
            get_logger().info("heartbeats_accepted", url=shown(self._place.url))
        self._refusal = reason
        self._tell_membership()

    def _tell_membership(self) -> None:
        if self._is_heard and not self._refusal:
            self._membership.store_returned()
        else:
            self._membership.store_lost()

    async def _watch(self, loaded: asyncio.Event) -> None:
        """Follow the Pub/Sub channels until cancelled, and reconnect after a loss. loaded: set after the first load."""
        delay_s, lost_for = _RECONNECT_MIN_S, ""
        while not _cancellations():
            try:
                with closed_as_lost():
                    async with self._opened.client.pubsub() as channel:
                        if self._monitored is not None:
                            await self._subscribe(channel, "loads")
                        await self._hear_heartbeats(channel)
                        if not self._is_heard:
                            get_logger().info("redis_returned", url=shown(self._place.url))
                        self._is_heard = True
                        self._tell_membership()
                        loaded.set()
                        delay_s = _RECONNECT_MIN_S
                        await self._follow(channel)
            except (RedisError, OSError) as error:
                # After a permission is revoked, Redis first closes the connection, then refuses the next one.
                if self._is_heard or (isinstance(error, ResponseError) and why(error) != lost_for):
                    get_logger().warning("redis_lost", error=why(error), effect="the last view stays in use")
                self._is_heard, lost_for = False, why(error)
                self._tell_membership()
            except Exception:  # Without events, a stale view would look like a healthy one.
                get_logger().exception("redis_watch_failed")
                self._is_heard = False
                self._tell_membership()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _RECONNECT_MAX_S)

    async def _follow(self, channel: PubSub) -> None:
        """Process Pub/Sub messages until cancelled. Raises RedisError or OSError when Redis is lost."""
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
                    await channel.unsubscribe(self._key("events"))
                    self._hears_heartbeats = False
                # Yield: a full socket must not starve other tasks.
                await asyncio.sleep(0)
            elif pings and time.monotonic() - silent_since_s > _LOST_AFTER_S:
                raise TimeoutError(f"silent for {_LOST_AFTER_S} s")
            else:
                # Only with nothing left to read, so that a stall of this process does not count as the monitor's
                # silence.
                if not self._hears_heartbeats and self._monitored is not None and self._monitored.is_silent():
                    get_logger().warning("monitor_lost", effect="every heartbeat is followed")
                    await self._hear_heartbeats(channel)
                if not pings:
                    # Measured from the first ping, so that a stall of this process does not count as Redis's.
                    silent_since_s = time.monotonic()
                await channel.ping()
                pings += 1

    async def _hear_heartbeats(self, channel: PubSub) -> None:
        # Subscribe before loading: a change in between is seen twice instead of never.
        await self._subscribe(channel, "events")
        self._hears_heartbeats = True
        await self._load_instances()

    async def _subscribe(self, channel: PubSub, name: str) -> None:
        await channel.subscribe(self._key(name))
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not _cancellations():
                message = await channel.get_message(timeout=ANSWER_TIMEOUT_S)
                if message is not None and message["type"] == "message":
                    self._take_in(message["data"])
                elif message is not None and message["type"] == "subscribe":
                    return

    def _take_in(self, event: bytes) -> None:
        """Process a Pub/Sub message. Invalid ones are logged and ignored."""
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
            get_logger().warning("redis_event_ignored", error=why(error))

    def _take_in_broadcast(self, message: cluster_pb2.LoadBroadcast) -> None:
        if self._monitored is None or message.wire != WIRE:
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
            get_logger().info("monitor_followed", leader_id=broadcast.leader_id, fencing_token=broadcast.fencing_token)

    def _learn(self, message: cluster_pb2.InstanceStatus, remaining_s: float | None) -> None:
        status = self._status(message)
        if status is None:
            return
        record = status.record
        is_new = self._membership.record_of(record.instance_id, record.incarnation) is None
        self._membership.learn(record, status.load, remaining_s)
        if is_new and record.instance_id in self._membership.view().incompatible:
            get_logger().warning(
                "instance_ignored",
                ignored_id=record.instance_id,
                version=record.version,
                effect="it speaks other contracts: all processes of a cluster must be of one version",
            )

    def _status(self, message: cluster_pb2.InstanceStatus) -> InstanceStatus | None:
        """Parse a status; None, with a log line, if it is corrupt or has a role or state unknown to this version."""
        known = self._membership.record_of(message.record.instance_id, message.record.incarnation)
        try:
            return status_from_proto(message, known)
        except (KeyError, InvalidArgument) as error:
            get_logger().warning("instance_status_ignored", error=why(error))
            return None

    async def _load_instances(self) -> None:
        members = await cast(Awaitable[set[bytes]], self._opened.client.smembers(self._key("instances")))
        instance_ids = [name.decode(errors="replace") for name in members]
        for start in range(0, len(instance_ids), _BATCH_COUNT):
            await self._load_batch(instance_ids[start : start + _BATCH_COUNT])

    async def _load_batch(self, instance_ids: list[str]) -> None:
        pipeline = self._opened.client.pipeline(transaction=False)
        for instance_id in instance_ids:
            pipeline.get(self._instance_key(instance_id))
            pipeline.pttl(self._instance_key(instance_id))
        answers = await pipeline.execute()
        ended = []
        for instance_id, value, remaining_ms in zip(instance_ids, answers[::2], answers[1::2], strict=True):
            if value is None:
                ended.append(instance_id)
            # A value without a registration, or without a time to live, has just ended or is not ours.
            held = re.fullmatch(rb"[0-9a-f]+\.\d+:\d+:(.*)", value or b"", re.DOTALL)
            if held and remaining_ms > 0:
                try:
                    self._learn(cluster_pb2.InstanceStatus.FromString(held[1]), remaining_ms / 1000)
                except DecodeError as error:
                    get_logger().warning("instance_record_ignored", error=why(error))
        if ended:
            keys = [self._key("instances"), *map(self._instance_key, ended)]
            # A Redis that refuses writes keeps them until the next process loads them.
            with contextlib.suppress(ResponseError):
                await self._run(scripts.FORGET_ENDED, keys=keys, args=ended)

    async def _claim(self, claim: RequestClaim, ttl_ms: int) -> RequestClaim | None:
        key = self._key(f"request:{claim.request_id}")
        while not await self._opened.commands.execute("SET", key, _encode_claim(claim), "NX", "PX", ttl_ms):
            held = cast(bytes | None, await self._opened.client.get(key))
            if held is None:
                continue
            holder = _decode_claim(claim.request_id, held)
            is_later = claim.is_later_session_of(holder)
            ending_life = "none" if is_later else str(holder.router_incarnation)
            value = _encode_claim(replace(claim, hint=holder.hint) if is_later else claim)
            arguments: list[bytes | str | int] = [held, ending_life, value, ttl_ms]
            keys = [key, self._instance_key(holder.router_id)]
            if await self._run(scripts.TAKE_OVER_REQUEST, keys=keys, args=arguments):
                return None
            # A later session fails only if the claim changed in between, even by a hint.
            if not is_later:
                return holder
        return None


def _cancellations() -> int:
    """Return the number of cancellations requested of this task. Needed because redis-py's asyncio.wait_for() may, up
    to Python 3.11, lose a cancellation that arrives together with its result (cpython issue 86296)."""
    task = asyncio.current_task()
    assert task is not None, "outside of a task"
    return task.cancelling()


def _encode_claim(claim: RequestClaim) -> bytes:
    """Encode a claim, with the hint last: Lua scripts compare the part before it."""
    holder = f"{claim.router_incarnation}:{claim.session}:{claim.secret_hash}:{claim.router_id}"
    return f"{holder}\n{claim.hint.hex()}".encode()


def _decode_claim(request_id: str, value: bytes) -> RequestClaim:
    holder, _, hint = value.decode().rpartition("\n")
    incarnation, session, secret_hash, router_id = holder.split(":", 3)
    return RequestClaim(request_id, router_id, int(incarnation), int(session), secret_hash, bytes.fromhex(hint))


def _milliseconds(duration_s: float) -> int:
    # Redis rejects a time to live of 0.
    return max(1, round(duration_s * 1000))


def _record_in(status: bytes) -> InstanceRecord | None:
    try:
        return record_from_proto(cluster_pb2.InstanceStatus.FromString(status).record) if status else None
    except (DecodeError, KeyError, InvalidArgument):
        return None


def _drop(command: Awaitable[object]) -> None:
    if asyncio.iscoroutine(command):
        command.close()
