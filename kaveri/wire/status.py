"""Converts Kaveri's errors to gRPC statuses and back. A status carries google.rpc details for clients in any language:
BadRequest for a field, RetryInfo for a delay, and an ErrorInfo of domain "kaveri" whose metadata rebuilds the error."""

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from kaveri.domain.sampling import ALL_RULED_OUT
from kaveri.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroke,
    EngineError,
    InternalError,
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
    RequestCancelled,
    RequestNotFound,
    SlowReader,
    StaleAttempt,
    TransferFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from kaveri.seconds import DAY_S

DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "kaveri"
_MAX_MESSAGE_BYTES = 768
_MAX_FACT_BYTES = 512
"""gRPC allows 8 KiB of metadata in total: the message three times, up to three long facts, base64."""
_RETRY_AFTER_S = 1.0
"""Retry delay assumed for a full server that gives none."""
_TOO_LARGE = ("larger than max", "metadata size exceeds")
"""gRPC's own wording for a message, or metadata, that is too large, which no retry changes."""

_CODES: dict[type[KaveriError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    RequestAlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    RequestNotFound: grpc.StatusCode.NOT_FOUND,
    NoCapacity: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineBroke: grpc.StatusCode.UNAVAILABLE,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    StaleAttempt: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    SlowReader: grpc.StatusCode.ABORTED,
    Unsupported: grpc.StatusCode.FAILED_PRECONDITION,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    TransferFailed: grpc.StatusCode.UNAVAILABLE,
    EngineError: grpc.StatusCode.INTERNAL,
    InternalError: grpc.StatusCode.INTERNAL,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}


def status_of(error: KaveriError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return the gRPC status code, message and trailing metadata that encode `error`."""
    code, status = _status(error)
    return code, status.message, ((DETAILS_KEY, status.SerializeToString(deterministic=True)),)


def error_to_bytes(error: KaveriError) -> bytes:
    """Encode `error` as a serialized google.rpc.Status, for a bytes field of a message."""
    return bytes(_status(error)[1].SerializeToString(deterministic=True))


def error_from_bytes(serialized: bytes) -> KaveriError:
    """Decode a serialized google.rpc.Status; returns a plain KaveriError if it was not made by error_to_bytes()."""
    try:
        status = status_pb2.Status.FromString(serialized)
        info = _error_info(status.details)
        if info is not None:
            return _rebuild(info)
    except (DecodeError, ValueError):
        return KaveriError("an error that this version cannot read")
    return KaveriError(status.message)


def _status(error: KaveriError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    if isinstance(error, EngineError) and ALL_RULED_OUT in error.reason:
        # The engine found what the caller has to mend.
        error = InvalidArgument("params", ALL_RULED_OUT, "parameters that leave a token to draw")
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    message = _cut(str(error), _MAX_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN, metadata=_facts(error))
    details = [_pack(info)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(_pack(retry))
    return code, status_pb2.Status(code=code.value[0], message=message, details=details)


async def abort(context: aio.ServicerContext[Any, Any], error: KaveriError) -> NoReturn:
    """Abort an RPC with the gRPC status that encodes `error`."""
    code, message, metadata = status_of(error)
    await context.abort(code, message, trailing_metadata=metadata)


def error_of(error: aio.AioRpcError, *, peer: str = "", request_id: str = "") -> KaveriError:
    """Return the KaveriError that a failed call carries, or the closest one if gRPC or a foreign server made the
    status. peer: address that was called, for the text. request_id: for RequestCancelled from a foreign server."""
    details = _details(error)
    info = _error_info(details)
    if info is not None:
        # A newer or a foreign server may omit our details, or encode them differently.
        with contextlib.suppress(ValueError):
            return _rebuild(info)
    message = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded()
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if any(words in message for words in _TOO_LARGE):
                return InvalidArgument("message", message, "within the size limits of a call")
            return NoCapacity(peer or "server", _retry_after_s(details) or _RETRY_AFTER_S, message)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument("request", message, "valid")
        case grpc.StatusCode.NOT_FOUND:
            return ModelNotFound(message)
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(request_id)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case grpc.StatusCode.UNAVAILABLE:
            reason = f"cannot reach {peer}: {message}" if peer else message
            return Unavailable(reason, _retry_after_s(details))
        case _:
            return KaveriError(f"{error.code().name}: {message}")


def is_answer(error: aio.AioRpcError) -> bool:
    """Return True if a Kaveri service sent this error; False if gRPC or an intermediary made it."""
    return _error_info(_details(error)) is not None


def is_unsent(error: aio.AioRpcError) -> bool:
    """Return True if the call failed for lack of a connection, so nothing left this process."""
    # Matched by gRPC's wording: no code and no field says it.
    return "failed to connect to all addresses" in (error.details() or "")


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message, deterministic=True)
    return packed


def _facts(error: KaveriError) -> dict[str, str]:
    facts = {name: str(value) for name, value in vars(error).items() if value is not None}
    match error:
        case InvalidArgument():
            facts["value"] = repr(error.value)
        case LayoutMismatch():
            facts |= {"ours": repr(error.ours), "theirs": repr(error.theirs)}
        case ModelNotFound():
            facts["served"] = "\n".join(error.served)
    return {name: _cut(fact, _MAX_FACT_BYTES) for name, fact in facts.items()}


def _cut(text: str, limit_bytes: int) -> str:
    return text.encode(errors="replace")[:limit_bytes].decode(errors="ignore")


class _Shown(str):
    """repr of a value, as formatted by the sender of the error."""

    __slots__ = ()
    __repr__ = str.__str__


def _details(error: aio.AioRpcError) -> Sequence[any_pb2.Any]:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return list(status_pb2.Status.FromString(value).details)
    return ()


def _retry_after_s(details: Sequence[any_pb2.Any]) -> float | None:
    retry = error_details_pb2.RetryInfo()
    if any(_unpacked(detail, retry) for detail in details):
        return float(min(max(0.0, retry.retry_delay.ToNanoseconds() / 1e9), DAY_S))
    return None


def _seconds(fact: str) -> float:
    """Parse a received delay, clamped to [0, one day]. Raises ValueError for an invalid number."""
    seconds = float(fact)
    if math.isnan(seconds):
        raise ValueError(fact)
    return min(max(0.0, seconds), DAY_S)


def _error_info(details: Sequence[any_pb2.Any]) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    return info if any(_unpacked(detail, info) and info.domain == _DOMAIN for detail in details) else None


def _unpacked(detail: any_pb2.Any, message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> bool:
    try:
        return bool(detail.Is(message.DESCRIPTOR) and detail.Unpack(message))
    except DecodeError:
        return False


_KINDS = {kind.__name__: kind for kind in _CODES}
_PARSERS: dict[str, Callable[[str], object]] = {
    "attempt": int,
    "limit_s": _seconds,
    "newest_attempt": int,
    "ours": _Shown,
    "retry_after_s": _seconds,
    "served": lambda fact: tuple(fact.splitlines()),
    "suspect_until": int,
    "theirs": _Shown,
    "value": _Shown,
}
"""Parsers of error attributes that are not texts, by attribute name."""


def _rebuild(info: error_details_pb2.ErrorInfo) -> KaveriError:
    """Return the error that `info` describes. Raises ValueError for a kind or an attribute of another version."""
    kind = _KINDS.get(info.reason)
    if kind is None:
        raise ValueError(f"no error is called {info.reason}")
    names = inspect.signature(kind).parameters
    facts = {name: _PARSERS.get(name, str)(fact) for name, fact in info.metadata.items() if name in names}
    try:
        return kind(**facts)
    except TypeError as error:
        raise ValueError(f"{info.reason} lacks a fact") from error
