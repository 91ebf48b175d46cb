"""Copies to replicas in all ranks of an engine: one call here is one in each rank."""

from collections.abc import Sequence

from kaveri.engine.copier import CopySender
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.rank import AbortCopy, FinishCopy, MarkCopy, WriteCopy
from kaveri.kv.transfer.push import PushListener
from kaveri.kv.transfer.ticket import Ticket


class RankCopies:
    """A CopyPlane (copier_thread.py) and its CopySender (copier.py)."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def start(self, listener: PushListener) -> CopySender:
        self._plane.hear_copies(listener)
        return self

    def stage(self, block_id: int, slot: int) -> None:
        self._plane.stage(block_id, slot)

    def open(self, ticket: Ticket) -> None:
        self._plane.open_copy(ticket)

    def write_layers(self, transfer_id: bytes, layers: range, first_index: int, source_blocks: Sequence[int]) -> None:
        """Write all layers: a rank has them all."""
        for offset, slot in enumerate(source_blocks):
            self._plane.do(WriteCopy(transfer_id, first_index + offset, slot))

    def mark(self, transfer_id: bytes, block_count: int, note: bytes) -> None:
        self._plane.do(MarkCopy(transfer_id, block_count, note))

    def finish(self, transfer_id: bytes, note: bytes) -> None:
        self._plane.do(FinishCopy(transfer_id, note))

    def abort(self, transfer_id: bytes) -> None:
        self._plane.do(AbortCopy(transfer_id, keep_marked=False))

    def close(self) -> None:
        """Do nothing: the ranks end their pushes with the data plane."""
