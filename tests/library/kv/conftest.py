"""Fixtures of the KV tests. A thread of a KV transfer that breaks fails its test, unless the test expects that."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import structlog
from structlog.typing import EventDict

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports.socket import SocketTransport
from kaveri.testing.transport_peer import Recorder, open_descriptors
from tests.library.kv.kv_pair import limited
from tests.library.kv.kv_stranger import EPOCH, LAYOUT, Stranger


@pytest.fixture
def breaks_are_expected() -> None:
    """Mark a test that breaks a thread on purpose. A test that captures the log does not need it."""


@pytest.fixture(autouse=True)
def nothing_breaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if an exception was logged: the product carries on, so nothing else would show it."""
    broken: list[object] = []

    def note(_logger: object, _method: str, event: EventDict) -> EventDict:
        if event.get("exc_info"):
            broken.append(event["event"])
        return event

    processors = structlog.get_config()["processors"]
    processors.insert(0, note)
    yield
    processors.remove(note)
    assert not broken or "breaks_are_expected" in request.fixturenames, f"logged with a traceback: {broken}"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    assert set(threading.enumerate()) <= threads
    assert not open_descriptors() - descriptors


@pytest.fixture
def landed() -> Recorder:
    return Recorder()


@pytest.fixture
def receiver(landed: Recorder, nothing_left: None) -> Iterator[KvReceiver]:
    listen = [KvEndpoint("tcp", "127.0.0.1:0")]
    transport = limited(SocketTransport("tcp"), progress_timeout_s=0.6, connection_limit=4)
    receiver = KvReceiver(KvPool(LAYOUT, 8), landed, listen=listen, epoch=EPOCH, transports=[transport])
    yield receiver
    receiver.close()
    assert not landed.doubled


@pytest.fixture
def stranger(receiver: KvReceiver) -> Iterator[Stranger]:
    stranger = Stranger.at(receiver.endpoints[0])
    with stranger.socket:
        stranger.greet()
        yield stranger


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (2, 3, LAYOUT.block_bytes), dtype=np.uint8)
