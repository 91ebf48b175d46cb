"""Table of a vLLM engine's requests, and the blocks reserved for them. No I/O, no locks; needs no vLLM."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kaveri.engine.contract import EngineEvent, EngineInfo, EngineKey, EngineRequest, EngineStats, TokenStep
from kaveri.engine.copier import BlockPlace
from kaveri.engine.vllm import life
from kaveri.engine.vllm.rank import RankCall
from kaveri.engine.vllm.request import EntryPhase, VllmRequest
from kaveri.errors import NoCapacity, RequestAlreadyExists

_RETRY_AFTER_S = 0.1
_FOR_CALLER = (TokenStep, RankCall)
_SERIALS = itertools.count()
"""Shared by all engines of the process, like vLLM's logits processors."""


class Requests:
    """The vLLM engine's requests, until vLLM has their blocks back; implements EngineAccount (threaded.py). put:
    receives events, in order. on_work: called when the engine thread has something to do."""

    def __init__(
        self,
        info: EngineInfo,
        put: Callable[[EngineEvent], None],
        on_work: Callable[[], None],
    ) -> None:
        self.prefills: dict[EngineKey, VllmRequest] = {}
        self.decodes: dict[EngineKey, VllmRequest] = {}
        self.waiting: deque[VllmRequest] = deque()
        """Admitted requests in state Waiting, in the order of admission."""
        self.by_id: dict[str, VllmRequest] = {}
        """Live and ended requests by engine id."""
        self.ended: set[VllmRequest] = set()
        """Ended requests whose blocks vLLM does not have back, or that a transfer may still touch."""
        self.added: list[VllmRequest] = []
        """Requests not yet given to vLLM."""
        self.unused_blocks = info.total_blocks
        """Number of blocks that no request held at the end of the last step."""
        self._info = info
        self._put = put
        self._on_work = on_work

    @property
    def free_blocks(self) -> int:
        """Number of blocks neither held by nor reserved for a request."""
        return max(0, self.unused_blocks - sum(request.state.promised for request in self._live()))

    @property
    def short_of_blocks(self) -> bool:
        """True if an admitted request was preempted and waits for blocks."""
        return any(isinstance(request.state, life.Evicted) for request in self.decodes.values())

    def open_prefill(self, request: EngineRequest) -> VllmRequest:
        return self._open("prefill", self.prefills, request, life.submitted(_new_id(), request, self._info.layout))

    def adopt(self, key: EngineKey) -> None:
        request = self.prefills.get(key)
        if request is not None and isinstance(request.state, life.VllmComputed) and request.transfer_id is None:
            if key in self.decodes:
                raise RequestAlreadyExists(key.request_id)
            self.apply(request, life.Signal.ADOPTED)
            self.decodes[key] = self.prefills.pop(key)
            self._on_work()

    def admit(self, key: EngineKey) -> None:
        request = self.decodes.get(key)
        if request is not None and isinstance(request.state, life.Arrived):
            self.apply(request, life.Signal.ADMITTED)
            self.waiting.append(request)
            self._on_work()

    def apply(self, request: VllmRequest, event: life.Event) -> list[TokenStep | RankCall]:
        """Apply an event to a request's state. Returns its tokens, and the rank calls that the caller must make."""
        before = request.state
        request.state, actions = life.step(before, event)
        match event:
            case life.Drawn():
                was_suspect = request.is_suspect
                request.drawn.append(event.token_id)
                if was_suspect and not request.is_suspect:
                    # Another suspect may wait for its turn.
                    self._on_work()
            case life.Signal.BLOCKS_TAKEN | life.Signal.BLOCKS_GIVEN_UP:
                request.give_up_blocks()
            case life.Signal.WENT_ON:
                request.tail_block_ids = None
        if isinstance(request.state, life.VllmEnded) and not isinstance(before, life.VllmEnded):
            self._retire(request, before)
        rest: list[TokenStep | RankCall] = []
        for action in actions:
            if isinstance(action, _FOR_CALLER):
                rest.append(action)
            else:
                self._put(action)
        return rest

    def take_waiting(self, max_batch: int) -> list[VllmRequest]:
        """Dequeue the admitted requests that fit into the running batch, in order; the caller lets them join."""
        room = max_batch - self.running_count()
        taken = _without_later_suspects(self.waiting, self._computes_suspect)[: max(0, room)]
        for request in taken:
            self.waiting.remove(request)
        return taken

    def take_added(self) -> list[VllmRequest]:
        """Dequeue new requests to submit to vLLM now: at most one suspect (of a step that raised) at a time."""
        taken = _without_later_suspects(self.added, self._computes_suspect)
        self.added = [request for request in self.added if request not in taken]
        return taken

    def _computes_suspect(self) -> bool:
        live = (request for request in self._live() if request.is_suspect and request not in self.added)
        return any(isinstance(request.state, (life.Submitted, life.VllmPrefilling, *life.IN_BATCH)) for request in live)

    def leave_entry(self, request: VllmRequest) -> None:
        """Detach a request from its entry in vLLM, which is then ended and its blocks freed."""
        left = request.leave_entry()
        if left is not None:
            self.ended.add(left)

    def forget(self, request: VllmRequest) -> None:
        """Remove an ended request whose blocks vLLM has back."""
        self.ended.discard(request)
        if self.by_id.get(request.engine_id) is request:
            del self.by_id[request.engine_id]

    def running_count(self) -> int:
        """Return the number of requests in the running batch, evicted ones included."""
        return sum(isinstance(request.state, life.IN_BATCH) for request in self.decodes.values())

    def held(self, max_batch: int) -> list[VllmRequest]:
        """Return the requests that vLLM has started but must not compute now. Others that are not admitted may run
        ahead of it, if the batch has room and no request loses blocks."""
        begun = [
            request
            for request in self._live()
            if isinstance(request.state, life.HELD)
            and request.entry is not None
            and request.entry.phase is EntryPhase.COMPUTING
        ]
        if not begun:
            return []
        seats = max_batch - self.running_count()
        spare = self.unused_blocks - sum(request.state.promised for request in self._live())
        held: list[VllmRequest] = []
        for request in begun:
            taken = request.state.facts.next_block(request.state.computed) - request.state.promised
            if seats > 0 and spare >= taken and _may_run_ahead(request):
                seats, spare = seats - 1, spare - taken
            else:
                held.append(request)
        return held

    def awaiting_kv_count(self) -> int:
        """Return the number of requests that wait for KV: vLLM counts them as unfinished, but cannot compute them."""
        return sum(request.awaits_kv for request in (*self.decodes.values(), *self.ended))

    def clear(self) -> None:
        for table in (self.prefills, self.decodes, self.waiting, self.by_id, self.ended, self.added):
            table.clear()
        self.unused_blocks = self._info.total_blocks

    def stats(self) -> EngineStats:
        prefilling = [r for r in self.prefills.values() if isinstance(r.state, life.Submitted | life.VllmPrefilling)]
        admitted = len(self.waiting) + self.running_count()
        return EngineStats(
            free_blocks=self.free_blocks,
            running_requests=len(prefilling) + admitted,
            waiting_requests=len(self.decodes) - admitted,
            pending_prefill_tokens=sum(request.prompt_tokens - request.state.computed for request in prefilling),
            context_tokens=sum(request.state.computed for request in self._live()),
        )

    def check_integrity(self, vllm_ids: Iterable[str]) -> None:
        """Assert that each request is in the tables of its state, and that vLLM holds no unknown request."""
        known = {r.entry.vllm_id for r in (*self._live(), *self.ended) if r.entry is not None}
        for vllm_id in vllm_ids:
            assert vllm_id in known, f"vLLM keeps {vllm_id}, which is unknown here"
        assert all(isinstance(request.state, life.OF_PREFILL) for request in self.prefills.values()), "not a prefill"
        assert not any(isinstance(request.state, life.OF_PREFILL) for request in self.decodes.values()), "not a decode"
        waiting = {request for request in self.decodes.values() if isinstance(request.state, life.Waiting)}
        assert waiting == set(self.waiting), "the line is not those that wait"
        assert len(self.waiting) == len(waiting), "a request waits twice"
        assert all(request.done for request in self.ended), "a request has ended that is not done"
        assert not any(request.done for request in self._live()), "a request is done that has not ended"

    # For transfers; see TransferAccount.

    def open_decode(self, request: EngineRequest, held_tokens: int | None = None) -> VllmRequest:
        return self._open(
            "decode", self.decodes, request, life.reserved(_new_id(), request, self._info.layout, held_tokens)
        )

    def touch(self, request: VllmRequest, transfer_id: bytes | None) -> None:
        self.apply(request, life.TransferOpened(transfer_id) if transfer_id is not None else life.Signal.TRANSFER_ENDED)
        if request.done:
            self._on_work()

    def land(self, request: VllmRequest, first_token_id: int | None) -> str | None:
        if first_token_id is not None and not self.goes_on(request):
            return f"no room behind {self._info.max_model_len} tokens"
        self.apply(request, life.KvArrived(first_token_id))
        if first_token_id is not None:
            request.drawn.append(first_token_id)
        facts, entry = request.state.facts, request.entry
        if entry is not None and entry.phase is EntryPhase.AWAITING_KV:
            block_ids = entry.landing_blocks
            # The first step reports the blocks when vLLM's prefix cache has supplied the first ones.
            if len(block_ids) == facts.block_count(facts.landing_tokens):
                request.whole_block_ids = tuple(block_ids[: facts.landing_tokens // facts.block_tokens])
        return None

    def end(self, request: VllmRequest) -> None:
        self.apply(request, life.Signal.NO_LONGER_NEEDED)

    def keep(self, request: VllmRequest) -> int:
        raise AssertionError("no prompt is to be kept")

    def abort(self, key: EngineKey) -> tuple[VllmRequest | None, VllmRequest | None]:
        prefill, decode = self.prefills.get(key), self.decodes.get(key)
        for request in (prefill, decode):
            if request is not None:
                self.end(request)
        return prefill, decode

    # For copies; see CopyAccount (copier.py).

    def whole_blocks(self, request: VllmRequest) -> int:
        return len(request.whole_block_ids)

    def place_of(self, request: VllmRequest, index: int) -> BlockPlace:
        block_ids = request.whole_block_ids
        if index == len(block_ids) and request.tail_block_ids:
            return BlockPlace(request.tail_block_ids[0], request.generation)
        return BlockPlace(block_ids[index], request.generation)

    def tokens_of(self, request: VllmRequest, start: int, stop: int) -> Sequence[int]:
        return [*request.request.token_ids, *request.drawn][start:stop]

    def stop(self, request: VllmRequest) -> str | None:
        state, entry = request.state, request.entry
        if state.computed != request.prompt_tokens + len(request.drawn) - 1:
            return "it is being computed again"
        match state:
            case life.VllmRunning():
                self.apply(request, life.Signal.LEAVE_ASKED)
                self._on_work()
                return None
            case life.Arrived() if entry is not None and entry.phase is EntryPhase.AWAITING_KV:
                block_ids, facts = entry.landing_blocks, state.facts
                if len(block_ids) == facts.block_count(state.computed):
                    self.apply(request, life.Signal.LEAVE_ASKED)
                    request.tail_block_ids = tuple(block_ids[len(request.whole_block_ids) :])
                    return None
        return "it has not begun to draw, or is about to"

    def stopped_tokens(self, request: VllmRequest) -> int | None:
        match request.state:
            case life.Left():
                return request.state.computed if request.tail_block_ids is not None else None
            case life.Leaving():
                return None
            case _:
                return 0

    def go_on(self, request: VllmRequest) -> None:
        if isinstance(request.state, life.Leaving | life.Left):
            self.apply(request, life.Signal.WENT_ON)
            self._on_work()

    def left(self, request: VllmRequest, block_ids: Sequence[int]) -> None:
        """Record the pool blocks that hold all KV of a request that is moved to another instance."""
        if isinstance(request.state, life.Left):
            whole = request.state.computed // self._info.layout.block_tokens
            request.whole_block_ids, request.tail_block_ids = tuple(block_ids[:whole]), tuple(block_ids[whole:])

    def goes_on(self, request: VllmRequest) -> bool:
        """Return True if max_model_len allows a token after the one that prefill samples."""
        return request.prompt_tokens + 1 < self._info.max_model_len

    def _open(
        self, role: str, table: dict[EngineKey, VllmRequest], request: EngineRequest, state: life.State
    ) -> VllmRequest:
        if request.key in table:
            raise RequestAlreadyExists(request.key.request_id)
        # New requests would take the blocks that a preempted one waits for.
        if self.short_of_blocks:
            raise NoCapacity(role, _RETRY_AFTER_S, "a preempted request waits for blocks")
        free_blocks = self.free_blocks
        if state.promised > free_blocks:
            raise NoCapacity(role, _RETRY_AFTER_S, f"{state.promised} KV blocks are needed, {free_blocks} are free")
        opened = table[request.key] = VllmRequest(request, state)
        self.by_id[opened.engine_id] = opened
        self.added.append(opened)
        self._on_work()
        return opened

    def _retire(self, request: VllmRequest, before: life.State) -> None:
        """Record the end of a request. Its blocks are freed when no transfer touches them."""
        del (self.prefills if isinstance(before, life.OF_PREFILL) else self.decodes)[request.key]
        if isinstance(before, life.Waiting) and request in self.waiting:
            self.waiting.remove(request)
        self.ended.add(request)
        self._on_work()

    def _live(self) -> tuple[VllmRequest, ...]:
        return (*self.prefills.values(), *self.decodes.values())


def _may_run_ahead(request: VllmRequest) -> bool:
    match request.state:
        case life.VllmComputed(open_id=None, ahead=ahead) | life.Arrived(ahead=ahead) | life.Waiting(ahead=ahead):
            return request.request.stays and len(ahead) < life.MAX_AHEAD and not request.is_suspect
    return False


def _without_later_suspects(requests: Iterable[VllmRequest], computes_suspect: Callable[[], bool]) -> list[VllmRequest]:
    """Drop the suspects (requests of a failed step) that must wait until another one is computed."""
    taken, has_suspect = list[VllmRequest](), False
    for request in requests:
        if request.is_suspect and not isinstance(request.state, life.VllmReserved):
            if has_suspect or computes_suspect():
                continue
            has_suspect = True
        taken.append(request)
    return taken


def _new_id() -> str:
    return f"kaveri-{next(_SERIALS)}"
