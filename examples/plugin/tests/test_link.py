"""The transport does what every transport must."""

from pathlib import Path

from kaveri.testing.transport_conformance import TransportConformance


class TestCounted(TransportConformance):
    factory = "kaveri_example.link:CountedTransport"

    def address(self, directory: Path) -> str:
        return "127.0.0.1:0"
