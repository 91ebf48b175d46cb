"""A rank's end of copies to replicas: the staging slots, and the pushes out of them. Decides nothing (copier.py)."""

from collections.abc import Sequence
from functools import partial

from kaveri.engine.vllm.rank import (
    AbortCopy,
    BlockStaged,
    CopyCall,
    FinishCopy,
    MarkCopy,
    OpenCopy,
    RankListener,
    StageBlock,
    WriteCopy,
)
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.part_transfers import PartSender
from kaveri.kv.transfer.push import PushFailed
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.transport import Transport


class StagedCopies:
    """Runs where the rank's memory is. layout: of the whole engine. pool: of the rank; its blocks are copied."""

    def __init__(
        self,
        layout: KvLayout,
        rank: int,
        pool: KvPool,
        slot_count: int,
        transports: Sequence[Transport],
        listener: RankListener,
    ) -> None:
        self._layers = range(layout.layer_count)
        self._pool = pool
        self._listener = listener
        self._staging = KvPool(pool.layout, slot_count)
        self._sender = PartSender(layout, rank, listener, partial(KvSender, self._staging, transports=transports))

    def do(self, call: CopyCall) -> None:
        """Carry out a call. Its events go to the listener."""
        match call:
            case StageBlock(serial, block_id, slot):
                self._staging.memory[:, slot] = self._pool.memory[:, block_id]
                self._listener(BlockStaged(serial))
            case OpenCopy(ticket):
                try:
                    self._sender.open(ticket)
                except KaveriError as error:
                    self._listener(PushFailed(ticket.transfer_id, str(error)))
            case WriteCopy(transfer_id, block_index, slot):
                self._sender.write_layers(transfer_id, self._layers, block_index, (slot,))
            case MarkCopy(transfer_id, block_count, note):
                self._sender.mark(transfer_id, block_count, note)
            case FinishCopy(transfer_id, note):
                self._sender.finish(transfer_id, note)
            case AbortCopy(transfer_id, keep_marked):
                self._sender.abort(transfer_id, keep_marked=keep_marked)

    def close(self) -> None:
        """End all pushes. Idempotent."""
        self._sender.close()
