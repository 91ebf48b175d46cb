"""Pushes copies on to instances that have room to run their requests.

A request resumes where its copy is. When its holder has no room, only the copy has to move: to the store of an instance
that has some. Once, since room that a heartbeat shows may be taken by then.
"""

import asyncio
import contextlib
import itertools
import random
from dataclasses import replace

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.replica import ReplicaLocation, ReplicaOffer
from kaveri.domain.view import InstanceRecord
from kaveri.errors import KaveriError, NoCapacity
from kaveri.kv.replicas.store import ReplicaKey, ReplicaStore
from kaveri.policy.replication import ReplicationMode, choose_holder, copy_bytes, has_room_to_run
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import decode_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.wire.attempts import ownership_to_proto
from kaveri.wire.messages import ticket_from_proto
from kaveri.wire.replicas import offer_to_proto
from kaveri.wire.status import error_of

_TIMEOUT_S = 1.5
"""For all of it: the router waits 2 s for the answer to its Resume."""
_FIRST_NUMBER = 1 << 31
"""Of copies that are pushed on. A late word of the request's former owner about a copy of its own, numbered from 1 on,
must not be taken as one about these."""
_RETRY_AFTER_S = 0.5
_MOST_AT_ONCE = 8
"""They share the way out of this instance. What more would come too late is computed again at once."""


class ReplicaForwarder:
    """Of one holder. For one event loop."""

    def __init__(self, replicas: ReplicaStore, store: ClusterStore, own: InstanceRecord, rng: random.Random) -> None:
        """replicas: where the copies are. own: this instance; its address is not read."""
        self._replicas = replicas
        self._store = store
        self._own = own
        self._rng = rng
        self._bytes: UnconfirmedWork[str] = UnconfirmedWork()
        self._blocks: UnconfirmedWork[str] = UnconfirmedWork()
        self._channels = Channels()
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._pushing_count = 0
        self._errands: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends its connections."""
        if self._errands:
            await asyncio.wait(self._errands)
        await self._channels.close()

    async def push_on(self, key: ReplicaKey, offer: ReplicaOffer, context_tokens: int) -> ReplicaLocation:
        """Pushes a copy to an instance with room for it and to run its request. Returns where it is.

        offer: of the copy's owner. context_tokens: of the request. Raises NoCapacity when there is none, or it does
        not take the copy. The copy here stays as it is.
        """
        token_count = self._replicas.watermark(key)
        if self._pushing_count >= _MOST_AT_ONCE:
            raise NoCapacity("decode", _RETRY_AFTER_S, f"{_MOST_AT_ONCE} copies are being pushed on")
        layout, view = self._replicas.layout, self._store.view()
        needed_bytes, needed_blocks = copy_bytes(layout, token_count), layout.block_count(context_tokens + 1)
        self._bytes.retain(view)
        self._blocks.retain(view)
        await self._channels.retain({instance.record.address for instance in view.instances.values()})
        target = choose_holder(
            ReplicationMode.SPREAD,
            view,
            self._own,
            needed_bytes,
            self._bytes,
            self._rng,
            is_fit=lambda instance: has_room_to_run(instance, needed_blocks, self._blocks),
        )
        if target is None or not token_count:
            raise NoCapacity("decode", _RETRY_AFTER_S, "neither this holder nor another instance has room")
        self._bytes.add(key.request_id, target, needed_bytes)
        self._blocks.add(key.request_id, target, needed_blocks)
        self._pushing_count += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                incarnation = await self._push(key, offer, target.record, token_count)
        except (KaveriError, TimeoutError) as error:
            # Never what the other one says: an error about the copy's owner is none about the one that resumes.
            why = "it took too long" if isinstance(error, TimeoutError) else str(error)
            reason = f"{target.record.instance_id} has not taken the copy: {why}"
            raise NoCapacity("decode", _RETRY_AFTER_S, reason) from error
        finally:
            self._pushing_count -= 1
        get_logger().info(
            "replica_pushed_on",
            request_id=key.request_id,
            attempt=key.attempt,
            session=key.session,
            holder_id=target.record.instance_id,
            tokens=token_count,
        )
        return ReplicaLocation(target.record.instance_id, incarnation, token_count)

    async def _push(self, key: ReplicaKey, offer: ReplicaOffer, target: InstanceRecord, token_count: int) -> int:
        """Returns the life of the target that has it."""
        number = next(self._numbers)
        offered = replace(
            offer,
            owner_id=self._own.instance_id,
            owner_incarnation=self._own.incarnation,
            layout=self._replicas.layout,
            token_count=token_count,
            number=number,
        )
        try:
            with self._channels.calling(DecodeServiceStub, target.address) as stub:
                response = await stub.OpenReplica(offer_to_proto(offered), timeout=_TIMEOUT_S)
                try:
                    await asyncio.wrap_future(self._replicas.push_on(key, ticket_from_proto(response.ticket)))
                except (KaveriError, asyncio.CancelledError):
                    name = ownership_to_proto(key.request_id, offer.ownership)
                    # That copy, and no request of this owner there.
                    name.replica = number
                    errand = asyncio.create_task(self._close(target.address, name))
                    self._errands.add(errand)
                    errand.add_done_callback(self._errands.discard)
                    raise
        except aio.AioRpcError as error:
            raise error_of(error, peer=target.address, request_id=key.request_id) from error
        incarnation: int = response.incarnation
        return incarnation

    async def _close(self, address: str, name: decode_pb2.AttemptId) -> None:
        with self._channels.calling(DecodeServiceStub, address) as stub, contextlib.suppress(aio.AioRpcError):
            await stub.Abort(decode_pb2.AbortRequest(attempts=[name]), timeout=_TIMEOUT_S)
