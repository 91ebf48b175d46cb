"""Conformance tests for every KV transport, with a real sender and a real receiver.

Subclass TransportConformance in a test module, and name the transport::

    class TestMyLink(TransportConformance):
        factory = "my_package.link:MyTransport"     # called without arguments

        def address(self, directory: Path) -> str:   # where a receiver may listen
            return str(directory / "kv.sock")

A test makes randomised runs (transport_runs.py) for RUN_SECONDS, and prints their seeds; KAVERI_KV_RUNS=500 sets their
number, KAVERI_KV_SEED the first seed. Not verified: speed, networks that lose or delay, and memory that is not the
host's.
"""

import gc
import itertools
import os
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushAccepted
from kaveri.testing.transport_deaths import DeathTests
from kaveri.testing.transport_marks import MarkTests
from kaveri.testing.transport_peer import PeerNursery, fill_pool, load_transport
from kaveri.testing.transport_refusals import RefusalTests
from kaveri.testing.transport_runs import RandomRun
from kaveri.testing.transport_world import SMALL_LAYOUT, GrantedTransfer, TransportWorld

RUN_COUNT = int(os.environ.get("KAVERI_KV_RUNS", "0"))
"""Number of randomised runs; 0: as many as fit into RUN_SECONDS, at least LEAST_RUNS."""
RUN_SECONDS = 3.0
LEAST_RUNS = 10
FIRST_SEED = int(os.environ.get("KAVERI_KV_SEED") or random.randrange(1_000_000_000))


class TransportConformance(RefusalTests, DeathTests, MarkTests):
    """Conformance tests for KV transports; see the module docstring. Those here check that KV lands in its blocks."""

    def test_blocks_land_where_the_ticket_says_and_nowhere_else(self, world: TransportWorld) -> None:
        world.allocator.allocate("hole", 1)
        ticket = world.grant(7)
        source = [40, 3, 4, 5, 63, 0, 1]
        world.push(ticket, source)
        world.require_landed(ticket, source)
        world.allocator.release("hole")

    def test_a_transfer_without_blocks_lands(self, world: TransportWorld) -> None:
        ticket = world.grant(0)
        world.push(ticket, [])
        world.require_landed(ticket, [])

    def test_more_regions_than_one_system_call_takes_land(self, tmp_path: Path, nothing_left: None) -> None:
        block_count = 5000
        source = list(range(0, block_count, 2)) + list(range(1, block_count, 2))
        with self.open_world(tmp_path, SMALL_LAYOUT, block_count) as world:
            ticket = world.grant(block_count)
            world.push(ticket, source)
            world.require_landed(ticket, source)

    def test_several_senders_push_into_one_receiver_at_once(self, world: TransportWorld) -> None:
        senders = [world.start_sender() for _ in range(4)]
        try:
            grants = [(sender, world.grant(5), [i, i + 9, i + 10, i + 30, i + 2]) for i, sender in enumerate(senders)]
            for sender, ticket, source in grants:
                world.push(ticket, source, sender)
            for _, ticket, source in grants:
                world.landed.wait(ticket)
                world.expect(ticket, source)
            for _, ticket, source in grants:
                world.require_landed(ticket, source)
        finally:
            for sender in senders:
                sender.close()

    def test_parts_of_blocks_land_side_by_side(self, world: TransportWorld) -> None:
        blocks, numbers = world.allocator.allocate("parts", 3), [9, 3, 4]
        part = replace(SMALL_LAYOUT, kv_head_count=1)
        target = world.expected.reshape(SMALL_LAYOUT.layer_count, -1, part.block_bytes)
        transports = [load_transport(self.factory)]
        with ExitStack() as stack:
            pushed = []
            for index in (1, 0):
                pool = KvPool(part, 16)
                fill_pool(pool, index + 1)
                sender = KvSender(pool, world.pushed, transports=transports)
                stack.callback(sender.close)
                ids = [2 * block + index for block in blocks]
                ticket = world.receiver.grant(ids, 3 * SMALL_LAYOUT.block_tokens, 60.0, part=part)
                target[:, ids] = pool.memory[:, numbers]
                pushed.append(ticket)
                world.push(ticket, numbers, sender)
            for ticket in pushed:
                assert isinstance(world.landed.wait(ticket), TransferLanded)
                assert isinstance(world.pushed.wait(ticket), PushAccepted)
            world.check_target()
        world.allocator.release("parts")

    def test_a_connection_takes_blocks_of_one_size(self, world: TransportWorld) -> None:
        world.require_works()
        blocks = world.allocator.allocate("parts", 2)
        part = replace(SMALL_LAYOUT, kv_head_count=1)
        ticket = world.receiver.grant([2 * block for block in blocks], 2 * SMALL_LAYOUT.block_tokens, 60.0, part=part)
        world.transfers[ticket.transfer_id] = GrantedTransfer(replace(ticket, block_ids=tuple(blocks)), [])
        world.allocator.move("parts", ticket.transfer_id)
        # The sender takes the blocks for whole ones.
        world.push(replace(ticket, layout=SMALL_LAYOUT), [1, 0])
        assert "of another size" in world.require_released(ticket)
        world.require_failed(ticket)
        world.require_works()

    @pytest.mark.timeout(120 + 5 * max(RUN_COUNT, LEAST_RUNS))
    def test_no_random_run_shows_a_wrong_byte_or_leaves_anything(
        self, tmp_path: Path, nursery: PeerNursery, nothing_left: None
    ) -> None:
        address = self.address(tmp_path)
        mapped_before = _mapped_pool_count()
        until_s = time.monotonic() + RUN_SECONDS
        for number in itertools.count():
            if number >= (RUN_COUNT or LEAST_RUNS) and (RUN_COUNT or time.monotonic() >= until_s):
                break
            seed = FIRST_SEED + number
            print(f"seed {seed}", flush=True)
            try:
                RandomRun(self.factory, address, nursery, seed).carry_out()
            except BaseException as error:
                error.add_note(f"KAVERI_KV_SEED={seed} KAVERI_KV_RUNS=1 begins with this run")
                raise
        assert _mapped_pool_count() <= mapped_before


def _mapped_pool_count() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kaveri-kv")
