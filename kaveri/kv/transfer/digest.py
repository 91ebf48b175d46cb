"""The integrity of a transfer: one streaming digest per layer, over the layer's blocks in index order."""

from collections.abc import Callable
from typing import Protocol

import xxhash


class Digest(Protocol):
    """A running 64-bit digest."""

    def update(self, data: memoryview, /) -> None:
        """Takes more bytes."""

    def intdigest(self) -> int:
        """The digest of all bytes so far, in [0, 2**64)."""


class NoDigest:
    """Verifies nothing: for links that carry their own integrity, and to measure what digests cost."""

    def update(self, data: memoryview, /) -> None:
        """Ignores them."""

    def intdigest(self) -> int:
        """Always 0."""
        return 0


DigestFactory = Callable[[], Digest]

xxh3: DigestFactory = xxhash.xxh3_64
"""XXH3, 64 bits: 20 GiB/s and more on one core, an order of magnitude above a socket."""
