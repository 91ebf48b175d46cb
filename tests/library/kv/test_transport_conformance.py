"""Runs the conformance suite on each transport."""

import importlib.util
from pathlib import Path

import pytest

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
    factory = "kaveri.kv.transports.shm:ShmTransport"

    def address(self, directory: Path) -> str:
        return str(directory / "kv.sock")


@pytest.mark.skipif(importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed")
class TestNixl(TransportConformance):
    factory = "kaveri.kv.transports.nixl:NixlTransport"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"


class TestGloo(TransportConformance):
    factory = "kaveri.kv.transports:gloo_transport"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"
