"""Iterations of the vLLM engine's thread: submits new work to vLLM, runs a vLLM step, and applies its results to the
requests. Only this thread calls vLLM; during a step vLLM's scheduler calls stepping()."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kaveri.domain.sampling import ALL_RULED_OUT
from kaveri.engine.blame import StepMember
from kaveri.engine.contract import EngineInfo, StepTokens, TokenStep
from kaveri.engine.shared import Shared
from kaveri.engine.stepwise.runner import NOT_FINITE
from kaveri.engine.stopping import barred_token_ids, finish_reason
from kaveri.engine.token_rules import TokenRules
from kaveri.engine.transfers import Transfers
from kaveri.engine.vllm import life
from kaveri.engine.vllm.connector_scheduler import Placement, RequestAdvance
from kaveri.engine.vllm.core import StepOutput, VllmCore
from kaveri.engine.vllm.data_plane import DataPlane
from kaveri.engine.vllm.rank import PromptChunk, RankCall
from kaveri.engine.vllm.request import RAISED_DRAWS, Entry, EntryPhase, TwoLists, VllmRequest
from kaveri.engine.vllm.requests import Requests
from kaveri.engine.vllm.sampling import decode_params, logprobs_of, prefill_params, prompt_logprobs_of, refusal_of
from kaveri.errors import EngineError, NoCapacity
from kaveri.text.grammars import grammars_of

_RETRY_AFTER_S = 0.1
_UNKNOWN = 0
"""Placeholder for the token that prefill samples later; nothing is computed from it."""

_HELD_BACK = (life.Arrived, life.Waiting)

_Actions = list[TokenStep | RankCall]


class Steps:
    """Runs the iterations of a vLLM engine's thread. on_stepped: called after each step, when its tokens are known."""

    def __init__(
        self,
        shared: Shared,
        requests: Requests,
        core: VllmCore,
        plane: DataPlane,
        transfers: Transfers[VllmRequest],
        info: EngineInfo,
        max_batch: int,
        on_stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_stepped = on_stepped
        self._shared = shared
        self._requests = requests
        self._core = core
        self._plane = plane
        self._transfers = transfers
        self._info = info
        self._max_batch = max_batch
        # The step under way.
        self._advances: Sequence[RequestAdvance] = ()
        self._broken: Mapping[str, str] = {}

    def can_compute(self) -> bool:
        """Return True if vLLM can compute any request that is not held back. The caller holds the lock."""
        return self._can_compute(self._requests.held(self._max_batch))

    def turn(self, added: Sequence[VllmRequest], stalled: bool) -> bool:
        """Submit changes to vLLM and let it run a step. Returns True if anything was done. added: new requests.
        stalled: True if the last call did nothing."""
        for request in added:
            self._add(request)
        left = self._take_leaving()
        self._make_room(stalled)
        self._release_ended()
        self._admit_waiting()
        reporting = self._core.scheduler_side.has_reports
        with self._shared.lock:
            held = self._requests.held(self._max_batch)
            does_step = reporting or self._can_compute(held)
            left_out = {each.entry.record for each in held if each.entry is not None}
            batch_count = self._requests.running_count()
        self._advances = ()
        outputs = self._core.step(batch_count, left_out) if does_step else ()
        advanced = bool(self._advances)
        self._broken = self._broken_rules(outputs) if len(self._core.ranks) > 1 else {}
        with self._shared.lock:
            for request, block_ids in left:
                self._requests.left(request, block_ids)
        self._apply_step(outputs)
        self._advances = ()
        # No queueing inside vLLM: by the time it had room, the request might not be needed any more.
        for request in added:
            unplaced = request.entry is None or request.entry.phase is EntryPhase.AWAITING_BLOCKS
            if unplaced and isinstance(request.state, life.VllmReserved):
                self._transfers.refuse(request, NoCapacity("decode", _RETRY_AFTER_S, "the blocks were taken meanwhile"))
        return reporting or advanced or bool(added)

    def _can_compute(self, held: Sequence[VllmRequest]) -> bool:
        return self._core.unfinished_count > self._requests.awaiting_kv_count() + len(held)

    def members(self) -> list[StepMember]:
        """Return the unfinished requests of the step that has raised; empty outside a step."""
        owners = [advance.entry.owner for advance in self._advances]
        return [StepMember(each.key, each.draw_index, each.request.suspect_until) for each in owners if not each.done]

    def check_integrity(self) -> None:
        """Assert that vLLM's blocks and the requests agree. Between steps, on the engine thread or after its end."""
        tables, counts = self._core.tables(), self._core.reference_counts()
        held: dict[int, int] = {}
        for block_ids in tables.values():
            for block in block_ids:
                held[block] = held.get(block, 0) + 1
        assert held == counts, f"vLLM's tables {tables} do not account for its blocks {counts}"
        assert self._core.free_blocks + len(counts) == self._info.total_blocks, "vLLM has lost blocks"
        with self._shared.lock:
            self._requests.check_integrity(tables)

    def stepping(
        self, placements: Sequence[Placement], advances: Sequence[RequestAdvance], preempted: Sequence[Entry]
    ) -> Sequence[PromptChunk]:
        """Handle the start of a step; called by vLLM's scheduler within turn(). Returns the prompt chunks to push."""
        chunks: list[PromptChunk] = []
        actions: _Actions = []
        with self._shared.lock:
            for entry in preempted:
                if not entry.owner.done:
                    actions += self._requests.apply(entry.owner, life.Signal.BLOCKS_TAKEN)
            for entry, token_count, computed, block_ids in advances:
                self._shared.turns.computed_tokens += token_count
                state = entry.owner.state
                if isinstance(state, life.Submitted | life.VllmPrefilling):
                    chunks.append(_chunk(entry.owner, computed, block_ids))
                # Scheduled does not change a running request that already has a block for its next token.
                if not (
                    isinstance(state, life.VllmEnded) or (isinstance(state, life.VllmRunning) and not state.promised)
                ):
                    actions += self._requests.apply(entry.owner, life.Scheduled(len(block_ids)))
            for entry, _, block_count in placements:
                if not entry.owner.done:
                    actions += self._requests.apply(entry.owner, life.BlocksAllocated(block_count))
            self._requests.unused_blocks = self._core.free_blocks
        self._call_ranks(actions)
        for entry, first_block, _ in placements:
            assert entry.phase is EntryPhase.AWAITING_KV, "a placed request waits for its KV"
            self._transfers.grant(entry.owner, entry.landing_blocks, first_block)
        self._advances = advances
        # Report the start of a request before its first step is computed.
        self._shared.publish()
        return chunks

    # Before the step.

    def _add(self, request: VllmRequest) -> None:
        if request.done:
            return
        given = request.request
        if isinstance(request.state, life.OF_PREFILL):
            self._give(request, given.token_ids, prefill_params(given, self._info.eos_token_ids), is_prefill=True)
        else:
            # The token that prefill samples is the last of this prompt, and the only one whose KV vLLM must compute.
            is_sampled = request.held_tokens is None and self._requests.goes_on(request)
            self._give_decode(request, (_UNKNOWN,) if is_sampled else ())

    def _give_decode(self, request: VllmRequest, drawn: Sequence[int]) -> None:
        """Submit a request of the decode side to vLLM. drawn: tokens to append to its prompt."""
        given = request.request
        params = decode_params(given, self._info.eos_token_ids, len(drawn))
        self._give(request, (*given.token_ids, *drawn), params)

    def _give(self, request: VllmRequest, token_ids: Sequence[int], params: Any, *, is_prefill: bool = False) -> None:
        try:
            self._core.add(request.engine_id, token_ids, params, is_prefill=is_prefill)
        except Exception as error:  # vLLM has no common class for its refusals
            self._transfers.refuse(request, refusal_of(error))

    def _release_ended(self) -> None:
        """End requests in vLLM that have ended here, and return blocks that no transfer touches any more."""
        with self._shared.lock:
            ended = [(request, request.entry, request.transfer_id is None) for request in self._requests.ended]
        gone = []
        for request, entry, untouched in ended:
            if entry is not None and entry.phase not in (EntryPhase.KEPT, EntryPhase.RELEASED):
                self._core.abort(entry.vllm_id)
            if entry is None or not self._core.holds(entry.vllm_id):
                if untouched:
                    gone.append(request)
            elif untouched and entry.phase is not EntryPhase.RELEASED:
                self._core.scheduler_side.release(entry)
        with self._shared.lock:
            for request in gone:
                self._requests.forget(request)
        for request in gone:
            RAISED_DRAWS.pop(request.engine_id, None)
            self._plane.do(RankCall("forget", (request.engine_id,)))

    def _take_leaving(self) -> list[tuple[VllmRequest, Sequence[int]]]:
        """Stop computing requests that move to other instances. Returns their block ids, readable after the step."""
        with self._shared.lock:
            decodes = tuple(self._requests.decodes.values())
            leaving = [request for request in decodes if isinstance(request.state, life.Leaving)]
            for request in leaving:
                self._requests.apply(request, life.Signal.LEFT_BATCH)
        left: list[tuple[VllmRequest, Sequence[int]]] = []
        for request in leaving:
            assert request.entry is not None, "vLLM has a request that it computes"
            computed = request.state.computed
            block_ids = self._core.blocks_of(request.entry.vllm_id)[: request.state.facts.block_count(computed)]
            # The request may have ended, or continued, just now.
            if isinstance(request.state, life.Left):
                self._core.scheduler_side.left(block_ids[len(request.whole_block_ids) :])
                left.append((request, block_ids))
        return left

    def _make_room(self, stalled: bool) -> None:
        """Free blocks for preempted requests: those prefilled here, not admitted and not being computed lose theirs.

        While vLLM is stalled, the last request with received KV that is not being computed loses its blocks too, and is
        recomputed later. This breaks a deadlock between a service that admits nothing until running requests advance,
        and running requests that wait for blocks of unadmitted ones.
        """
        with self._shared.lock:
            if not self._requests.short_of_blocks:
                return
            decodes = self._requests.decodes.values()
            held_back = [each for each in decodes if each.entry is not None and isinstance(each.state, _HELD_BACK)]
            giving_up = [request for request in held_back if not request.awaits_kv]
            landed = [request for request in held_back if request.awaits_kv]
            if stalled and landed:
                giving_up.append(landed[-1])
                self._shared.wake()
            for request in giving_up:
                self._requests.leave_entry(request)
                self._requests.apply(request, life.Signal.BLOCKS_GIVEN_UP)

    def _admit_waiting(self) -> None:
        joined: list[tuple[VllmRequest, int | None]] = []
        with self._shared.lock:
            for request in self._requests.take_waiting(self._max_batch):
                assert isinstance(request.state, life.Waiting), "only a waiting request joins"
                first_token_id = request.state.first_token_id
                for ahead in self._requests.apply(request, life.Joined(anew=request.entry is None)):
                    # Each token was sampled by its own step.
                    self._put_tokens([ahead])
                joined.append((request, first_token_id))
        self._shared.publish()
        for request, first_token_id in joined:
            entry = request.entry
            if request.done:
                continue
            if entry is None:
                # It gave its blocks up before it joined the batch.
                self._give_decode(request, request.drawn)
            elif entry.phase is EntryPhase.AWAITING_KV:
                self._core.scheduler_side.landed(entry.landing_blocks)
                entry.phase = EntryPhase.COMPUTING
                self._core.begin_answer(entry.record, first_token_id)
            else:
                self._core.decode(entry.record)

    # After the step.

    def _apply_step(self, outputs: Sequence[StepOutput]) -> None:
        actions: _Actions = []
        apply = self._requests.apply
        by_id = {output.engine_id: output for output in outputs}
        with self._shared.lock:
            for advance in self._advances:
                request = advance.entry.owner
                output = by_id.pop(request.engine_id, None)
                if request.done:
                    continue
                outcome = self._outcome(request, advance.computed, output)
                is_first = isinstance(request.state, life.VllmPrefilling) and isinstance(outcome, life.Drawn)
                if output is not None and is_first and request.request.scores_prompt:
                    # vLLM reports the log-probabilities of the whole prompt with the first token.
                    for event in prompt_logprobs_of(request.request, output.prompt_logprobs or ()):
                        self._shared.put(event)
                actions += apply(request, outcome)
                if advance.block_ids and isinstance(request.state, life.VllmRunning | life.Leaving):
                    block_tokens = request.state.facts.block_tokens
                    request.whole_block_ids = tuple(advance.block_ids[: advance.computed // block_tokens])
            # vLLM has ended these requests without computing them.
            for engine_id, output in by_id.items():
                found = self._requests.by_id.get(engine_id)
                if found is not None and not found.done:
                    actions += apply(found, life.VllmFailed(_ended_by_vllm(output)))
            for request in self._requests.decodes.values():
                entry = request.entry
                if isinstance(request.state, life.Joining) and entry is not None and entry.phase is EntryPhase.QUEUED:
                    # Other requests must not take the blocks that this one waits for.
                    actions += apply(request, life.Signal.LEFT_OUT)
            self._put_tokens(actions)
            self._requests.unused_blocks = self._core.free_blocks
        # The first token must not wait for the hand-over of its KV.
        self._shared.publish()
        self._call_ranks(actions)
        self._on_stepped()

    def _put_tokens(self, actions: Iterable[TokenStep | RankCall]) -> None:
        tokens = tuple(action for action in actions if isinstance(action, TokenStep))
        if tokens:
            self._shared.put(StepTokens(tokens))

    def _outcome(
        self, request: VllmRequest, computed: int, output: StepOutput | None
    ) -> life.Stepped | life.Drawn | life.VllmFailed:
        if output is None:
            return life.Stepped(computed)
        if not output.token_ids:
            return life.VllmFailed(_ended_by_vllm(output))
        if request.engine_id in self._broken:
            return life.VllmFailed(self._broken[request.engine_id], is_final=True)
        if (raised := RAISED_DRAWS.pop(request.engine_id, None)) is not None:
            return life.VllmFailed(raised, is_final=True)
        if request.entry is not None and self._core.undrawable(request.entry.record):
            return life.VllmFailed(NOT_FINITE)
        token_id = output.token_ids[0]
        position = output.logprobs[0] if output.logprobs else None
        logprobs = logprobs_of(position, token_id, request.request.params.logprobs)
        context_tokens = request.prompt_tokens + len(request.drawn) + 1
        eos_token_ids, max_model_len = self._info.eos_token_ids, self._info.max_model_len
        params = request.request.params
        finish = finish_reason(params, eos_token_ids, token_id, request.draw_index, context_tokens, max_model_len)
        if finish is None and output.finish_reason is not None:
            return life.VllmFailed(_ended_by_vllm(output))
        return life.Drawn(computed, token_id, logprobs, finish, output.cached_tokens)

    def _broken_rules(self, outputs: Sequence[StepOutput]) -> Mapping[str, str]:
        """Return the reason for each request whose rules left no token to draw, by engine id. Ranks in other processes
        cannot end a single request, so they draw a forbidden token. Call without the lock: may compile a grammar."""
        drawn = {output.engine_id: output.token_ids[0] for output in outputs if output.token_ids}
        broken = {}
        for request in (advance.entry.owner for advance in self._advances):
            token_id = drawn.get(request.engine_id)
            if token_id is None or request.done or not request.request.params.has_rules:
                continue
            try:
                if not self._permits(request, token_id):
                    broken[request.engine_id] = ALL_RULED_OUT
            except EngineError as error:
                broken[request.engine_id] = error.reason
        return broken

    def _permits(self, request: VllmRequest, token_id: int) -> bool:
        asked, core, params = request.request, self._core, request.request.params
        if request.rules is None:
            grammars = grammars_of(core.model, core.vocab_size, core.eos_token_ids)
            history = TwoLists(asked.token_ids, request.drawn)
            request.rules = TokenRules(
                params, history, asked.prompt_tokens, core.vocab_size, core.eos_token_ids, grammars
            )
        # With a grammar, TokenRules decides where the answer may end.
        is_barred = params.grammar is None and token_id in barred_token_ids(
            params, core.eos_token_ids, request.draw_index
        )
        return not is_barred and request.rules.changes(request.draw_index).permit(token_id)

    def _call_ranks(self, actions: Iterable[TokenStep | RankCall]) -> None:
        for action in actions:
            if not isinstance(action, TokenStep):
                self._plane.do(action)


def _chunk(request: VllmRequest, computed: int, block_ids: Sequence[int]) -> PromptChunk:
    """Return the chunk that a step adds to a prompt. Called before the step is applied to the request."""
    state = request.state
    known = state.block_count if isinstance(state, life.VllmPrefilling) else 0
    return PromptChunk(request.engine_id, request.prompt_tokens, tuple(block_ids[known:]), state.computed, computed)


def _ended_by_vllm(output: StepOutput) -> str:
    return f"vLLM ended it for the reason {output.finish_reason!r}"
