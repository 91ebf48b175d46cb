"""Every transition of a request inside a stepwise engine, and the events that it causes. No I/O, no threads, no clock.

The caller serialises all calls, runs the model between plan() and apply(), and carries out the transfers. So an engine
with threads (stepwise.py) and one that runs on a simulated clock share all decisions.
"""

from collections.abc import Callable, Iterable

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
from kaveri.engine.pushes import Source
from kaveri.engine.stepwise.account import Account
from kaveri.engine.stepwise.batch import PlannedSlice, form_step
from kaveri.engine.stepwise.phase import SequencePhase
from kaveri.engine.stepwise.runner import Drawn, NoToken, ScoredSlice
from kaveri.engine.stepwise.sequence import Sequence
from kaveri.engine.stopping import finish_reason


class Lifecycle:
    """The requests of one stepwise engine."""

    def __init__(
        self,
        info: EngineInfo,
        chunk_tokens: int,
        max_batch: int,
        put: Callable[[EngineEvent], None],
        on_work: Callable[[], None],
    ) -> None:
        """put: takes events, in order. on_work: called when plan() may return something new.

        chunk_tokens: most prompt tokens of a step. max_batch: most decode requests of a step.
        """
        self._info = info
        self._chunk_tokens = chunk_tokens
        self._put = put
        self._on_work = on_work
        self._was_suspects = False
        """True if the last step computed a suspect."""
        self._account = Account(info.layout, info.total_blocks, max_batch, on_free=on_work)

    def open_prefill(self, request: EngineRequest) -> None:
        """Take the prompt's blocks and queue it. Raises RequestAlreadyExists and NoCapacity."""
        sequence = Sequence.of(request, SequencePhase.PREFILLING)
        self._account.open_prefill(sequence)
        sequence.source = Source(sequence.block_ids, len(request.token_ids))
        self._on_work()

    def landing_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks of a reserved request that KV lands in."""
        return sequence.block_ids[: self._info.layout.block_count(sequence.held_tokens or sequence.prompt_tokens)]

    def adopt(self, key: EngineKey) -> None:
        """Turn a computed prompt without an open push into a landed request here. Others are ignored."""
        sequence = self._account.prefills.get(key)
        if sequence is not None and sequence.phase is SequencePhase.COMPUTED and sequence.transfer_id is None:
            sequence.mirrored = sequence.computed // self._info.layout.block_tokens
            for preempted in self._account.adopt(sequence):
                self._put(Preempted(preempted.key))
            # A preempted request may take the blocks of one that is not admitted yet.
            self._on_work()

    def admit(self, key: EngineKey) -> None:
        """Let a landed request run from the next step on. Others are ignored."""
        sequence = self._account.decodes.get(key)
        if sequence is not None and sequence.phase is SequencePhase.LANDED:
            self._account.residency.admit(sequence)
            self._on_work()

    # For its transfers; see TransferAccount (transfers.py).

    def find_prefill(self, key: EngineKey) -> Sequence | None:
        return self._account.prefills.get(key)

    def open_decode(self, request: EngineRequest, held_tokens: int | None) -> Sequence:
        """Take the blocks of the prompt and one more token."""
        sequence = Sequence.of(request, SequencePhase.RESERVED)
        sequence.held_tokens = held_tokens
        self._account.open_decode(sequence)
        return sequence

    def hold(self, sequence: Sequence, transfer_id: bytes) -> None:
        sequence.transfer_id = transfer_id

    def let_go(self, sequence: Sequence) -> None:
        sequence.transfer_id = None
        if sequence.done:
            self._account.settle(sequence)

    def land(self, sequence: Sequence, first_token_id: int | None) -> str | None:
        sequence.computed = sequence.held_tokens or len(sequence.token_ids)
        if first_token_id is not None:
            sequence.token_ids.append(first_token_id)
            sequence.draw_index += 1
        sequence.mirrored = sequence.computed // self._info.layout.block_tokens
        sequence.runner_unaware = True
        self._account.residency.land(sequence)
        # A preempted request may take the blocks of one that is not admitted yet.
        self._on_work()
        return None

    def end(self, sequence: Sequence) -> None:
        self._account.end(sequence)

    def abort(self, key: EngineKey) -> tuple[Sequence | None, Sequence | None]:
        prefill, decode = self._account.prefills.get(key), self._account.decodes.get(key)
        for sequence in (prefill, decode):
            if sequence is not None:
                self._account.end(sequence)
        return prefill, decode

    # For their copies; see CopyAccount (copier.py).

    def find_decode(self, key: EngineKey) -> Sequence | None:
        return self._account.decodes.get(key)

    def begin_copy(self, sequence: Sequence) -> None:
        sequence.is_copied = True

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
        self._account.residency.stop(sequence)
        # The engine's thread copies the last block to the pool.
        self._on_work()
        return None

    def stopped_tokens(self, sequence: Sequence) -> int | None:
        return sequence.computed if sequence.phase is SequencePhase.STOPPED else None

    def go_on(self, sequence: Sequence) -> None:
        for preempted in self._account.residency.go_on(sequence):
            self._put(Preempted(preempted.key))
        self._on_work()

    def last_blocks(self) -> list[tuple[Sequence, list[int]]]:
        """Return, for each request that is being stopped and is in no step, the blocks that are not in the pool yet.
        The pool holds all KV that the runner has not taken over. They are free for others after stopped() at the
        earliest."""
        stopping, block_count = self._account.residency.stopping, self._info.layout.block_count
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
        """Record that its last blocks are in the pool now. It may have ended or continued meanwhile."""
        sequence.is_saving = False
        if sequence.done:
            self._account.settle(sequence)
        elif sequence.phase is SequencePhase.STOPPING:
            self._account.residency.stopped(sequence)
        else:
            for preempted in self._account.residency.make_whole(sequence):
                self._put(Preempted(preempted.key))

    def unmirrored_blocks(self, planned: list[PlannedSlice]) -> list[tuple[Sequence, list[int]]]:
        """Return, for each request that is copied, the blocks that this step completes."""
        block_tokens = self._info.layout.block_tokens
        return [
            (sequence, sequence.block_ids[sequence.mirrored : (sequence.computed + token_count) // block_tokens])
            for sequence, token_count in planned
            if sequence.is_copied
        ]

    # Steps.

    def plan(self) -> list[PlannedSlice]:
        """Form the next step and mark its sequences; empty when there is nothing to do."""
        for sequence in self._account.residency.prepare_step():
            self._put(Preempted(sequence.key))
        running, prefilling = self._account.residency.running, self._account.prefilling
        planned = form_step(running, prefilling, self._chunk_tokens, suspect_first=not self._was_suspects)
        # Suspects and others take turns.
        self._was_suspects = any(sequence.is_suspect for sequence, _ in planned)
        for sequence, _ in planned:
            sequence.in_step = True
            if sequence.phase is SequencePhase.PREFILLING and not sequence.started:
                sequence.started = True
                self._put(PrefillStarted(sequence.key))
        return planned

    @staticmethod
    def members(planned: list[PlannedSlice]) -> list[StepMember]:
        """Return the requests of a step that has raised, without those that are done."""
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
        """Account for a step that has run. mirrored: its unmirrored_blocks(), which are in the pool now.

        Returns the computed prompts to hand over, each with the token drawn after it, and the pushes to abort.
        """
        for sequence, block_ids in mirrored:
            sequence.mirrored += len(block_ids)
        computed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        steps: list[TokenStep] = []
        for (sequence, token_count), token in zip(planned, drawn, strict=True):
            sequence.in_step = False
            if sequence.done:
                self._account.settle(sequence)
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
                self._account.end(sequence)
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
                self._account.prefilling.remove(sequence)
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
                self._account.end(sequence)
        if steps:
            self._put(StepTokens(tuple(steps)))
        return computed, unwanted

    def clear(self) -> None:
        """Free the whole pool. No step runs and no transfer is open any more."""
        self._account.clear()

    def stats(self) -> EngineStats:
        """See Engine.stats()."""
        return self._account.stats()

    def check_integrity(self) -> None:
        """See Engine.check_integrity()."""
        self._account.check_integrity()
