"""One rank's end of the data plane: its pool's sender and receiver, and the prompts that are pushed out of it.

It lives where the rank's memory is: in the engine's process, or in that of one tensor-parallel rank. The engine tells
all ranks the same, and hears of each (data_plane).
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kaveri.engine.kv_plane import PlaneListener, PoolPlane
from kaveri.engine.pushes import Source
from kaveri.engine.vllm.orders import Chunk
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import CREDIT_BYTES, KvReceiver
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports
from kaveri.telemetry.logs import LogSettings


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank's end is made of. Plain values and a function of a module's top: it may go to another process."""

    listen: tuple[KvEndpoint, ...]
    """Where to take pushes, best first. Empty: nowhere."""
    transports: "Callable[[], Sequence[Transport]] | None"
    """Makes what carries KV, the preferred first; None for the socket transports."""
    epoch: int
    credit_bytes: int = CREDIT_BYTES
    logs: LogSettings | None = None
    """Of the engine's process, for a rank that has a process of its own."""


class RankPlane:
    """Safe to use from any thread, but for the calls about a step, which are those of the thread that computes.

    listener: called on any thread, and within grant() and open_push(), too. Raises ConfigError when it cannot listen.
    """

    def __init__(self, pool: KvPool, setup: RankSetup, listener: PlaneListener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        # Of the step under way: with how many tokens it had before.
        self._in_step: list[tuple[Source, int]] = []
        self._block_tokens = pool.layout.block_tokens
        transports = setup.transports() if setup.transports is not None else make_transports()
        receiver: KvReceiver | None = None
        if setup.listen:
            receiver = KvReceiver(
                pool,
                listener,
                listen=setup.listen,
                epoch=setup.epoch,
                transports=transports,
                credit_bytes=setup.credit_bytes,
            )
        self._kv = PoolPlane(pool.layout, KvSender(pool, listener, transports=transports), receiver, listener)
        self._pushes = self._kv.pushes

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Where it takes pushes, best first."""
        return next(iter(self._kv.endpoints), ())

    def grant(self, ticket: Ticket) -> None:
        """See KvPlane."""
        self._kv.grant(ticket)

    def revoke(self, transfer_id: bytes) -> None:
        """See KvPlane."""
        self._kv.revoke(transfer_id)

    def open_push(self, number: str, ticket: Ticket) -> None:
        """See KvPlane."""
        self._kv.open_push(self._source(number, ticket.token_count), ticket)

    def abort_push(self, transfer_id: bytes) -> None:
        """See KvPlane."""
        self._kv.abort_push(transfer_id)

    def hand_over(self, number: str, first_token_id: int) -> None:
        """A prompt is computed, behind its last step, and its first token drawn."""
        with self._lock:
            source = self._sources.get(number)
        if source is not None:
            self._pushes.hand_over(source, first_token_id)

    def forget(self, number: str) -> None:
        """Nothing more is pushed of a prompt."""
        with self._lock:
            self._sources.pop(number, None)

    def flow(self) -> KvFlow:
        """What is under way."""
        return self._kv.flow()

    def close(self) -> None:
        """Ends all transfers; see KvSender.close and KvReceiver.close."""
        self._kv.close()

    # What the step under way does.

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """The model is about to compute these."""
        for chunk in chunks:
            source = self._source(chunk.number, chunk.token_count)
            source.block_ids += chunk.new_block_ids
            self._in_step.append((source, chunk.before))
        if chunks:
            sources = [source for source, _ in self._in_step]
            self._pushes.begin_step(zip(sources, (chunk.computed for chunk in chunks), strict=True))

    def layer_done(self, layer: int) -> None:
        """The step's KV of this layer is in the pool."""
        if self._in_step:
            self._pushes.layer_done(layer)

    def end_step(self) -> None:
        """The same of all layers."""
        if self._in_step:
            self._pushes.end_step()
            self._in_step.clear()

    def written_blocks(self) -> set[int]:
        """Those that the step completes; with a prompt's first chunk those of the prefix cache, too."""
        return {
            block
            for source, before in self._in_step
            for block in source.block_ids[before // self._block_tokens : source.ready_in_step]
        }

    def _source(self, number: str, token_count: int) -> Source:
        # Whichever comes first: the step that begins it, or the ticket for it.
        with self._lock:
            source = self._sources.get(number)
            if source is None:
                source = self._sources[number] = Source([], token_count)
            return source
