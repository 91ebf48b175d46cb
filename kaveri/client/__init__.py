"""The Python SDK: AsyncClient is the implementation, Client a facade."""

import os

# gRPC reads this when it is imported. Its fork handlers crash one of three children that are forked while a client is
# connected, even children that do not use it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from kaveri.client.answer import Chunk, Completion, ModelInfo, PromptToken, ServerTiming, Timing, Usage
from kaveri.client.async_client import AsyncClient
from kaveri.client.async_stream import AsyncStream
from kaveri.client.request import Message
from kaveri.client.sync_client import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "Message",
    "ModelInfo",
    "PromptToken",
    "ServerTiming",
    "Stream",
    "Timing",
    "Usage",
]
