"""Replicas in host memory do what every replica store must."""

import secrets
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kaveri.errors import ConfigError, LayoutMismatch
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import NOTE_TOKENS_MAX, noted_tokens, token_note
from kaveri.kv.replicas.store import ReplicaGrew
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.part_transfers import PartReceiver, PartSender
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, ticket_parts
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX
from kaveri.kv.transports import make_transports
from kaveri.testing.replica_conformance import SOON_S, Heard, ReplicaConformance, key_of

_LAYOUT = KvLayout("model", layer_count=3, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")


class _HostReplicasHarness:
    layout = _LAYOUT

    def __init__(self, transport: str, folder: Path) -> None:
        self.transports = make_transports()
        self._listen = [KvEndpoint(transport, str(folder / "replicas.sock"))]

    def store(self, memory_bytes: int) -> HostReplicas:
        return HostReplicas(
            self.layout,
            memory_bytes,
            listen=self._listen,
            transports=self.transports,
            epoch=secrets.randbits(63),
        )


class TestHostReplicas(ReplicaConformance):
    @pytest.fixture(params=["unix", "shm"])
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _HostReplicasHarness:
        return _HostReplicasHarness(request.param, tmp_path)


def test_memory_is_rounded_down_to_whole_blocks_and_holds_at_least_one(tmp_path: Path) -> None:
    harness = _HostReplicasHarness("unix", tmp_path)
    block_bytes = _LAYOUT.layer_count * _LAYOUT.block_bytes
    store = harness.store(3 * block_bytes - 1)
    assert store.usage().total_bytes == 2 * block_bytes
    store.close()
    for memory_bytes in (block_bytes - 1, 0, 2**60):
        with pytest.raises(ConfigError) as raised:
            harness.store(memory_bytes)
        assert raised.value.field == "replica_memory"


def test_note_names_as_many_tokens_as_fit() -> None:
    token_ids = tuple(range(2**32 - NOTE_TOKENS_MAX, 2**32))
    assert len(token_note(token_ids)) == NOTE_BYTES_MAX
    assert noted_tokens(token_note(token_ids)) == token_ids
    assert noted_tokens(b"\x01\x00\x00\x00\xff") == (1,)


def test_replica_of_two_ranks_is_in_one_pool_and_is_pushed_to_two_ranks(tmp_path: Path) -> None:
    layout = replace(_LAYOUT, order="H-engine", tensor_ranks=2)
    harness = _HostReplicasHarness("unix", tmp_path)
    harness.layout = layout
    with ExitStack() as stack:
        store = harness.store(8 * layout.layer_count * layout.block_bytes)
        stack.callback(store.close)
        heard = Heard()
        store.start(heard)
        pools = [KvPool(layout.rank(rank), 8) for rank in range(2)]
        for rank, pool in enumerate(pools):
            pool.memory[:] = np.random.default_rng(rank).integers(0, 256, pool.memory.shape, np.uint8)
        ticket = store.open(key_of("r"), layout, 12, 60.0)
        assert len(ticket.parts) == 2
        token_ids = list(range(12))
        for rank, pool in enumerate(pools):
            make_sender = partial(KvSender, pool, transports=harness.transports)
            sender = PartSender(layout, rank, lambda _: None, make_sender)
            stack.callback(sender.close)
            sender.open(ticket)
            sender.write_layers(ticket.transfer_id, range(layout.layer_count), 0, (5, 0, 3))
            sender.mark(ticket.transfer_id, 3, token_note(token_ids))
        heard.wait_for(ReplicaGrew, lambda event: event.token_count == 12)
        store.seal(key_of("r"))

        landed = Heard()
        targets = [KvPool(layout.rank(rank), 8) for rank in range(2)]
        endpoints = []
        receivers = []
        for rank, pool in enumerate(targets):
            listen = [KvEndpoint("unix", str(tmp_path / f"target{rank}.sock"))]
            make_receiver = partial(KvReceiver, pool, listen=listen, epoch=1, transports=harness.transports)
            receivers.append(PartReceiver(rank, landed, make_receiver))
            stack.callback(receivers[-1].close)
            endpoints.append(receivers[-1].endpoints)
        parts = ticket_parts(store.layout, layout, endpoints)
        landing = Ticket(bytes(16), bytes(16), 1, (), (1, 2, 4), 12, 60.0, layout, parts=parts)
        for receiver in receivers:
            receiver.grant(landing)
        store.push(key_of("r"), landing).result(SOON_S)
        for source, target in zip(pools, targets, strict=True):
            assert (target.memory[:, [1, 2, 4]] == source.memory[:, [5, 0, 3]]).all()
        assert store.token_ids(key_of("r")) == tuple(token_ids)


def test_ranks_whose_heads_are_not_apart_are_refused(tmp_path: Path) -> None:
    store = _HostReplicasHarness("unix", tmp_path).store(2**16)
    with pytest.raises(LayoutMismatch) as raised:
        store.open(key_of("r"), replace(_LAYOUT, tensor_ranks=2), 4, 60.0)
    assert raised.value.field == "tensor_ranks"
    store.close()
