"""Every transition of a request inside a stepwise engine, and the events that tell of it. No I/O, no threads, no clock.

The caller serialises all calls, runs the model between plan() and apply(), and carries out the transfers. So an engine
with threads (stepwise.py) and one that runs on a simulated clock share all decisions.
"""

from collections.abc import Callable, Iterable

from kaveri.engine.contract import (
    AttemptKey,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FirstToken,
    KvPushed,
    KvPushFailed,
    Landed,
    LandingFailed,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.engine.phase import Phase
from kaveri.engine.pushes import Source, first_token_of, ticket_refusal
from kaveri.engine.stepwise.account import Account
from kaveri.engine.stepwise.batch import PlannedSlice, form_step
from kaveri.engine.stepwise.runner import Drawn, NoToken
from kaveri.engine.stepwise.sequence import Sequence
from kaveri.engine.stopping import finish_reason
from kaveri.errors import InvalidArgument
from kaveri.kv.transfer.receiver import TransferLanded, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import Ticket


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
        """put: takes events, in the order in which things happen. on_work: called when plan() may have something new.

        chunk_tokens: most prompt tokens of a step. max_batch: most decode requests of a step.
        """
        self._info = info
        self._chunk_tokens = chunk_tokens
        self._put = put
        self._on_work = on_work
        self._account = Account(info.layout, info.total_blocks, max_batch, on_free=on_work)
        self._push_owners: dict[bytes, Sequence] = {}
        self._landing_owners: dict[bytes, Sequence] = {}

    def open_prefill(self, request: EngineRequest) -> None:
        """Takes the prompt's blocks and queues it. Raises RequestAlreadyExists and NoCapacity."""
        sequence = Sequence.of(request, Phase.PREFILLING)
        self._account.open_prefill(sequence)
        sequence.source = Source(sequence.block_ids, len(request.token_ids))
        self._on_work()

    def open_push(self, key: AttemptKey, ticket: Ticket) -> Sequence | None:
        """The sequence whose push by this ticket is to begin. None: unknown key, or refused with KvPushFailed.

        Raises InvalidArgument while an earlier push of the request is open.
        """
        sequence = self._account.prefills.get(key)
        if sequence is None:
            return None
        if sequence.transfer_id is not None:
            raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the push before it has failed")
        assert sequence.source is not None
        refusal = ticket_refusal(ticket, sequence.source.token_count)
        if ticket.transfer_id in self._push_owners:
            refusal = "the ticket is in use by another push"
        if refusal is not None:
            self._put(KvPushFailed(key, refusal))
            return None
        sequence.transfer_id = ticket.transfer_id
        self._push_owners[ticket.transfer_id] = sequence
        return sequence

    def end_push(self, event: PushAccepted | PushFailed) -> None:
        """A push has ended: its blocks are no longer read for it."""
        sequence = self._push_owners.pop(event.transfer_id, None)
        if sequence is None:
            return
        sequence.transfer_id = None
        if sequence.done:
            self._account.settle(sequence)
        elif isinstance(event, PushAccepted):
            self._account.end(sequence)
            self._put(KvPushed(sequence.key, event.kv_bytes, event.transport))
        else:
            self._put(KvPushFailed(sequence.key, event.reason))

    def open_landing(self, request: EngineRequest, transfer_id: bytes) -> Sequence:
        """Takes the blocks of the prompt and one more token for a transfer that is granted next.

        Raises RequestAlreadyExists and NoCapacity.
        """
        sequence = Sequence.of(request, Phase.RESERVED)
        self._account.open_decode(sequence)
        sequence.transfer_id = transfer_id
        self._landing_owners[transfer_id] = sequence
        return sequence

    def cancel_landing(self, sequence: Sequence, transfer_id: bytes) -> None:
        """The transfer could not be granted."""
        self._landing_owners.pop(transfer_id, None)
        sequence.transfer_id = None
        if sequence.done:
            self._account.settle(sequence)
        else:
            self._account.end(sequence)

    def end_landing(self, event: TransferLanded | TransferReleased) -> None:
        """A granted transfer has ended: nothing writes into its blocks any more."""
        sequence = self._landing_owners.pop(event.transfer_id, None)
        if sequence is None:
            return
        sequence.transfer_id = None
        if sequence.done:
            self._account.settle(sequence)
            return
        if isinstance(event, TransferLanded):
            first_token_id = first_token_of(event.note)
            if first_token_id is not None and first_token_id < self._info.vocab_size:
                sequence.computed = len(sequence.token_ids)
                sequence.token_ids.append(first_token_id)
                sequence.draw_index += 1
                sequence.runner_unaware = True
                self._account.residency.land(sequence)
                # A preempted request may take the blocks of one that is not admitted yet.
                self._on_work()
                self._put(Landed(sequence.key, event.kv_bytes))
                return
            # The sender counts it as accepted, so only this side can report the loss.
            failure: RequestFailed | LandingFailed = RequestFailed(
                sequence.key, "the hand-over names no token of this model"
            )
        else:
            failure = LandingFailed(sequence.key, event.reason)
        self._account.end(sequence)
        self._put(failure)

    def adopt(self, key: AttemptKey) -> None:
        """A computed prompt without an open push becomes a landed request here. Others are ignored."""
        sequence = self._account.prefills.get(key)
        if sequence is not None and sequence.phase is Phase.COMPUTED and sequence.transfer_id is None:
            for preempted in self._account.adopt(sequence):
                self._put(Preempted(preempted.key))
            # A preempted request may take the blocks of one that is not admitted yet.
            self._on_work()

    def admit(self, key: AttemptKey) -> None:
        """A landed request may run from the next step on. Others are ignored."""
        sequence = self._account.decodes.get(key)
        if sequence is not None and sequence.phase is Phase.LANDED:
            self._account.residency.admit(sequence)
            self._on_work()

    def abort(self, key: AttemptKey) -> tuple[bytes | None, bytes | None]:
        """Ends the request on both sides. Returns its open push and its open landing, for the caller to end."""
        push_id = landing_id = None
        if (prefill := self._account.prefills.get(key)) is not None:
            self._account.end(prefill)
            push_id = prefill.transfer_id
        if (decode := self._account.decodes.get(key)) is not None:
            self._account.end(decode)
            landing_id = decode.transfer_id
        return push_id, landing_id

    def plan(self) -> list[PlannedSlice]:
        """Forms the next step and marks its sequences; empty when there is nothing to do."""
        for sequence in self._account.residency.prepare_step():
            self._put(Preempted(sequence.key))
        planned = form_step(self._account.residency.running, self._account.prefilling, self._chunk_tokens)
        for sequence, _ in planned:
            sequence.in_step = True
            if sequence.phase is Phase.PREFILLING and not sequence.started:
                sequence.started = True
                self._put(PrefillStarted(sequence.key))
        return planned

    def apply(
        self, planned: list[PlannedSlice], drawn: Iterable[Drawn]
    ) -> tuple[list[tuple[Source, int]], list[bytes]]:
        """Accounts for a step that has run.

        Returns the computed prompts to hand over, each with the token drawn behind it, and the pushes to abort.
        """
        computed: list[tuple[Source, int]] = []
        unwanted: list[bytes] = []
        steps: list[TokenStep] = []
        for (sequence, token_count), token in zip(planned, drawn, strict=True):
            sequence.in_step = False
            if sequence.done:
                self._account.settle(sequence)
                continue
            sequence.computed += token_count
            if sequence.pending > 0:
                if sequence.phase is Phase.PREFILLING:
                    self._put(PrefillProgress(sequence.key, sequence.computed))
                continue
            assert token is not None, "the runner has drawn no token at the end of a sequence"
            if isinstance(token, NoToken):
                if sequence.phase is Phase.PREFILLING and sequence.transfer_id is not None:
                    unwanted.append(sequence.transfer_id)
                self._put(RequestFailed(sequence.key, token.reason))
                self._account.end(sequence)
                continue
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
            if sequence.phase is Phase.PREFILLING:
                self._put(FirstToken(sequence.key, token.token_id, token.logprobs, finish))
                self._account.prefilling.remove(sequence)
                sequence.phase = Phase.COMPUTED
                assert sequence.source is not None
                computed.append((sequence.source, token.token_id))
            else:
                steps.append(TokenStep(sequence.key, index, token.token_id, token.logprobs, finish))
            if finish is not None:
                if sequence.phase is Phase.COMPUTED:
                    computed.pop()
                    if sequence.transfer_id is not None:
                        unwanted.append(sequence.transfer_id)
                self._account.end(sequence)
        if steps:
            self._put(StepTokens(tuple(steps)))
        return computed, unwanted

    def clear(self) -> None:
        """Frees the whole pool. Nothing runs and no transfer is open any more."""
        self._account.clear()
        self._push_owners.clear()
        self._landing_owners.clear()

    def stats(self) -> EngineStats:
        """See Engine.stats()."""
        return self._account.stats()

    def check_integrity(self) -> None:
        """See Engine.check_integrity()."""
        self._account.check_integrity()
