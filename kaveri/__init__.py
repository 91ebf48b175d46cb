"""Python SDK of Kaveri, which serves large language models with prefill and decode on separate instances.

    from kaveri import Client, SamplingParams

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Count from 1 to 9.", params=SamplingParams(temperature=0)).text)

Names are imported on first use, which loads gRPC, but neither services nor torch nor transformers.
"""

import os
from typing import TYPE_CHECKING, Any

# gRPC reads this when it is imported. Its fork handlers crash one of three children that are forked while a client is
# connected, even children that do not use it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC 1.85's event engine wakes two more threads for each message that arrives: a third more CPU time of a client.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

if TYPE_CHECKING:
    __version__: str

    from kaveri.client.answer import AnswerCut, Chunk, Completion, ModelInfo, PromptToken, ServerTiming, Timing, Usage
    from kaveri.client.async_client import AsyncClient, AsyncStream
    from kaveri.client.request import ChatOptions, Message
    from kaveri.client.sync_client import Client, Stream
    from kaveri.domain.grammar import Grammar
    from kaveri.domain.sampling import FinishReason, Logprobs, SamplingParams
    from kaveri.errors import (
        ConfigError,
        DeadlineExceeded,
        EngineError,
        InternalError,
        InvalidArgument,
        KaveriError,
        ModelNotFound,
        NoCapacity,
        RequestAlreadyExists,
        RequestCancelled,
        Unauthenticated,
        Unavailable,
    )
    from kaveri.parsers.parts import ToolCall
    from kaveri.security.tls_files import TlsFiles

__all__ = [
    "AnswerCut",
    "AsyncClient",
    "AsyncStream",
    "ChatOptions",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "EngineError",
    "FinishReason",
    "Grammar",
    "InternalError",
    "InvalidArgument",
    "KaveriError",
    "Logprobs",
    "Message",
    "ModelInfo",
    "ModelNotFound",
    "NoCapacity",
    "PromptToken",
    "RequestAlreadyExists",
    "RequestCancelled",
    "SamplingParams",
    "ServerTiming",
    "Stream",
    "Timing",
    "TlsFiles",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]

_ANSWERS = ("AnswerCut", "Chunk", "Completion", "ModelInfo", "PromptToken", "ServerTiming", "Timing", "Usage")
_MODULES = {
    **dict.fromkeys(__all__, "kaveri.errors"),
    **dict.fromkeys(_ANSWERS, "kaveri.client.answer"),
    **dict.fromkeys(("Client", "Stream"), "kaveri.client.sync_client"),
    "Grammar": "kaveri.domain.grammar",
    "ToolCall": "kaveri.parsers.parts",
    **dict.fromkeys(("FinishReason", "Logprobs", "SamplingParams"), "kaveri.domain.sampling"),
    "AsyncClient": "kaveri.client.async_client",
    "AsyncStream": "kaveri.client.async_client",
    "ChatOptions": "kaveri.client.request",
    "Message": "kaveri.client.request",
    "TlsFiles": "kaveri.security.tls_files",
}
"""Public name to the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562). Raises AttributeError for any other name."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("kaveri")
    elif name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'kaveri' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
