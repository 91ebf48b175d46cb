"""An engine that drives a ModelRunner step by step, for prefill, decode or both.

Owns the pool and the engine thread. Leaves arithmetic to the runner, bytes to the KV sender and receiver, transfers to
transfers.py, and requests to the lifecycle, which the lock of `Shared` guards.
"""

import secrets
import time
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kaveri.engine.blame import StepMember
from kaveri.engine.contract import EngineInfo, EngineKey, EngineRequest
from kaveri.engine.copier import ReplicaOptions
from kaveri.engine.copier_thread import CopierThread, PoolCopyPlane
from kaveri.engine.kv_plane import PoolPlane
from kaveri.engine.limits import require_room
from kaveri.engine.shared import Shared
from kaveri.engine.stepwise.lifecycle import Lifecycle, min_free_blocks
from kaveri.engine.stepwise.runner import ModelRunner
from kaveri.engine.stepwise.sequence import PlannedSlice, Sequence
from kaveri.engine.threaded import ThreadedEngine
from kaveri.engine.transfers import Transfers
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import PoolReplicas
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import KvReceiver, ReceiverOptions
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Transport
from kaveri.kv.transports import make_transports
from kaveri.text.grammars import Grammars


class StepwiseEngine(ThreadedEngine[Sequence]):
    """Prefill and decode engine (contract.py) that forms the steps of a ModelRunner. RequestFailed means that no token
    could be drawn or that none came with the KV; any other failure in a step stops the engine.

    total_blocks: blocks of each layer; the whole pool is allocated and touched here. chunk_tokens: most prompt tokens
    of a step, recomputed ones included. max_batch: most decode requests of a step; further ones wait, in order. listen:
    addresses for incoming KV, best first; if empty, reserve() fails. transports: of KV, in order of preference; None
    for the socket transports. Raises ConfigError if a request of the runner's max_model_len does not fit into the empty
    pool, or if it cannot listen. model: its tokenizer is that of grammars; None: tokens are bytes there.
    """

    def __init__(
        self,
        runner: ModelRunner,
        total_blocks: int,
        *,
        chunk_tokens: int = 512,
        max_batch: int = 64,
        listen: Ordered[KvEndpoint] = (),
        transports: Ordered[Transport] | None = None,
        receiving: ReceiverOptions = ReceiverOptions(),  # noqa: B008 - it is frozen
        replicas: ReplicaOptions = ReplicaOptions(),  # noqa: B008 - it is frozen
        model: str | None = None,
    ) -> None:
        layout = runner.layout
        if chunk_tokens < 1:
            raise ConfigError("chunk_tokens", f"is {chunk_tokens}; it must be at least 1")
        if max_batch < 1:
            raise ConfigError("max_batch", f"is {max_batch}; it must be at least 1")
        require_room(runner.max_model_len, layout, total_blocks)
        self._runner = runner
        self._layout = layout
        pool = _allocated(layout, total_blocks)
        runner.attach(pool)

        shared = Shared()
        info = EngineInfo(
            engine=runner.name,
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            eos_token_ids=runner.eos_token_ids,
            epoch=secrets.randbits(63),
            kv_endpoints=(),
            can_replicate=True,
            can_keep=True,
        )
        grammars = Grammars(model, runner.vocab_size, runner.eos_token_ids)
        self._lifecycle = Lifecycle(info, chunk_tokens, max_batch, shared.put, on_work=shared.wake, grammars=grammars)
        transfers = Transfers(info, shared, self._lifecycle)
        transports = make_transports() if transports is None else transports
        make_receiver = partial(
            KvReceiver,
            pool,
            listen=listen,
            epoch=info.epoch,
            transports=transports,
            digests=receiving.digests,
            credit_bytes=receiving.credit_bytes,
        )
        make_sender = partial(KvSender, pool, transports=transports)
        plane = PoolPlane(layout, make_sender, make_receiver if listen else None, transfers.hear)
        transfers.attach(plane)
        self._plane = plane
        self._pool, self._transports, self._receiving = pool, transports, receiving
        copier = CopierThread(layout, PoolCopyPlane(pool, transports), shared, self._lifecycle, replicas)
        super().__init__(info, shared, self._lifecycle, transfers, copier, grammars)
        # The step under way.
        self._computing: list[PlannedSlice] = []

    def check_integrity(self) -> None:
        with self._shared.lock:
            self._lifecycle.check_integrity()
            self._copier.copier.check_integrity()

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        """Reserve KV blocks; return a ticket for pushing KV into them. The future is done when this returns."""
        sequence, granted = self._transfers.reserve(request, expires_in_s, source, held_tokens)
        if sequence is not None:
            self._transfers.grant(sequence, sequence.block_ids)
        return granted

    def kv_flow(self) -> KvFlow:
        flow, replicas = super().kv_flow(), self._lifecycle.replicas
        if replicas is None:
            return flow
        # Replicas have a receiver of their own, but their quarantined blocks are missing in the same pool.
        quarantined = flow.receiving.quarantined_block_count + replicas.flow().receiving.quarantined_block_count
        return replace(flow, receiving=replace(flow.receiving, quarantined_block_count=quarantined))

    def keep_replicas(self, listen: Ordered[KvEndpoint], epoch: int) -> Replicas:
        assert self._lifecycle.replicas is None, "kept already"
        replicas = PoolReplicas(
            self._pool,
            self._lifecycle.residency.allocator,
            listen=listen,
            transports=self._transports,
            epoch=epoch,
            receiving=self._receiving,
            min_free=min_free_blocks(self.info.total_blocks),
            on_freed=self._wake,
        )
        with self._shared.lock:
            self._lifecycle.replicas = replicas
        return replicas

    def keep(self, key: EngineKey, replica: ReplicaKey) -> None:
        with self._shared.lock:
            self._shared.require_alive()
            self._lifecycle.set_kept_as(key, replica)

    def promote(self, request: EngineRequest, replica: ReplicaKey, held_tokens: int) -> None:
        self.info.require_servable(request)
        self.info.require_held_tokens(request, held_tokens)
        with self._shared.lock:
            self._shared.require_alive()
            self._lifecycle.promote(request, replica, held_tokens)

    def _wake(self) -> None:
        with self._shared.lock:
            self._shared.wake()

    # The engine thread.

    def _run(self) -> None:
        super()._run()
        if self._shared.broken is not None:
            self._copier.close()

    def _loop(self) -> None:
        planned: list[PlannedSlice] = []
        while True:
            with self._shared.lock:
                if not planned:
                    self._shared.sleep()
                if self._shared.closing:
                    return
                self._shared.woken = False
                self._shared.turns.turn_count += 1
                planned = self._lifecycle.plan()
                replicas, wanted_blocks = self._lifecycle.replicas, self._lifecycle.wanted_blocks()
                stopping = self._lifecycle.last_blocks() if self._lifecycle.residency.stopping else []
            # The tokens of the last step, too: once this one has its blocks.
            self._shared.publish()
            if replicas is not None and wanted_blocks > 0:
                replicas.evict(wanted_blocks)
            if stopping:
                self._stop(stopping)
            if planned:
                began_s = time.monotonic()
                self._step(planned)
                self._shared.stepped(time.monotonic() - began_s)

    def _members(self) -> list[StepMember]:
        return self._lifecycle.members(self._computing)

    def _stop(self, stopping: list[tuple[Sequence, list[int]]]) -> None:
        self._runner.completed([block for _, block_ids in stopping for block in block_ids])
        with self._shared.lock:
            for sequence, _ in stopping:
                self._lifecycle.stopped(sequence)
        # One may have continued meanwhile, and been preempted.
        self._shared.publish()
        self._copier.wake()

    def _step(self, planned: list[PlannedSlice]) -> None:
        advances = []
        batch = []
        self._computing = planned
        for sequence, token_count in planned:
            batch.append(sequence.slice(token_count))
            if sequence.source is not None:
                advances.append((sequence.source, sequence.computed + token_count))
            if sequence.runner_unaware:
                self._runner.landed(sequence.block_ids[: self._layout.block_count(sequence.computed)])
                sequence.runner_unaware = False
        if advances:
            self._plane.begin_step(advances)
            drawn = self._runner.run(batch, self._plane.layer_done)
            self._plane.end_step()
        else:
            drawn = self._runner.run(batch, None)
        copied = any(sequence.is_copied for sequence, _ in planned)
        mirrored = self._lifecycle.unmirrored_blocks(planned) if copied else []
        if mirrored:
            self._runner.completed([block for _, block_ids in mirrored for block in block_ids])
        with self._shared.lock:
            self._shared.turns.computed_tokens += sum(token_count for _, token_count in planned)
            computed, unwanted = self._lifecycle.apply(planned, drawn, mirrored)
        self._computing = []
        if mirrored:
            self._copier.wake()
        # No first token waits for the hand-over of its KV.
        if computed:
            self._shared.publish()
        for source, first_token_id in computed:
            self._plane.hand_over(source, first_token_id)
        for transfer_id in unwanted:
            self._plane.abort_push(transfer_id)


def _allocated(layout: KvLayout, total_blocks: int) -> KvPool:
    try:
        return KvPool(layout, total_blocks)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        pool_bytes = layout.layer_count * total_blocks * layout.block_bytes
        raise ConfigError("kv_cache_memory", f"{pool_bytes} bytes cannot be allocated here: {error}") from error
