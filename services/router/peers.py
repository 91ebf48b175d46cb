"""The other routers of the cluster: their addresses, and cancelling requests that they serve."""

import asyncio
import time
from collections.abc import Iterator

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.view import ClusterView, InstanceState, Role, ViewedInstance, once_per_view
from kaveri.rpc.channels import Channels
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import inference_pb2
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub

_MOST_ADDRESSES = 16
"""Max addresses named to clients."""


class RouterPeers:
    """The other routers. Not thread-safe; does not own its channels."""

    def __init__(self, store: ClusterStore, channels: Channels, instance_id: str, model: str) -> None:
        self._store = store
        self._channels = channels
        self._instance_id = instance_id
        self._model = model

    def addresses(self, *, includes_own: bool = True, public: bool = False) -> list[str]:
        """Addresses of routers that take requests for the model. public: those for clients with API keys."""
        routers = _routers(self._store.view()) if includes_own else self._others()
        records = (status.record for status in routers if self._takes_requests(status))
        found = (record.public_address if public else record.address for record in records)
        return list(dict.fromkeys(address for address in found if address))[:_MOST_ADDRESSES]

    def has_another(self, since_s: float) -> bool:
        """True if another router has reported since then that it takes requests. since_s: a time.monotonic()."""
        now_s = time.monotonic()
        return any(
            self._takes_requests(status) and now_s - status.heartbeat_age_s >= since_s for status in self._others()
        )

    async def cancel(self, request_id: str) -> tuple[bool, set[tuple[str, int]]]:
        """Cancel a request at the other routers. Returns True if one has it, and the routers (id and incarnation) that
        answered that they do not."""
        records = [status.record for status in self._others()]
        answers = await asyncio.gather(*(self._cancel_at(record.address, request_id) for record in records))
        answered = zip(records, answers, strict=True)
        without_it = {(record.instance_id, record.incarnation) for record, found in answered if found is False}
        return any(answers), without_it

    def _others(self) -> Iterator[ViewedInstance]:
        routers = _routers(self._store.view())
        return (status for status in routers if status.record.instance_id != self._instance_id)

    def _takes_requests(self, status: ViewedInstance) -> bool:
        return status.record.model == self._model and status.load.state is InstanceState.READY

    async def _cancel_at(self, address: str, request_id: str) -> bool | None:
        """True if the router has the request; None: no answer."""
        message = inference_pb2.CancelRequest(request_id=request_id, forwarded=True)
        try:
            return (
                await self._channels.stub(InferenceServiceStub, address).Cancel(message, timeout=CALL_TIMEOUT_S)
            ).found
        except aio.AioRpcError:
            return None


@once_per_view
def _routers(view: ClusterView) -> tuple[ViewedInstance, ...]:
    return tuple(status for status in view.instances.values() if status.record.role is Role.ROUTER)
