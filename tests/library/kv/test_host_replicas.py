"""Replicas in host memory do what every replica store must."""

import secrets
from pathlib import Path

import pytest

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import NOTE_TOKENS_MAX, noted_tokens, token_note
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import NOTE_BYTES_MAX
from kaveri.kv.transports import make_transports
from kaveri.testing.replica_conformance import ReplicaConformance

_LAYOUT = KvLayout("model", layer_count=3, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")


class _Harness:
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
    def harness(self, request: pytest.FixtureRequest, tmp_path: Path) -> _Harness:
        return _Harness(request.param, tmp_path)


def test_memory_is_rounded_down_to_whole_blocks_and_holds_at_least_one(tmp_path: Path) -> None:
    harness = _Harness("unix", tmp_path)
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
