"""Emulated links take as long as their speed says; the mock transport completes transfers without moving bytes."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from kaveri.engine.factory import build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import TransferLanded
from kaveri.kv.transfer.sender import PushAccepted
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports, slowed
from kaveri.kv.transports.link_speed import LinkSpeed, parse_link_speed
from kaveri.testing.transport_conformance import TransportConformance
from tests.library.kv.kv_pair import failure, kv_pair, release

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
SOURCE = (1, 3)


def slowed_tcp() -> Transport:
    return slowed(make_transports(("tcp",)), "100Gbps,10us")[0]


class TestSlowedTcp(TransportConformance):
    """Conformance of an emulated link over tcp."""

    factory = "tests.library.kv.test_emulated_links:slowed_tcp"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"


def timed_push(
    transports: tuple[Transport, ...], listen: KvEndpoint
) -> tuple[PushAccepted, TransferLanded, KvPool, float]:
    source, target = KvPool(LAYOUT, 4), KvPool(LAYOUT, 4)
    source.memory[:] = 7
    with kv_pair(source, target, listen, transports) as pair:
        began_s = time.monotonic()
        ticket = pair.push([2, 0], SOURCE)
        accepted, event = pair.accepted(ticket), pair.landed.wait(ticket)
        assert isinstance(event, TransferLanded)
        return accepted, event, target, time.monotonic() - began_s


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        ("200Gbps", LinkSpeed(25e9)),
        ("25Gbps,50us", LinkSpeed(3.125e9, 50 * 1e-6)),
        ("300GBps", LinkSpeed(300e9)),
        ("1.5MiBps, 2ms", LinkSpeed(1.5 * 2**20, 2e-3)),
        ("200Gbps,800KiB/token", LinkSpeed(25e9, 0.0, 800 * 1024)),
    ],
)
def test_link_speeds_are_read_with_their_units(text: str, speed: LinkSpeed) -> None:
    assert parse_link_speed(text) == speed


@pytest.mark.parametrize(
    ("text", "part"), [("fast", "'fast'"), ("50us", "no bandwidth"), ("0Gbps", "no bandwidth"), ("1Gbps,", "''")]
)
def test_a_link_that_cannot_be_read_is_refused_with_the_part(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse_link_speed(text)


def test_token_bytes_stand_for_what_a_token_takes_in_the_pool() -> None:
    speed = parse_link_speed("1MBps,1kB/token")
    assert speed.transfer_s(pool_bytes=20 * 64, pool_token_bytes=64) == pytest.approx(0.02)


def test_an_emulated_link_takes_at_least_its_time_and_its_label_says_so() -> None:
    # 1,024 bytes at 10,240 bytes a second.
    link = "10.24KBps,20ms"
    accepted, _, target, seconds = timed_push(slowed(make_transports(("tcp",)), link), KvEndpoint("tcp", "127.0.0.1:0"))
    assert accepted.transport == f"tcp at {link}"
    assert seconds >= 2 * 2 * LAYOUT.block_bytes / 10_240 + 0.02
    assert (target.memory[:, [0, 2]] == 7).all()


class LateClock:
    """Clock that advances only by sleeping, each time 3 ms too far, as on a busy machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 0.003


def test_late_wake_ups_do_not_make_an_emulated_link_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock()
    monkeypatch.setattr("kaveri.kv.transports.extra.emulated.time", clock)
    source, target = KvPool(LAYOUT, 50), KvPool(LAYOUT, 50)
    # A millisecond for each block: shorter than a wake-up is late.
    transports = slowed(make_transports(("tcp",)), f"{LAYOUT.block_bytes}KBps")
    with kv_pair(source, target, KvEndpoint("tcp", "127.0.0.1:0"), transports) as pair:
        ticket = pair.receiver.grant(range(50), 200, 30.0)
        pair.sender.open(ticket)
        for layer in range(LAYOUT.layer_count):
            for block in range(50):
                pair.sender.write(ticket.transfer_id, layer, block, [block])
        pair.sender.finish(ticket.transfer_id, b"")
        pair.accepted(ticket)
    assert 0.1 <= clock.now_s < 0.11


def test_an_abort_does_not_wait_for_the_emulated_link() -> None:
    source, target = KvPool(LAYOUT, 4), KvPool(LAYOUT, 4)
    transports = slowed(make_transports(("tcp",)), "1Bps")
    with kv_pair(source, target, KvEndpoint("tcp", "127.0.0.1:0"), transports) as pair:
        ticket = pair.push([2, 0], SOURCE, expires_in_s=3600.0)
        pair.sender.abort(ticket.transfer_id)
        # At a byte a second it would have taken many minutes.
        failure(pair.pushed, ticket)
        release(pair.landed, ticket)


def test_the_mock_lands_transfers_and_moves_no_bytes() -> None:
    transports = make_transports(("mock",))
    accepted, landed, target, _ = timed_push(transports, KvEndpoint("mock", "127.0.0.1:0"))
    assert accepted.transport == "mock"
    assert landed.kv_bytes == accepted.kv_bytes == 2 * 2 * LAYOUT.block_bytes
    assert not target.memory.any()


def test_the_mock_is_refused_to_engines_that_read_their_kv() -> None:
    settings = EngineSettings(engine="fake", kv_transports=("mock",), kv_cache_memory=2**20)
    with pytest.raises(ConfigError, match="moves no bytes") as raised:
        build_engine(settings)
    assert raised.value.field == "kv_transports"
    engine = build_engine(replace(settings, fake_verify_kv=False))
    assert [endpoint.transport for endpoint in engine.info.kv_endpoints] == ["mock"]
    engine.close()
