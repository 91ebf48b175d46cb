"""State transitions of requests inside a stepwise engine, and the events they cause. No I/O, no threads, no clock.

The caller serializes all calls, runs the model between plan() and apply(), and carries out the transfers: an engine
with threads (engine.py) and a simulated one share all decisions.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable

from kaveri.engine.blame import StepMember
from kaveri.engine.contract import (
    EngineEvent,
    EngineInfo,
    EngineKey,
    EngineRequest,
    EngineStats,
    FirstToken,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    PromptLogprobs,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.engine.copier import BlockPlace
from kaveri.engine.kv_plane import Source
from kaveri.engine.stepwise.residency import Residency
from kaveri.engine.stepwise.runner import Drawn, NoToken, ScoredSlice
from kaveri.engine.stepwise.sequence import PlannedSlice, Sequence, SequencePhase, form_step
from kaveri.engine.stopping import finish_reason
from kaveri.engine.token_rules import TokenRules
from kaveri.errors import NoCapacity, RequestAlreadyExists
from kaveri.kv.replicas.replica import Replica
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.text.grammars import Grammars

_RETRY_AFTER_S = 0.1
_MIN_FREE_SHARE = 1 / 16
"""Share of the blocks that replicas leave free, for requests that come and grow."""


def min_free_blocks(total_blocks: int) -> int:
    """Return the number of an engine's blocks that replicas in its pool leave free."""
    return max(1, int(_MIN_FREE_SHARE * total_blocks))


class Lifecycle:
    """Requests of one stepwise engine and their blocks; implements EngineAccount (threaded.py).

    put: receives events, in order. on_work: called when plan() may return something new, or blocks have become free.
    chunk_tokens: most prompt tokens of a step. max_batch: most decode requests of a step.
    """

    def __init__(
        self,
        info: EngineInfo,
        chunk_tokens: int,
        max_batch: int,
        put: Callable[[EngineEvent], None],
        on_work: Callable[[], None],
        grammars: Grammars | None = None,
    ) -> None:
        self._info = info
        self._grammars = grammars
        self._chunk_tokens = chunk_tokens
        self._put = put
        self._on_work = on_work
        self._was_suspects = False
        """True if the last step computed a suspect."""
        self.prefills: dict[EngineKey, Sequence] = {}
        self._prefilling: deque[Sequence] = deque()
        """Requests of `prefills` that are not fully computed, in the order of submission."""
        self.decodes: dict[EngineKey, Sequence] = {}
        self._quarantined: set[Sequence] = set()
        """Ended requests whose blocks a step or a transfer can still touch."""
        self.residency = Residency(BlockAllocator(info.total_blocks), info.layout, max_batch)
        self.replicas: Replicas | None = None
        """Replicas of other instances' requests, in blocks that no request here needs; None: none are kept."""
        self._missing_blocks = 0
        """Most blocks that a refused request lacked since the last step."""

    def open_prefill(self, request: EngineRequest) -> Sequence:
        sequence = self._open(self.prefills, "prefill", request, SequencePhase.PREFILLING, len(request.token_ids))
        self._prefilling.append(sequence)
        sequence.source = Source(sequence.block_ids, len(request.token_ids))
        self._on_work()
        return sequence

    def adopt(self, key: EngineKey) -> None:
        sequence = self.prefills.get(key)
        if sequence is not None and sequence.phase is SequencePhase.COMPUTED and sequence.transfer_id is None:
            sequence.mirrored = sequence.computed // self._info.layout.block_tokens
            if key in self.decodes:
                raise RequestAlreadyExists(key.request_id)
            self.decodes[key] = self.prefills.pop(key)
            sequence.source = None
            self.residency.land(sequence)
            self._put_preempted(self.residency.make_whole(sequence))
            # A preempted request may take the blocks of one that is not admitted yet.
            self._on_work()

    def admit(self, key: EngineKey) -> None:
        sequence = self.decodes.get(key)
        if sequence is not None and sequence.phase is SequencePhase.LANDED:
            self.residency.admit(sequence)
            self._on_work()

    # For its transfers; see TransferAccount (transfers.py).

    def open_decode(self, request: EngineRequest, held_tokens: int | None) -> Sequence:
        """Add a request to decode, with blocks for prompt and next token. Raises RequestAlreadyExists, NoCapacity."""
        token_count = len(request.token_ids) + 1
        return self._open(self.decodes, "decode", request, SequencePhase.RESERVED, token_count, held_tokens)

    def promote(self, request: EngineRequest, replica: ReplicaKey, held_tokens: int) -> None:
        """Turn a replica into a request whose KV has landed. Raises as KeepingEngine.promote()."""
        replicas, held_blocks = self.replicas, self._info.layout.block_count(held_tokens)
        assert replicas is not None, "no replicas are kept"
        sequence = self._open(
            self.decodes,
            "decode",
            request,
            SequencePhase.RESERVED,
            len(request.token_ids) + 1,
            held_tokens,
            allocate=lambda owner, count: replicas.give_blocks(replica, owner, held_tokens, count - held_blocks),
            held_blocks=held_blocks,
        )
        self.land(sequence, None)

    def touch(self, sequence: Sequence, transfer_id: bytes | None) -> None:
        sequence.transfer_id = transfer_id
        if sequence.done:
            self._settle(sequence)

    def land(self, sequence: Sequence, first_token_id: int | None) -> str | None:
        sequence.computed = sequence.held_tokens or len(sequence.token_ids)
        if first_token_id is not None:
            sequence.token_ids.append(first_token_id)
            sequence.draw_index += 1
        sequence.mirrored = sequence.computed // self._info.layout.block_tokens
        sequence.runner_unaware = True
        self.residency.land(sequence)
        # A preempted request may take the blocks of one that is not admitted yet.
        self._on_work()
        return None

    def end(self, sequence: Sequence) -> None:
        """End a request, which has no more events. Its blocks are freed once no step or transfer can touch them."""
        sequence.done = True
        if sequence.phase in (SequencePhase.PREFILLING, SequencePhase.COMPUTED):
            del self.prefills[sequence.key]
            if sequence.phase is SequencePhase.PREFILLING:
                self._prefilling.remove(sequence)
        else:
            del self.decodes[sequence.key]
            self.residency.remove(sequence)
        self._settle(sequence)

    def set_kept_as(self, key: EngineKey, replica: ReplicaKey) -> None:
        """Set the key of the replica to make of a request's blocks when it leaves. Ignores unknown requests."""
        sequence = self.prefills.get(key) or self.decodes.get(key)
        if sequence is not None:
            sequence.kept_as = replica

    def keep(self, sequence: Sequence) -> int:
        block_tokens, kept_as = self._info.layout.block_tokens, sequence.kept_as
        block_count = sequence.computed // block_tokens
        token_ids = sequence.token_ids[: block_count * block_tokens]
        assert kept_as is not None, "keep() was not called"
        if self.replicas is None or not token_ids or not self.replicas.take_blocks(kept_as, sequence, token_ids):
            return 0
        del sequence.block_ids[:block_count]
        return len(token_ids)

    def abort(self, key: EngineKey) -> tuple[Sequence | None, Sequence | None]:
        prefill, decode = self.prefills.get(key), self.decodes.get(key)
        for sequence in (prefill, decode):
            if sequence is not None:
                self.end(sequence)
        return prefill, decode

    # For their copies; see CopyAccount (copier.py).

    def whole_blocks(self, sequence: Sequence) -> int:
        return sequence.mirrored

    def place_of(self, sequence: Sequence, index: int) -> BlockPlace:
        return BlockPlace(sequence.block_ids[index], sequence.generation)

    def tokens_of(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        return sequence.token_ids[start:stop]

    def stop(self, sequence: Sequence) -> str | None:
        if sequence.phase not in (SequencePhase.LANDED, SequencePhase.WAITING, SequencePhase.RUNNING):
            return "its KV is not here"
        if not sequence.block_ids or sequence.pending != 1:
            return "it is being computed again"
        self.residency.stop(sequence)
        # The engine's thread copies the last block to the pool.
        self._on_work()
        return None

    def stopped_tokens(self, sequence: Sequence) -> int | None:
        return sequence.computed if sequence.phase is SequencePhase.STOPPED else None

    def go_on(self, sequence: Sequence) -> None:
        self._put_preempted(self.residency.go_on(sequence))
        self._on_work()

    def last_blocks(self) -> list[tuple[Sequence, list[int]]]:
        """Return the requests being stopped that are in no step, each with its blocks that are not in the host pool
        yet. They keep these blocks until stopped() is called."""
        stopping, block_count = self.residency.stopping, self._info.layout.block_count
        last_blocks = [
            (
                sequence,
                []
                if sequence.runner_unaware
                else sequence.block_ids[sequence.mirrored : block_count(sequence.computed)],
            )
            for sequence in stopping
            if not sequence.in_step
        ]
        for sequence, _ in last_blocks:
            sequence.is_saving = True
        return last_blocks

    def stopped(self, sequence: Sequence) -> None:
        """Record that a stopping request's last blocks are in the host pool. It may have ended or continued before."""
        sequence.is_saving = False
        if sequence.done:
            self._settle(sequence)
        elif sequence.phase is SequencePhase.STOPPING:
            self.residency.stopped(sequence)
        else:
            self._put_preempted(self.residency.make_whole(sequence))

    def unmirrored_blocks(self, planned: list[PlannedSlice]) -> list[tuple[Sequence, list[int]]]:
        """Return the step's requests that are copied to replicas, each with the blocks that the step fills up."""
        block_tokens = self._info.layout.block_tokens
        return [
            (sequence, sequence.block_ids[sequence.mirrored : (sequence.computed + token_count) // block_tokens])
            for sequence, token_count in planned
            if sequence.is_copied
        ]

    # Steps.

    def plan(self) -> list[PlannedSlice]:
        """Form the next step, empty if there is nothing to compute. Its sequences count as in a step until apply()."""
        if preempted := self.residency.prepare_step():
            self._put_preempted(preempted)
        running, suspect_first = self.residency.running, not self._was_suspects
        planned = form_step(running, self._prefilling, self._chunk_tokens, suspect_first=suspect_first)
        # Suspects and others take turns.
        self._was_suspects = any(sequence.suspect_until and sequence.is_suspect for sequence, _ in planned)
        for sequence, _ in planned:
            sequence.in_step = True
            if sequence.phase is SequencePhase.PREFILLING and sequence.computed == 0:
                self._put(PrefillStarted(sequence.key))
        return planned

    def wanted_blocks(self) -> int:
        """Return how many blocks evict() should free: those that refused and preempted requests lack, and those that
        running ones may need before the next call. Called once per step."""
        if self.replicas is None:
            return 0
        free, spare = self.residency.allocator.free_count, len(self.residency.running)
        wanted, self._missing_blocks = self._missing_blocks, 0
        if self.residency.short_of_blocks:
            first = next(sequence for sequence in self.residency.waiting if not sequence.block_ids)
            wanted = max(wanted, self._info.layout.block_count(len(first.token_ids)) + spare - free)
        # At half of it, so that replicas are not evicted at each step.
        min_free = max(min_free_blocks(self._info.total_blocks), 2 * spare)
        return max(wanted, min_free - free if free <= min_free // 2 else 0)

    @staticmethod
    def members(planned: list[PlannedSlice]) -> list[StepMember]:
        """Return the unfinished requests of a step that raised."""
        return [
            StepMember(sequence.key, sequence.draw_index, sequence.suspect_until)
            for sequence, _ in planned
            if not sequence.done
        ]

    def apply(
        self,
        planned: list[PlannedSlice],
        drawn: Iterable[Drawn],
        mirrored: Iterable[tuple[Sequence, list[int]]] = (),
    ) -> tuple[list[tuple[Source, int]], list[bytes]]:
        """Record the results of a step: update the requests and emit events. mirrored: unmirrored_blocks() of the step,
        which are in the host pool now.

        Returns the computed prompts, each with the token drawn after it, for the push to deliver; and ids of pushes to
        abort.
        """
        for sequence, block_ids in mirrored:
            sequence.mirrored += len(block_ids)
        computed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        steps: list[TokenStep] = []
        for (sequence, token_count), token in zip(planned, drawn, strict=True):
            sequence.in_step = False
            if sequence.done:
                self._settle(sequence)
                continue
            sequence.computed += token_count
            if isinstance(token, ScoredSlice):
                if token.entries:
                    first = sequence.computed - token_count + 1
                    self._put(PromptLogprobs(sequence.key, first, token.entries))
                token = token.drawn
            if isinstance(token, NoToken):
                if sequence.phase is SequencePhase.PREFILLING and sequence.transfer_id is not None:
                    unwanted.append(sequence.transfer_id)
                self._put(RequestFailed(sequence.key, token.reason, token.is_final))
                self.end(sequence)
                continue
            if sequence.pending > 0:
                if sequence.phase is SequencePhase.PREFILLING:
                    self._put(PrefillProgress(sequence.key, sequence.computed))
                continue
            assert token is not None, "the runner has drawn no token at the end of a sequence"
            index = sequence.draw_index
            sequence.token_ids.append(token.token_id)
            sequence.draw_index = index + 1
            finish = finish_reason(
                sequence.params,
                self._info.eos_token_ids,
                token.token_id,
                index,
                len(sequence.token_ids),
                self._info.max_model_len,
            )
            if sequence.phase is SequencePhase.PREFILLING:
                self._put(FirstToken(sequence.key, token.token_id, token.logprobs, finish))
                self._prefilling.remove(sequence)
                sequence.phase = SequencePhase.COMPUTED
                assert sequence.source is not None
                computed.append((sequence.source, token.token_id))
            else:
                steps.append(TokenStep(sequence.key, index, token.token_id, token.logprobs, finish))
            if finish is not None:
                if sequence.phase is SequencePhase.COMPUTED:
                    computed.pop()
                    if sequence.transfer_id is not None:
                        unwanted.append(sequence.transfer_id)
                self.end(sequence)
        if steps:
            self._put(StepTokens(tuple(steps)))
        return computed, unwanted

    def clear(self) -> None:
        for owner in self._owners():
            self.residency.allocator.release(owner)
        for container in (self.prefills, self._prefilling, self.decodes, self.residency, self._quarantined):
            container.clear()

    def stats(self) -> EngineStats:
        admitted = len(self.residency.running) + len(self.residency.waiting)
        held = (*self.prefills.values(), *self.decodes.values())
        evictable = self.replicas.evictable_blocks if self.replicas is not None else 0
        return EngineStats(
            free_blocks=self.residency.allocator.free_count + evictable,
            running_requests=len(self._prefilling) + admitted,
            waiting_requests=len(self.decodes) - admitted,
            pending_prefill_tokens=sum(sequence.pending for sequence in self._prefilling),
            context_tokens=sum(sequence.computed for sequence in held),
        )

    def check_integrity(self) -> None:
        """Assert that every KV block is free, held by a live request, or kept while a step or transfer may touch it."""
        live = [*self.prefills.values(), *self.decodes.values(), *self._quarantined]
        self.residency.allocator.check_integrity()
        strangers = self._owners() - set(live)
        assert not strangers, f"blocks are held by {strangers}"
        for sequence in live:
            held = self.residency.allocator.blocks_of(sequence)
            assert held == tuple(sequence.block_ids), f"{sequence.key}: blocks {sequence.block_ids}, allocator {held}"
        assert all(sequence.done and sequence.touched for sequence in self._quarantined), "quarantined without a reason"
        self.residency.check_integrity(self.decodes.values())

    def _owners(self) -> set[Hashable]:
        """Return the owners of blocks that are not replicas."""
        return {owner for owner in self.residency.allocator.owners() if not isinstance(owner, Replica)}

    def _open(
        self,
        table: dict[EngineKey, Sequence],
        role: str,
        request: EngineRequest,
        phase: SequencePhase,
        token_count: int,
        held_tokens: int | None = None,
        allocate: Callable[[Sequence, int], list[int]] | None = None,
        held_blocks: int = 0,
    ) -> Sequence:
        if request.key in table:
            raise RequestAlreadyExists(request.key.request_id)
        # New requests would take the blocks that a preempted one waits for.
        if self.residency.short_of_blocks:
            raise NoCapacity(role, _RETRY_AFTER_S, "a preempted request waits for blocks")
        sequence = Sequence(
            request.key,
            request.params,
            list(request.token_ids),
            request.generated_count,
            phase,
            held_tokens,
            suspect_until=request.suspect_until,
            prompt_tokens=len(request.token_ids),
        )
        if request.params.has_rules:
            sequence.rules = TokenRules(
                request.params,
                sequence.token_ids,
                request.prompt_tokens,
                self._info.vocab_size,
                self._info.eos_token_ids,
                self._grammars,
            )
        block_count = self._info.layout.block_count(token_count)
        if self.replicas is not None and self.replicas.evictable_blocks:
            self._require_free(role, block_count - held_blocks)
        try:
            sequence.block_ids += (allocate or self.residency.allocator.allocate)(sequence, block_count)
        except NoCapacity as error:
            raise NoCapacity(role, _RETRY_AFTER_S, error.reason) from error
        table[sequence.key] = sequence
        return sequence

    def _require_free(self, role: str, wanted: int) -> None:
        """Raise NoCapacity, and have replicas evicted, unless `wanted` blocks are free and one more for each running
        request: without that one it could be preempted although replicas can be evicted."""
        missing = wanted + len(self.residency.running) - self.residency.allocator.free_count
        if missing > 0:
            self._missing_blocks = max(self._missing_blocks, missing)
            self._on_work()
            raise NoCapacity(role, _RETRY_AFTER_S, f"{missing} blocks of replicas are being freed")

    def _settle(self, sequence: Sequence) -> None:
        """Free the blocks of an ended request, or keep them while a step or a transfer can touch them."""
        if sequence.touched:
            self._quarantined.add(sequence)
        else:
            self._quarantined.discard(sequence)
            self.residency.allocator.release(sequence)
            self._on_work()

    def _put_preempted(self, preempted: Iterable[Sequence]) -> None:
        for sequence in preempted:
            self._put(Preempted(sequence.key))
