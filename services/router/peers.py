"""The other routers of the cluster: their addresses, and cancelling requests that they serve."""

import asyncio
import time
from collections.abc import Iterable

from grpc import aio

from kaveri.domain.view import ClusterView, InstanceState, Role, ViewedInstance, once_per_view
from kaveri.rpc.channels import Channels
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import inference_pb2
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub
from services.router.config import RouterConfig

_MOST_ADDRESSES = 16


def router_addresses(view: ClusterView, model: str, *, without: str = "", public: bool = False) -> list[str]:
    """Addresses of at most 16 routers that accept requests for the model. without: a router's id to leave out. public:
    their addresses for clients with API keys."""
    found = (
        status.record.public_address if public else status.record.address
        for status in _ready_routers(view)
        if status.record.model == model and status.record.instance_id != without
    )
    return list(dict.fromkeys(address for address in found if address))[:_MOST_ADDRESSES]


def has_another_router(view: ClusterView, config: RouterConfig, since_s: float) -> bool:
    """True if another router for the same model has reported READY since `since_s`, a time.monotonic()."""
    now_s = time.monotonic()
    return any(
        status.record.model == config.model_name and now_s - status.heartbeat_age_s >= since_s
        for status in _ready_routers(view)
        if status.record.instance_id != config.instance_id
    )


async def cancel_elsewhere(
    request_id: str, view: ClusterView, config: RouterConfig, channels: Channels
) -> tuple[bool, set[tuple[str, int]]]:
    """Cancel a request at all other routers. Returns True if one has it, and (id, incarnation) of those without."""
    records = [
        status.record
        for status in view.instances.values()
        if status.record.role is Role.ROUTER and status.record.instance_id != config.instance_id
    ]
    message = inference_pb2.CancelRequest(request_id=request_id, forwarded=True)

    async def cancel_at(address: str) -> bool | None:
        try:
            response = await channels.stub(InferenceServiceStub, address).Cancel(message, timeout=CALL_TIMEOUT_S)
        except aio.AioRpcError:
            return None
        return response.found

    answers = await asyncio.gather(*(cancel_at(record.address) for record in records))
    answered = zip(records, answers, strict=True)
    return any(answers), {(record.instance_id, record.incarnation) for record, found in answered if found is False}


@once_per_view
def _ready_routers(view: ClusterView) -> Iterable[ViewedInstance]:
    routers = (status for status in view.instances.values() if status.record.role is Role.ROUTER)
    return tuple(status for status in routers if status.load.state is InstanceState.READY)
