"""Target of `kaveri bench`: the routers of a cluster, or any OpenAI endpoint."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from grpc import aio

from kaveri.cli.options import targets_of
from kaveri.cli.routers import cluster_view
from kaveri.client.answer import ModelInfo
from kaveri.client.async_client import AsyncClient
from kaveri.domain.view import phases_now
from kaveri.errors import ConfigError
from kaveri.extras import require_modules
from kaveri.loadgen.driver import LoadTarget
from kaveri.rpc.server import open_channel

if TYPE_CHECKING:
    from kaveri.workload.resource_time import Phases

_TIMEOUT_S = 5.0


async def reach_routers(
    target: str, model: str | None, timeout_s: float, resources: contextlib.AsyncExitStack
) -> "tuple[AsyncClient | LoadTarget, ModelInfo, dict[str, Phases]]":
    """Connect to routers. Returns a client (closed by `resources`), the served model called `model` (None: the first),
    and engine_phases() of it. Raises ConfigError if it is not served."""
    client = await resources.enter_async_context(AsyncClient(targets_of(target), timeout_s=timeout_s))
    for info in await client.list_models():
        if model in (None, info.name):
            return client, info, await engine_phases(client.target, info.name)
    raise ConfigError("--model", f"{model!r} is not served at {target}")


async def engine_phases(target: str, model: str) -> "dict[str, Phases]":
    """Return the phases (prefill, decode) that each engine instance of a model serves, by instance id. Empty if the
    router shows them to admins only. Raises InvalidArgument for a malformed API key."""
    async with open_channel(target) as channel:
        try:
            view = await cluster_view(channel, _TIMEOUT_S)
        except aio.AioRpcError:
            return {}
    return {
        name: phases_now(one) for name, one in view.instances.items() if one.record.phases and one.record.model == model
    }


async def reach_endpoint(
    url: str, model: str | None, resources: contextlib.AsyncExitStack
) -> "tuple[AsyncClient | LoadTarget, ModelInfo, dict[str, Phases]]":
    """Connect to an OpenAI endpoint. Returns a client (closed by `resources`), the served model called `model` (None:
    the first), and no phases. Raises ConfigError if it is not served."""
    require_modules("--http", "gateway", "httpx2")
    from kaveri.loadgen.http_endpoint import HttpEndpoint

    endpoint = await resources.enter_async_context(HttpEndpoint(url, os.environ.get("OPENAI_API_KEY", "")))
    served = await endpoint.models()
    if not served or model not in (None, *served):
        raise ConfigError(
            "--model", f"{model!r} is not served at {endpoint.url}; there is {', '.join(served) or 'none'}"
        )
    name = model or next(iter(served))
    info = ModelInfo(
        name=name,
        # If unknown, the endpoint itself refuses requests that are too long.
        max_model_len=served[name] or sys.maxsize,
        vocab_size=sys.maxsize,
        has_chat_template=True,
        ready=True,
    )
    return endpoint, info, {}
