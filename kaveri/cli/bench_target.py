"""The target of `kaveri bench`: the routers of a cluster, or any OpenAI endpoint."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from kaveri.cli import options
from kaveri.client.answer import ModelInfo
from kaveri.client.async_client import AsyncClient
from kaveri.errors import ConfigError
from kaveri.extras import require_modules
from kaveri.loadgen.driver import LoadTarget
from kaveri.loadgen.fleet import engine_phases

if TYPE_CHECKING:
    from kaveri.loadgen.busy import Phases


async def reach_routers(
    target: str, model: str | None, timeout_s: float, resources: contextlib.AsyncExitStack
) -> "tuple[AsyncClient | LoadTarget, ModelInfo, dict[str, Phases]]":
    """Return a client of the routers, their model, and the phases of its instances. Raises ConfigError."""
    client = await resources.enter_async_context(AsyncClient(options.targets_of(target), timeout_s=timeout_s))
    for info in await client.list_models():
        if model in (None, info.name):
            return client, info, await engine_phases(client.target, info.name)
    raise ConfigError("--model", f"{model!r} is not served at {target}")


async def reach_endpoint(
    url: str, model: str | None, resources: contextlib.AsyncExitStack
) -> "tuple[AsyncClient | LoadTarget, ModelInfo, dict[str, Phases]]":
    """Return a client of the endpoint, and the first model that it serves. Raises ConfigError."""
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
        # Where it does not say how long requests may be, the endpoint refuses those that are too long.
        max_model_len=served[name] or sys.maxsize,
        vocab_size=sys.maxsize,
        has_chat_template=True,
        ready=True,
    )
    return endpoint, info, {}
