"""Errors over real gRPC: each arrives with its data, and a foreign server's status as the closest KaveriError."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from kaveri import errors
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
from kaveri.rpc.server import open_channel
from kaveri.v1 import feed_pb2, feed_pb2_grpc
from kaveri.wire.status import DETAILS_KEY, abort, error_of, status_of
from tests.library.rpc.echo_service import EchoService, serving

EXAMPLES: list[KaveriError] = [
    InvalidArgument("params.top_p", 1.5, "in (0, 1]"),
    InvalidArgument("prompt", "naïve \n 川", "shorter"),
    ModelNotFound("kaveri-huge", ("kaveri-tiny", "other")),
    ModelNotFound("kaveri-huge"),
    RequestAlreadyExists("request-1"),
    RequestNotFound("request-1", "its KV has not landed"),
    NoCapacity("decode", 0.2, "no blocks"),
    Unauthenticated("this API key is unknown"),
    Unavailable("no decode instance is left"),
    Unavailable("draining", 1.5),
    EngineBroke("the engine stopped", 7),
    StaleAttempt("request-1", 1, 3),
    SlowReader(30.0),
    DeadlineExceeded("the queue"),
    RequestCancelled("request-1"),
    Unsupported("replicas are off here"),
    LayoutMismatch("dtype", "float32", "bfloat16"),
    LayoutMismatch("head_dim", 32, 64),
    TransferFailed("peer reset the connection"),
    EngineError("out of memory"),
    InternalError("the router failed"),
    ConfigError("--port", "in use"),
]


def subclasses(root: type[KaveriError]) -> Iterator[type[KaveriError]]:
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child
        yield from subclasses(child)


async def call(service: EchoService, **options: Any) -> aio.AioRpcError:
    async with serving(service) as server, open_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await feed_pb2_grpc.FeedServiceStub(channel).Abort(feed_pb2.AbortRequest(), **options)
    return caught.value


async def arrived_as(code: grpc.StatusCode, message: str, details: bytes | None = None, **known: str) -> KaveriError:
    """Return the KaveriError made from a foreign server's status with these details."""
    metadata = () if details is None else ((DETAILS_KEY, details),)
    service = EchoService()
    service.on_abort = lambda context: context.abort(code, message, trailing_metadata=metadata)
    return error_of(await call(service), **known)


def packed(detail: Message) -> bytes:
    wrapped = any_pb2.Any()
    wrapped.Pack(detail)
    return status_pb2.Status(details=[wrapped]).SerializeToString()


def info(error: str, domain: str = "kaveri", **facts: str) -> bytes:
    return packed(error_details_pb2.ErrorInfo(reason=error, domain=domain, metadata=facts))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_as_itself_with_its_data(error: KaveriError) -> None:
    service = EchoService()
    service.on_abort = lambda context: abort(context, error)
    arrived = error_of(await call(service))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name, value in vars(error).items():
        there = getattr(arrived, name)
        # A value of any type arrives as the text it was shown as; data that code works with keeps its type.
        assert there == value or repr(there) == repr(value), name


@pytest.mark.parametrize("kind", list(subclasses(KaveriError)), ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_of_its_own_and_an_example_here(kind: type[KaveriError]) -> None:
    examples = [error for error in EXAMPLES if type(error) is kind]
    assert examples
    code, message, _ = status_of(examples[0])
    assert message == str(examples[0])
    assert (code is grpc.StatusCode.INTERNAL) == (kind in (EngineError, InternalError))


def test_an_error_with_huge_data_still_fits_into_the_metadata() -> None:
    for error in (InvalidArgument("prompt", "x" * 10**6, "short"), ModelNotFound("m" * 10**6), EngineError("e" * 5000)):
        _, message, ((_, packed),) = status_of(error)
        assert len(message) + len(packed) < 8192, type(error)


async def test_details_can_be_read_in_any_language() -> None:
    service = EchoService()
    service.on_abort = lambda context: abort(context, NoCapacity("router", 0.25))
    failure = await call(service)
    metadata = dict(failure.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata[DETAILS_KEY])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details if detail.Is(retry.DESCRIPTOR))
    assert retry.retry_delay.ToMilliseconds() == 250
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", InvalidArgument),
        (grpc.StatusCode.NOT_FOUND, "none", ModelNotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests", NoCapacity),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (9 vs. 4)", InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "received initial metadata size exceeds hard limit", InvalidArgument),
        (grpc.StatusCode.UNAVAILABLE, "gone", Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "late", DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "cancelled", RequestCancelled),
        (grpc.StatusCode.DATA_LOSS, "lost", KaveriError),
        (grpc.StatusCode.UNIMPLEMENTED, "unknown", KaveriError),
    ],
)
async def test_a_strangers_status_becomes_the_nearest_error(
    code: grpc.StatusCode, message: str, kind: type[KaveriError]
) -> None:
    arrived = await arrived_as(code, message, peer="somewhere:1", request_id="request-1")
    assert type(arrived) is kind
    if kind is RequestCancelled:
        assert vars(arrived)["request_id"] == "request-1"
    elif kind is Unavailable:
        assert "somewhere:1" in str(arrived)
    elif kind is not DeadlineExceeded:
        assert message in str(arrived)


@pytest.mark.parametrize(
    ("code", "kind", "milliseconds", "taken_s"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, NoCapacity, 750, 0.75),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, 10**14, 86_400.0),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, -5000, 0.0),
    ],
)
async def test_a_strangers_retry_delay_is_kept_and_is_at_most_a_day(
    code: grpc.StatusCode, kind: type[KaveriError], milliseconds: int, taken_s: float
) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(milliseconds)
    arrived = await arrived_as(code, "slow down", packed(retry))
    assert isinstance(arrived, kind)
    assert vars(arrived)["retry_after_s"] == taken_s


@pytest.mark.parametrize(("named", "taken_s"), [("inf", 86_400.0), ("-inf", 0.0), ("1e300", 86_400.0), ("nan", 1.0)])
async def test_a_retry_delay_of_ours_is_a_number_of_seconds_up_to_a_day(named: str, taken_s: float) -> None:
    details = info("NoCapacity", role="decode", retry_after_s=named, reason="full")
    arrived = await arrived_as(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
    assert isinstance(arrived, NoCapacity)
    assert arrived.retry_after_s == taken_s


@pytest.mark.parametrize(
    "details",
    [
        *(b"", b"\xff" * 40, b"\x08\x03"),
        info("RequestAlreadyExists", domain="example.com", request_id="request-9"),
        info("SomethingNew"),
    ],
    ids=["empty", "garbage", "half a status", "of another system", "of a newer version"],
)
async def test_details_that_name_no_error_of_ours_are_ignored(details: bytes) -> None:
    assert type(await arrived_as(grpc.StatusCode.UNAVAILABLE, "gone", details)) is Unavailable


@pytest.mark.parametrize("facts", [{}, {"role": "router", "retry_after_s": "soon"}])
async def test_facts_that_are_missing_or_unreadable_do_not_raise_something_else(facts: dict[str, str]) -> None:
    details = info("NoCapacity", **facts)
    assert isinstance(await arrived_as(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details), NoCapacity)


async def test_an_exception_that_a_servicer_did_not_foresee_is_a_plain_kaveri_error() -> None:
    service = EchoService()

    async def fail(context: Any) -> None:
        raise ZeroDivisionError("a defect")

    service.on_abort = fail
    arrived = error_of(await call(service))
    assert type(arrived) is KaveriError
    assert "a defect" in str(arrived)
