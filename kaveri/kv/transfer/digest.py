"""Integrity of a transfer: one streaming digest of all its bytes, in sending order."""

import enum
from collections.abc import Callable
from typing import Protocol

import xxhash


class Digests(enum.StrEnum):
    """Choice of the transfers that a receiver verifies by a digest of their bytes."""

    AUTO = "auto"
    """Transfers over byte streams, such as tcp and unix; not those where the kernel or the network card writes into the
    pool (Capabilities.is_byte_stream)."""
    ON = "on"
    OFF = "off"


class Digest(Protocol):
    """Streaming 64-bit hash of bytes."""

    def update(self, data: memoryview, /) -> None:
        """Append bytes to the hashed data."""

    def intdigest(self) -> int:
        """Return the hash of all data so far, in [0, 2**64)."""


DigestFactory = Callable[[], Digest]

xxh3: DigestFactory = xxhash.xxh3_64
"""XXH3, 64 bits: 20 GiB/s and more on one core, an order of magnitude above a socket."""
