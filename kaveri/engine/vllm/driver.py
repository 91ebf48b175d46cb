"""The engine thread: tells vLLM what has changed, lets it make a step, and tells what came of it.

The only one that calls vLLM. Within a step vLLM's scheduler calls back, through the connector (see Desk).
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import (
    EngineInfo,
    FirstToken,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    StepTokens,
    TokenStep,
)
from kaveri.engine.phase import Phase
from kaveri.engine.stepwise.runner import NOT_FINITE
from kaveri.engine.stopping import finish_reason
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm.board import Board
from kaveri.engine.vllm.connector_scheduler import Advance, Placement
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.host import Host
from kaveri.engine.vllm.hosted import Hosted
from kaveri.engine.vllm.orders import Chunk
from kaveri.engine.vllm.sampling import decode_params, logprobs_of, prefill_params, refusal_of
from kaveri.errors import NoCapacity
from kaveri.telemetry.logs import get_logger

_STALLED_S = 0.05
"""How long the thread sleeps at most when nothing that vLLM has can run: what changes that wakes it."""
_RETRY_AFTER_S = 0.1
_UNKNOWN = 0
"""Stands for the token that prefill will draw, of which nothing is computed before it is known."""


class Driver:
    """A Desk, and the thread that it is called on."""

    def __init__(
        self,
        board: Board,
        host: Host,
        plane: DataPlane,
        transfers: Transfers[Hosted],
        info: EngineInfo,
        max_batch: int,
    ) -> None:
        self.thread = threading.Thread(target=self._loop, name="kaveri-engine", daemon=True)
        self._board = board
        self._account = board.account
        self._outbox = board.outbox
        self._host = host
        self._plane = plane
        self._transfers = transfers
        self._info = info
        self._max_batch = max_batch
        # Whom the step under way computes.
        self._advances: Sequence[Advance] = ()
        # Whether nothing came of the last step.
        self._stalled = False

    def check(self) -> None:
        """Asserts that vLLM's blocks and the account agree. Between steps: on the engine thread, or when it is not
        running."""
        tables, counts = self._host.tables(), self._host.reference_counts()
        held: dict[int, int] = {}
        for block_ids in tables.values():
            for block in block_ids:
                held[block] = held.get(block, 0) + 1
        assert held == counts, f"vLLM's tables {tables} do not account for its blocks {counts}"
        assert self._host.free_blocks + len(counts) == self._info.total_blocks, "vLLM has lost blocks"
        with self._board.lock:
            self._account.check_integrity(tables)

    # What vLLM's scheduler tells within a step.

    def find(self, number: str) -> Hosted | None:
        """See Desk.find."""
        return self._account.by_number.get(number)

    def stepping(
        self, placements: Sequence[Placement], advances: Sequence[Advance], preempted: Sequence[Hosted]
    ) -> Sequence[Chunk]:
        """See Desk.stepping."""
        chunks: list[Chunk] = []
        unwanted: list[bytes] = []
        with self._board.lock:
            for hosted in preempted:
                if hosted.done:
                    continue
                if hosted.is_source:
                    # Its blocks are written by others from now on: what was queued of them must not be accepted.
                    if hosted.transfer_id is not None:
                        unwanted.append(hosted.transfer_id)
                    self._outbox.put(RequestFailed(hosted.key, "vLLM took back the blocks that it was promised"))
                    self._board.end(hosted)
                else:
                    hosted.preempted = True
                    hosted.computed = hosted.next_blocks = 0
                    self._outbox.put(Preempted(hosted.key))
            for hosted, computed, block_ids in advances:
                hosted.preempted = hosted.behind = False
                hosted.next_blocks = 0
                if hosted.is_source:
                    token_count, new_blocks = len(hosted.request.token_ids), hosted.take(block_ids)
                    chunks.append(Chunk(hosted.number, token_count, new_blocks, hosted.computed, computed))
                    if not hosted.started and not hosted.done:
                        self._outbox.put(PrefillStarted(hosted.key))
                hosted.started = True
            for hosted, first_block, block_ids in placements:
                hosted.take(block_ids)
                last_block = self._info.layout.block_count(len(hosted.request.token_ids))
                hosted.landing_blocks = list(block_ids[first_block:last_block])
            self._account.unused_blocks = self._host.free_blocks
        for transfer_id in unwanted:
            self._plane.abort_push(transfer_id)
        for placement in placements:
            self._transfers.grant(placement.hosted, placement.hosted.landing_blocks, placement.first_block)
        self._advances = advances
        # A request that has begun says so before the step that begins it is computed.
        self._outbox.publish()
        return chunks

    def keeps_blocks(self, hosted: Hosted, token_id: int | None) -> bool:
        """See Desk.keeps_blocks."""
        with self._board.lock:
            if not hosted.is_source:
                # vLLM itself keeps those of a request that still waits for its KV.
                return False
            if hosted.transfer_id is not None:
                return True
            return not hosted.done and token_id is not None and self._finish(hosted, token_id) is None

    # The thread.

    def _loop(self) -> None:
        try:
            while True:
                with self._board.lock:
                    self._sleep(self._stalled)
                    if self._board.closing:
                        return
                    self._board.woken = False
                    added, self._board.added = self._board.added, []
                    checks, self._board.checks = self._board.checks, []
                self._stalled = not self._turn(added)
                for check in checks:
                    self._answer(check)
        # Whatever a step raises, SystemExit too, the state of model and cache is unknown: no request may be left
        # waiting for tokens.
        except BaseException as error:
            self._board.stop(repr(error))
            get_logger().exception("engine_failed", error=repr(error))
        finally:
            if self._board.broken is not None:
                self._transfers.close()

    def _sleep(self, stalled: bool) -> None:
        """Returns when there is something to do. With the lock held."""
        while not (self._board.closing or self._board.woken or self._host.scheduler_side.has_reports):
            runnable = self._runnable_count() > 0
            if runnable and not stalled:
                return
            self._board.work.wait(_STALLED_S if runnable else None)
            stalled = False

    def _runnable_count(self) -> int:
        """Requests that the next step could compute something for."""
        return self._host.unfinished_count - self._account.idle_count()

    def _turn(self, added: Sequence[Hosted]) -> bool:
        """Tells vLLM what has changed and lets it make a step. Whether anything came of it."""
        for hosted in added:
            self._add(hosted)
        self._release_ended()
        self._admit_waiting()
        reporting = self._host.scheduler_side.has_reports
        outputs: Sequence[Any] = ()
        self._advances = ()
        if reporting or self._runnable_count():
            outputs = self._host.step()
        advanced = bool(self._advances)
        self._settle_step(outputs)
        # Nothing waits for room inside vLLM: it would be granted when nobody wants it any more.
        for hosted in added:
            if hosted.by_transfer and not hosted.placed and not hosted.done:
                self._transfers.refuse(hosted, NoCapacity("decode", _RETRY_AFTER_S, "the blocks were taken meanwhile"))
        return reporting or advanced or bool(added)

    def _add(self, hosted: Hosted) -> None:
        """Gives vLLM a request for the first time."""
        if hosted.done:
            return
        request = hosted.request
        if hosted.is_prefill:
            self._give(hosted, request.token_ids, prefill_params(request))
        else:
            # The token that prefill will draw is the last of this prompt: vLLM has its KV to compute, and no other's.
            token_ids, drawn_count = request.token_ids, request.generated_count
            if hosted.goes_on(self._info.max_model_len):
                token_ids, drawn_count = (*token_ids, _UNKNOWN), drawn_count + 1
            extended = replace(request, token_ids=token_ids, generated_count=drawn_count)
            self._give(hosted, token_ids, decode_params(extended, self._info.eos_token_ids))

    def _give(self, hosted: Hosted, token_ids: Sequence[int], params: Any) -> None:
        try:
            self._host.add(hosted.number, token_ids, params, is_prefill=hosted.is_prefill)
        except Exception as error:  # vLLM has no one class for what it refuses
            self._transfers.refuse(hosted, refusal_of(error))

    def _release_ended(self) -> None:
        """Has vLLM end what we have ended, and take back the blocks that no transfer can touch any more."""
        with self._board.lock:
            ended = [(hosted, hosted.transfer_id is None) for hosted in self._account.ended]
        gone = []
        for hosted, untouched in ended:
            if hosted.vllm_id and not hosted.stopped:
                self._host.abort(hosted.vllm_id)
            if not hosted.vllm_id or not self._host.holds(hosted.vllm_id):
                if untouched:
                    gone.append(hosted)
            elif untouched and not hosted.released:
                hosted.released = True
                self._host.scheduler_side.report_released(hosted.vllm_id)
        with self._board.lock:
            for hosted in gone:
                self._account.forget(hosted)
        for hosted in gone:
            self._plane.forget(hosted.number)

    def _admit_waiting(self) -> None:
        """Lets vLLM compute admitted requests, as many as the batch has room for."""
        with self._board.lock:
            if self._account.short_of_blocks:
                self._give_up_adopted()
                if self._stalled:
                    self._give_up_landed()
            admitted = self._account.admit(self._max_batch)
        for hosted in admitted:
            if hosted.by_transfer:
                hosted.received = True
                self._host.scheduler_side.landed(hosted.landing_blocks)
                self._host.begin_answer(hosted.vllm_request, hosted.token_ids[-1])
            else:
                self._continue_adopted(hosted)

    def _continue_adopted(self, hosted: Hosted) -> None:
        """vLLM has ended a prompt with its first token, so what follows is another request to it.

        It finds the prompt's blocks in vLLM's prefix cache: those in use are given back at the end of the very step
        that places it.
        """
        with self._board.lock:
            self._part(hosted)
            hosted.behind = True
        request = replace(hosted.request, token_ids=tuple(hosted.token_ids), generated_count=hosted.draw_index)
        self._give(hosted, request.token_ids, decode_params(request, self._info.eos_token_ids))

    def _give_up_adopted(self) -> None:
        """Adopted requests that are not computed make room for those that were, and wait for blocks."""
        for hosted in self._account.decodes.values():
            if hosted.phase in (Phase.LANDED, Phase.WAITING) and not hosted.by_transfer and hosted.vllm_id:
                self._part(hosted)
                self._outbox.put(Preempted(hosted.key))

    def _give_up_landed(self) -> None:
        """One that landed, the last, and is not computed makes room for those that were, and wait for blocks.

        It is computed from the beginning when its time comes. Else a service that admits nobody until the running ones
        get on, and running ones that wait for the blocks of whom it holds back, would wait for each other for ever.
        """
        for hosted in reversed(self._account.decodes.values()):
            held_back = hosted.phase in (Phase.LANDED, Phase.WAITING) and hosted.transfer_id is None
            if held_back and hosted.by_transfer and not hosted.received and hosted.vllm_id:
                self._part(hosted)
                hosted.by_transfer = False
                hosted.needed_blocks = 0
                self._outbox.put(Preempted(hosted.key))
                self._board.wake()
                return

    def _part(self, hosted: Hosted) -> None:
        """Parts a request from the blocks that vLLM keeps for it: vLLM takes them back."""
        if not hosted.vllm_id:
            return
        left = hosted.leave_behind()
        if left.stopped:
            left.released = True
            self._host.scheduler_side.report_released(left.vllm_id)
        else:
            # It waits for its KV, as far as vLLM knows, and is aborted with the others that have ended.
            self._host.scheduler_side.leave_to(left)
        self._account.ended.add(left)

    def _settle_step(self, outputs: Sequence[Any]) -> None:
        """Accounts for a step and tells what it drew."""
        computed: list[tuple[str, int]] = []
        unwanted: list[bytes] = []
        with self._board.lock:
            for hosted, computed_tokens, _ in self._advances:
                if not hosted.done:
                    hosted.computed = computed_tokens
                    if not hosted.is_source:
                        hosted.claim_next(self._info.layout.block_tokens)
                    if hosted.phase is Phase.PREFILLING and computed_tokens < len(hosted.request.token_ids):
                        self._outbox.put(PrefillProgress(hosted.key, computed_tokens))
            steps: list[TokenStep] = []
            for output in outputs:
                told = self._account.by_number.get(output.request_id)
                if told is None or told.done:
                    continue
                if told.phase is Phase.PREFILLING:
                    self._settle_prompt(told, output, computed, unwanted)
                else:
                    self._settle_answer(told, output, steps)
            if steps:
                self._outbox.put(StepTokens(tuple(steps)))
            for hosted in self._account.decodes.values():
                # It found no room in this step: others must not take what it waits for.
                hosted.preempted = hosted.preempted or hosted.behind
            self._account.unused_blocks = self._host.free_blocks
        # Nobody waits longer for a first token because its KV is handed over.
        self._outbox.publish()
        for number, first_token_id in computed:
            self._plane.hand_over(number, first_token_id)
        for transfer_id in unwanted:
            self._plane.abort_push(transfer_id)

    def _settle_prompt(
        self, hosted: Hosted, output: Any, computed: list[tuple[str, int]], unwanted: list[bytes]
    ) -> None:
        """A prompt is computed: its KV is handed over to whom it is pushed, or not wanted any more."""
        drawn = output.outputs[0]
        if refusal := self._undrawn(hosted, drawn):
            if hosted.transfer_id is not None:
                unwanted.append(hosted.transfer_id)
            self._fail(hosted, refusal)
            return
        token_id = drawn.token_ids[0]
        finish = self._finish(hosted, token_id)
        self._outbox.put(FirstToken(hosted.key, token_id, self._logprobs(hosted, drawn), finish))
        hosted.draw(token_id)
        hosted.phase = Phase.COMPUTED
        if finish is None:
            computed.append((hosted.number, token_id))
            return
        if hosted.transfer_id is not None:
            unwanted.append(hosted.transfer_id)
        self._board.end(hosted)

    def _settle_answer(self, hosted: Hosted, output: Any, steps: list[TokenStep]) -> None:
        """A request of the running batch has its next token."""
        drawn = output.outputs[0]
        if refusal := self._undrawn(hosted, drawn):
            self._fail(hosted, refusal)
            return
        token_id = drawn.token_ids[0]
        finish = self._finish(hosted, token_id)
        steps.append(TokenStep(hosted.key, hosted.draw_index, token_id, self._logprobs(hosted, drawn), finish))
        hosted.draw(token_id)
        if finish is not None:
            self._board.end(hosted)
        elif output.finished:
            self._fail(hosted, f"vLLM ended it for the reason {drawn.finish_reason!r}")

    def _undrawn(self, hosted: Hosted, drawn: Any) -> str:
        """Why a step has drawn no token for a request that was due one; empty when it has."""
        if not drawn.token_ids:
            return f"vLLM ended it for the reason {drawn.finish_reason!r}"
        return NOT_FINITE if self._host.undrawable(hosted.vllm_request) else ""

    def _fail(self, hosted: Hosted, reason: str) -> None:
        self._outbox.put(RequestFailed(hosted.key, reason))
        self._board.end(hosted)

    def _logprobs(self, hosted: Hosted, drawn: Any) -> Any:
        position = drawn.logprobs[0] if drawn.logprobs else None
        return logprobs_of(position, drawn.token_ids[0], hosted.request.params.logprobs)

    def _finish(self, hosted: Hosted, token_id: int) -> FinishReason | None:
        """Why the request ends with this token, its next; None when it goes on."""
        context_tokens = len(hosted.token_ids) + 1
        eos_token_ids, max_model_len = self._info.eos_token_ids, self._info.max_model_len
        return finish_reason(
            hosted.request.params, eos_token_ids, token_id, hosted.draw_index, context_tokens, max_model_len
        )

    def _answer(self, check: "Future[None]") -> None:
        failure: AssertionError | None = None
        try:
            self.check()
        except AssertionError as error:
            failure = error
        with self._board.lock:
            if check not in self._board.promises:
                return
            self._board.promises.remove(check)
        if failure is not None:
            check.set_exception(failure)
        else:
            check.set_result(None)
