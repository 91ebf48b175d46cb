"""Asks prefill instances for holds, on behalf of decode legs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from grpc import aio

from kaveri.domain.sampling import Logprobs
from kaveri.domain.view import ClusterView
from kaveri.errors import InvalidArgument, RequestAlreadyExists, Unavailable
from kaveri.kv.transfer.ticket import Ticket
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.messages import layout_from_proto, logprobs_from_proto, ticket_to_proto
from kaveri.wire.status import error_of
from services.instance.hold_params import HoldAt
from services.prefill.holds import HeldPrompt

RESOLVE_TIMEOUT_S = 2.0
"""For the answer about a hold. A prefill instance that takes longer is slower than computing the prompt again."""
_RELEASE_TIMEOUT_S = 1.0


class HoldPeers:
    """The prefill instances that decode legs name. For one event loop."""

    def __init__(self, instance_id: str, incarnation: int, view: Callable[[], ClusterView]) -> None:
        """instance_id, incarnation: of the decode instance. view: the cluster as it knows it."""
        self._view = view
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._channels = Channels()
        self._calls: dict[str, int] = {}
        """Holds in use, by address. A channel is closed with the last one."""
        self._releases: dict[asyncio.Task[None], None] = {}

    def located(self, hold: HoldAt) -> HoldAt:
        """The hold at the address that its prefill instance has registered, where the view has that life of it.

        The cluster monitor does not broadcast instances that only prefill, so the views of decode instances often lack
        them. Then the address is the caller's, and the hold's name decides whether it is the right instance.
        """
        instance = self._view().instances.get(hold.instance_id)
        if instance is None or instance.record.incarnation != hold.name.incarnation:
            return hold
        return replace(hold, address=instance.record.address)

    @contextlib.asynccontextmanager
    async def using(self, hold: HoldAt) -> AsyncIterator["PeerHold"]:
        """Within it the hold may be asked for. Left without a push, it is released."""
        peer = PeerHold(hold, self._channels, self._instance_id, self._incarnation)
        self._calls[hold.address] = self._calls.get(hold.address, 0) + 1
        try:
            yield peer
        finally:
            # Not part of the caller's task: it must be sent although that one is cancelled.
            leaving = asyncio.create_task(self._leave(peer), name="release of a hold")
            self._releases[leaving] = None
            leaving.add_done_callback(self._releases.pop)

    async def close(self) -> None:
        """Waits for the releases that are under way, then ends all connections. Nothing is asked for afterwards."""
        while self._releases:
            await asyncio.wait([*self._releases])
        await self._channels.close()

    async def _leave(self, peer: "PeerHold") -> None:
        address = peer.hold.address
        try:
            if peer.is_held:
                await peer.release()
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]
                await self._channels.retain(self._calls)


class PeerHold:
    """One hold of a prefill instance."""

    def __init__(self, hold: HoldAt, channels: Channels, instance_id: str, incarnation: int) -> None:
        self.hold = hold
        self.is_held = True
        """Whether it may be there still."""
        self._channels = channels
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._name = prefill_pb2.HoldName(incarnation=hold.name.incarnation, hold_id=hold.name.hold_id)

    async def resolve(self, token_ids: tuple[int, ...], timeout_s: float) -> HeldPrompt:
        """Raises what the prefill instance answers, or Unavailable when it does not."""
        message = prefill_pb2.ResolveHoldRequest(hold=self._name, token_ids=token_ids)
        with self._channels.calling(PrefillServiceStub, self.hold.address) as stub:
            try:
                answer = await stub.ResolveHold(message, timeout=min(timeout_s, RESOLVE_TIMEOUT_S))
            except aio.AioRpcError as error:
                raise error_of(error, peer=self.hold.address) from error
        logprobs: Logprobs | None = logprobs_from_proto(answer.logprobs) if answer.HasField("logprobs") else None
        try:
            layout = layout_from_proto(answer.layout)
        except InvalidArgument as error:
            raise Unavailable(f"the prefill instance's answer is of no use: {error}") from error
        return HeldPrompt((answer.first_token_id, logprobs), layout, answer.expires_in_s)

    async def push(self, ticket: Ticket, timeout_s: float) -> None:
        """Returns when the KV has arrived. Raises as resolve(). Cancelled, the hold is given up."""
        message = prefill_pb2.PushHoldRequest(
            hold=self._name,
            ticket=ticket_to_proto(ticket),
            decode_instance_id=self._instance_id,
            decode_incarnation=self._incarnation,
        )
        with self._channels.calling(PrefillServiceStub, self.hold.address) as stub:
            try:
                await stub.PushHold(message, timeout=timeout_s)
            except aio.AioRpcError as error:
                known = error_of(error, peer=self.hold.address)
                if isinstance(known, RequestAlreadyExists):
                    # It is another leg's.
                    self.is_held = False
                raise known from error
        self.is_held = False

    async def release(self) -> None:
        """Frees it. What cannot be reached is left to the hold's time."""
        with self._channels.calling(PrefillServiceStub, self.hold.address) as stub:
            try:
                await stub.ReleaseHold(prefill_pb2.ReleaseHoldRequest(hold=self._name), timeout=_RELEASE_TIMEOUT_S)
            except aio.AioRpcError as error:
                reason = str(error_of(error, peer=self.hold.address))
                get_logger().warning("hold_release_failed", prefill_address=self.hold.address, reason=reason)
