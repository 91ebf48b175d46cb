"""KV transfers of one tensor-parallel rank: the pool's sender and receiver, and the prompts pushed from it. Runs in the
process that owns the rank's memory. All ranks get the same calls; each has its own listener (data_plane)."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kaveri.engine.kv_plane import PoolPlane, Source
from kaveri.engine.vllm.rank import BlockStaged, LostListener, PromptChunk, RankCall, RankListener, RankSetup
from kaveri.errors import KaveriError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.push import PushFailed
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, pushed_tickets
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports


class StagedCopies:
    """Staging slots (block buffers) of a rank, and pushes from them to replicas. layout: of the whole engine."""

    def __init__(
        self,
        layout: KvLayout,
        rank: int,
        pool: KvPool,
        slot_count: int,
        transports: Sequence[Transport],
        listener: RankListener,
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._pool = pool
        self._listener = listener
        self._staging = KvPool(pool.layout, slot_count)
        self._sender = KvSender(self._staging, listener, transports=transports)

    def do(self, call: RankCall) -> None:
        """Carry out a call about copies to replicas. Its events go to the listener."""
        match call:
            case RankCall("stage", (serial, block_id, slot)):
                self._staging.memory[:, slot] = self._pool.memory[:, block_id]
                self._listener(BlockStaged(serial))
            case RankCall("open", (ticket,)):
                try:
                    parts = pushed_tickets(self._layout, self._rank, ticket) if ticket.parts else ()
                    self._sender.open(ticket, parts)
                except KaveriError as error:
                    self._listener(PushFailed(ticket.transfer_id, str(error)))
            case RankCall(method, arguments, named):
                getattr(self._sender, method)(*arguments, **named)

    def close(self) -> None:
        self._sender.close()


class RankPlane:
    """Implementation of Rank in the process that has the rank's memory. Thread-safe, except for the calls about a step,
    which belong to the computing thread. layout: of the whole engine. pool: of this rank."""

    def __init__(self, layout: KvLayout, pool: KvPool) -> None:
        self.layout = layout
        self._pool = pool
        self._lock = threading.Lock()
        self._kv: PoolPlane | None = None
        # Factory of the copies, and the copies once created.
        self._make_copies: Callable[[], StagedCopies] | None = None
        self._copies: StagedCopies | None = None
        self._sources: dict[str, Source] = {}
        # Prompts of the current step, with the number of tokens that each had before.
        self._in_step: list[tuple[Source, int]] = []

    def attach(self, setup: RankSetup, listener: RankListener, on_lost: LostListener) -> tuple[KvEndpoint, ...]:
        self._sources = {}
        transports = setup.transports() if setup.transports is not None else make_transports()
        make_receiver = partial(
            KvReceiver,
            self._pool,
            listen=setup.listen,
            epoch=setup.epoch,
            transports=transports,
            digests=setup.receiving.digests,
            credit_bytes=setup.receiving.credit_bytes,
        )
        make_sender = partial(KvSender, self._pool, transports=transports)
        kv = PoolPlane(self.layout, make_sender, make_receiver if setup.listen else None, listener, setup.rank)
        self._kv = kv
        slots, rank = setup.copy_slots, setup.rank
        self._copies = None
        self._make_copies = partial(StagedCopies, self.layout, rank, self._pool, slots, transports, listener)
        return kv.endpoints[0] if setup.listen else ()

    def detach(self) -> None:
        # Kept, so that later calls fail.
        if self._kv is not None:
            self._kv.close()
        with self._lock:
            copies, self._make_copies = self._copies, None
        if copies is not None:
            copies.close()

    def do(self, call: RankCall) -> None:
        if (kv := self._kv) is None:
            return
        match call:
            case RankCall("grant", (ticket,)):
                kv.grant(ticket)
            case RankCall("revoke", (transfer_id,)):
                kv.revoke(transfer_id)
            case RankCall("open_push", (engine_id, ticket)):
                kv.open_push(self._source(engine_id, ticket.token_count), ticket)
            case RankCall("abort_push", (transfer_id,)):
                kv.abort_push(transfer_id)
            case RankCall("hand_over", (engine_id, first_token_id)):
                with self._lock:
                    source = self._sources.get(engine_id)
                if source is not None:
                    kv.hand_over(source, first_token_id)
            case RankCall("forget", (engine_id,)):
                with self._lock:
                    self._sources.pop(engine_id, None)
            case _:
                with self._lock:
                    if self._copies is None and self._make_copies is not None:
                        self._copies = self._make_copies()
                if self._copies is not None:
                    self._copies.do(call)

    def flow(self) -> KvFlow:
        return kv.flow() if (kv := self._kv) is not None else KvFlow()

    def shutdown(self) -> None:
        self.detach()

    # The step under way.

    def begin_step(self, chunks: Sequence[PromptChunk]) -> None:
        """Announce that the model is about to compute these chunks."""
        if not chunks or (kv := self._kv) is None:
            return
        for chunk in chunks:
            source = self._source(chunk.engine_id, chunk.token_count)
            source.block_ids += chunk.new_block_ids
            self._in_step.append((source, chunk.before))
        sources = [source for source, _ in self._in_step]
        kv.begin_step(zip(sources, (chunk.computed for chunk in chunks), strict=True))

    def layer_done(self, layer: int) -> None:
        """Record that the step's KV of this layer is in the pool."""
        if self._in_step and (kv := self._kv) is not None:
            kv.layer_done(layer)

    def end_step(self) -> None:
        if self._in_step and (kv := self._kv) is not None:
            kv.end_step()
        self._in_step.clear()

    def written_blocks(self) -> set[int]:
        """Return the blocks of pushed prompts that the step fills; in a first chunk also those of the prefix cache."""
        block_tokens = self._pool.layout.block_tokens
        return {
            block
            for source, before in self._in_step
            for block in source.block_ids[before // block_tokens : source.ready_in_step]
        }

    def _source(self, engine_id: str, token_count: int) -> Source:
        # Created by whichever comes first: the step that begins the prompt, or its ticket.
        with self._lock:
            source = self._sources.get(engine_id)
            if source is None:
                source = self._sources[engine_id] = Source([], token_count)
            return source
