"""Kaveri serves large language models with prefill and decode on separate instances. This is its Python SDK.

    from kaveri import Client, SamplingParams

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Count from 1 to 9.", params=SamplingParams(temperature=0)).text)

Importing it loads gRPC, and neither a service nor torch nor transformers.
"""

from kaveri.client import (
    AsyncClient,
    AsyncStream,
    Chunk,
    Client,
    Completion,
    Message,
    ModelInfo,
    PromptToken,
    ServerTiming,
    Stream,
    Timing,
    Usage,
)
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
from kaveri.security.tls_files import TlsFiles

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "EngineError",
    "FinishReason",
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
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
