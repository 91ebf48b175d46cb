"""The transports are held to the suite of all transports."""

from pathlib import Path

from kaveri.testing.transport_conformance import TransportConformance


class TestTcp(TransportConformance):
    factory = "kaveri.kv.transports:tcp_transport"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"


class TestUnix(TransportConformance):
    factory = "kaveri.kv.transports:unix_transport"

    def address(self, directory: Path) -> str:
        return str(directory / "kv.sock")


class TestShm(TransportConformance):
    factory = "kaveri.kv.transports:shm_transport"

    def address(self, directory: Path) -> str:
        return str(directory / "kv.sock")
