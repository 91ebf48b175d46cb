"""Fixtures shared by the parts of the transports' suite: the worlds that they test in, and the check for leftovers."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.transport_peer import PeerNursery, load_transport, open_descriptors
from kaveri.testing.transport_world import PEER_BLOCKS, PEER_LAYOUT, SMALL_LAYOUT, TransportWorld

_END_WITHIN_S = 20.0


class TransportSuite:
    """Fixtures and helpers; see transport_conformance.py."""

    factory: ClassVar[str]

    def address(self, directory: Path) -> str:
        """Address where a receiver may listen."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def nursery(cls) -> Iterator[PeerNursery]:
        """Nursery for processes of the tests."""
        with PeerNursery(cls.factory) as nursery:
            yield nursery

    @pytest.fixture
    def nothing_left(self, nursery: PeerNursery) -> Iterator[None]:
        # Once for the process: what the transport starts for good.
        load_transport(self.factory)
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        yield
        # One that waited for a process that has just been ended may take a moment.
        until_s = time.monotonic() + _END_WITHIN_S
        while (left := set(threading.enumerate()) - threads) and time.monotonic() < until_s:
            next(iter(left)).join(0.1)
        assert not left, f"threads are left: {left}"
        # Others of this process may close theirs meanwhile, so only new ones count.
        assert not (new := open_descriptors() - descriptors), f"descriptors are left: {new}"

    @pytest.fixture
    def world(self, tmp_path: Path, nothing_left: None) -> Iterator[TransportWorld]:
        world = TransportWorld(self.factory, self.address(tmp_path), SMALL_LAYOUT, 64)
        try:
            yield world
            world.check_integrity()
        finally:
            world.close()

    @pytest.fixture
    def large_world(self, tmp_path: Path, nothing_left: None) -> Iterator[TransportWorld]:
        """World whose source pool equals that of a sender in another process."""
        world = TransportWorld(self.factory, self.address(tmp_path), PEER_LAYOUT, PEER_BLOCKS)
        try:
            yield world
            world.check_integrity()
        finally:
            world.close()

    @staticmethod
    def _arrived(world: TransportWorld, ticket: Ticket, layer: int, source: list[int]) -> bool:
        """Return True if the bytes of these first blocks of a layer are in the target pool."""
        blocks = list(ticket.block_ids[: len(source)])
        return bool((world.target.memory[layer, blocks] == world.source.memory[layer, source]).all())
