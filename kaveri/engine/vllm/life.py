"""The life of one request inside the vLLM engine, as values: step(state, event) -> (state, actions). Needs no vLLM.

    prefill   Submitted ── VllmPrefilling ── VllmComputed ── pushed
                                                  │ adopted
    decode    VllmReserved ─────── landed ───── Arrived ── Waiting ── Joining ── VllmRunning ⇄ Evicted
    released  VllmRunning ── Leaving ── Left ── let go, or VllmRunning;   Arrived ⇄ Left

Every state may become VllmEnded. An ended request causes no event; its blocks follow when no transfer touches them.
What vLLM itself keeps for a request is an entry (request.py).
"""

from dataclasses import dataclass, replace

from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    FirstToken,
    Preempted,
    PrefillProgress,
    PrefillStarted,
    RequestFailed,
    TokenStep,
)
from kaveri.engine.vllm.rank import AbortPush, PassFirstToken
from kaveri.kv.layout.layout import KvLayout


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Constants of a request's life."""

    engine_id: str
    """Engine id of the request, never reused; the id that vLLM is given."""
    key: EngineKey
    prompt_tokens: int
    generated_count: int
    """Number of its tokens that earlier attempts generated."""
    block_tokens: int
    held_tokens: int | None = None
    """Resumed: the KV of this many tokens lands, and the rest is computed here."""

    @property
    def landing_tokens(self) -> int:
        """Tokens whose KV a landing brings."""
        return self.held_tokens or self.prompt_tokens

    def block_count(self, token_count: int) -> int:
        """Return the blocks that hold this many tokens."""
        return -(-token_count // self.block_tokens)

    def next_block(self, computed: int) -> int:
        """Return the blocks that the token after `computed` tokens takes: 1 if those fill their blocks."""
        return int(computed % self.block_tokens == 0)


# States.


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    facts: RequestFacts
    computed: int = 0
    """Tokens whose KV is in its blocks, after the last step."""
    promised: int = 0
    """Free blocks that are reserved for it."""

    @property
    def transfer_id(self) -> bytes | None:
        """The open transfer that may touch its blocks."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Touched(_State):
    """A state in which a transfer may touch the request's blocks."""

    open_id: bytes | None = None

    @property
    def transfer_id(self) -> bytes | None:
        return self.open_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(_Touched):
    """A prompt that vLLM has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPrefilling(_Touched):
    """A prompt that is being computed."""

    block_count: int
    """Blocks that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmComputed(_Touched):
    """A prompt whose KV waits to be accepted elsewhere, or that waits to be adopted."""

    first_token_id: int
    ahead: tuple[TokenStep, ...] = ()
    """Tokens that were drawn before it was admitted, and are reported then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmReserved(_Touched):
    """A prompt that waits for a transfer of its KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived(_State):
    """A prompt with its first token, or a resumed one; its KV is here, or must be computed again after a preemption."""

    first_token_id: int | None
    """First token of the answer; None for a resumed request, whose next token is drawn here."""
    ahead: tuple[TokenStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(_State):
    """Admitted; the running batch is full."""

    first_token_id: int | None
    ahead: tuple[TokenStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining(_State):
    """Part of the running batch; vLLM has not begun it."""

    index: int
    """Index within the answer of the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRunning(_State):
    """Being computed by vLLM."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(_State):
    """Part of the running batch without blocks; vLLM computes it again when there are some."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(_State):
    """About to be released. vLLM may be computing it; the next step leaves it out."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(_State):
    """Kept out of vLLM's steps, with its blocks."""

    former: "Arrived | Leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEnded(_Touched):
    """Done. vLLM frees its blocks as soon as no transfer touches them."""


State = (
    Submitted
    | VllmPrefilling
    | VllmComputed
    | VllmReserved
    | Arrived
    | Waiting
    | Joining
    | VllmRunning
    | Evicted
    | Leaving
    | Left
    | VllmEnded
)
OF_PREFILL = (Submitted, VllmPrefilling, VllmComputed)
"""States of the prefill side. The others, except VllmEnded, are of the decode side."""
IN_BATCH = (Joining, VllmRunning, Evicted, Leaving)
HELD = (VllmComputed, Arrived, Waiting, Left)
"""States in which vLLM keeps a request's blocks and does not compute it, unless it may run ahead."""
MAX_AHEAD = 8
"""Tokens that a prompt which stays may draw before it is admitted: an admission takes a few steps of a fast model."""


# Events.


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """A transfer may touch its blocks from now on."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The transfer has ended and touches its blocks no more."""


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A transfer has brought all of its KV."""

    first_token_id: int | None


@dataclass(frozen=True, slots=True)
class AdoptedForDecode:
    """Decode it here."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The service lets it run."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The running batch has room for it, and vLLM continues the request that has its KV."""


@dataclass(frozen=True, slots=True)
class JoinedAnew:
    """The running batch has room for it. It gave its blocks up, so vLLM is given a new request."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Release it to another instance."""


@dataclass(frozen=True, slots=True)
class LeftBatch:
    """vLLM computes it no more."""


@dataclass(frozen=True, slots=True)
class WentOn:
    """Cancel its release."""


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    """vLLM has allocated this many blocks for the KV of a transfer."""

    block_count: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step that computes it begins. block_count: its blocks then, while it is a prompt."""

    block_count: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step computed the request and drew no token. computed: tokens whose KV is in its blocks now."""

    computed: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step computed the request and drew its next token. finish: the reason if it is the last."""

    computed: int
    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The step had no room for it."""


@dataclass(frozen=True, slots=True)
class BlocksTaken:
    """vLLM has taken its blocks back."""


@dataclass(frozen=True, slots=True)
class BlocksGivenUp:
    """The engine takes its blocks back, for others."""


@dataclass(frozen=True, slots=True)
class VllmFailed:
    """vLLM cannot continue it."""

    reason: str
    is_final: bool = False
    """See RequestFailed."""


@dataclass(frozen=True, slots=True)
class NoLongerNeeded:
    """Not needed any more: aborted, pushed, or refused."""


Event = (
    TransferOpened
    | TransferEnded
    | KvArrived
    | AdoptedForDecode
    | Admitted
    | Joined
    | JoinedAnew
    | BlocksAllocated
    | LeaveAsked
    | LeftBatch
    | WentOn
    | Scheduled
    | Stepped
    | Drawn
    | LeftOut
    | BlocksTaken
    | BlocksGivenUp
    | VllmFailed
    | NoLongerNeeded
)

Action = EngineEvent | TokenStep | AbortPush | PassFirstToken
"""Output of step(): an event or a token for the listener, or a call to the ranks."""


def submitted(engine_id: str, request: EngineRequest, layout: KvLayout) -> Submitted:
    """Return the state of a new prompt to compute. Its blocks are reserved."""
    facts = _facts(engine_id, request, layout)
    return Submitted(facts=facts, promised=facts.block_count(facts.prompt_tokens))


def reserved(engine_id: str, request: EngineRequest, layout: KvLayout, held_tokens: int | None = None) -> VllmReserved:
    """Return the state of a new prompt whose KV will land. Its blocks, and that of its next token, are reserved."""
    facts = replace(_facts(engine_id, request, layout), held_tokens=held_tokens)
    return VllmReserved(facts=facts, promised=facts.block_count(facts.prompt_tokens + 1))


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after an event, and its actions, in order. An event that cannot happen is an AssertionError."""
    match event:
        # The frequent ones first: of each request in each step.
        case Drawn():
            return _drawn(state, event)
        case Scheduled():
            return _scheduled(state, event)
        case Stepped():
            return _stepped(state, event)
        case TransferOpened() | TransferEnded():
            return _with_transfer(state, event), ()
        case NoLongerNeeded() | VllmFailed() | BlocksTaken():
            return _ended(state, event)
        case KvArrived() | AdoptedForDecode() | Admitted() | BlocksAllocated():
            return _advanced(state, event), ()
        case Joined() | JoinedAnew():
            return _joined(state, event)
        case LeaveAsked() | LeftBatch() | WentOn():
            return _released(state, event)
        case BlocksGivenUp():
            if isinstance(state, Arrived | Waiting):
                return replace(state, computed=0, promised=0), (Preempted(state.facts.key),)
        case LeftOut():
            if isinstance(state, Joining):
                return Evicted(facts=state.facts, index=state.index), ()
    raise _impossible(state, event)


def _with_transfer(state: State, event: TransferOpened | TransferEnded) -> State:
    match state, event:
        case (Submitted() | VllmPrefilling() | VllmComputed() | VllmReserved(), TransferOpened()) if (
            state.open_id is None
        ):
            return replace(state, open_id=event.transfer_id)
        case (Submitted() | VllmPrefilling() | VllmComputed() | VllmReserved() | VllmEnded(), TransferEnded()) if (
            state.open_id
        ):
            return replace(state, open_id=None)
    raise _impossible(state, event)


def _ended(state: State, event: NoLongerNeeded | VllmFailed | BlocksTaken) -> tuple[State, tuple[Action, ...]]:
    facts, open_id = state.facts, state.transfer_id
    ended = VllmEnded(facts=facts, open_id=open_id)
    # Others may own the blocks from now on, or the token is meaningless: what was queued must not be accepted.
    abort = (AbortPush(open_id),) if open_id is not None and isinstance(state, OF_PREFILL) else ()
    match state, event:
        case (VllmEnded(), _):
            pass
        case (_, NoLongerNeeded()):
            return ended, ()
        case (
            Submitted()
            | VllmPrefilling()
            | VllmComputed()
            | Arrived()
            | Waiting()
            | Joining()
            | VllmRunning()
            | Evicted()
            | Leaving(),
            VllmFailed(),
        ):
            return ended, (RequestFailed(facts.key, event.reason, event.is_final), *abort)
        case (Submitted() | VllmPrefilling() | VllmComputed(), BlocksTaken()):
            return ended, (RequestFailed(facts.key, "vLLM took back the blocks that it was promised"), *abort)
        case (Joining() | VllmRunning() | Evicted() | Leaving(), BlocksTaken()):
            return Evicted(facts=facts, index=state.index), (Preempted(facts.key),)
    raise _impossible(state, event)


def _advanced(state: State, event: KvArrived | AdoptedForDecode | Admitted | BlocksAllocated) -> State:
    facts = state.facts
    match state, event:
        case (VllmReserved(), BlocksAllocated()):
            return replace(state, promised=max(0, state.promised - event.block_count))
        case (VllmReserved(open_id=None), KvArrived()):
            token_id, promised = event.first_token_id, state.promised
            return Arrived(facts=facts, computed=facts.landing_tokens, promised=promised, first_token_id=token_id)
        case (VllmComputed(open_id=None), AdoptedForDecode()):
            return Arrived(
                facts=facts,
                computed=state.computed,
                promised=facts.next_block(state.computed),
                first_token_id=state.first_token_id,
                ahead=state.ahead,
            )
        case (Arrived(), Admitted()):
            return Waiting(
                facts=facts,
                computed=state.computed,
                promised=state.promised,
                first_token_id=state.first_token_id,
                ahead=state.ahead,
            )
    raise _impossible(state, event)


def _joined(state: State, event: Joined | JoinedAnew) -> tuple[State, tuple[Action, ...]]:
    if not isinstance(state, Waiting):
        raise _impossible(state, event)
    facts, ahead = state.facts, state.ahead
    if ahead and ahead[-1].finish is not None:
        return VllmEnded(facts=facts), ahead
    index = facts.generated_count + (state.first_token_id is not None) + len(ahead)
    if isinstance(event, JoinedAnew):
        return Joining(facts=facts, index=index), ahead
    return Joining(facts=facts, computed=state.computed, promised=state.promised, index=index), ahead


def _released(state: State, event: LeaveAsked | LeftBatch | WentOn) -> tuple[State, tuple[Action, ...]]:
    facts, computed, promised = state.facts, state.computed, state.promised
    match state, event:
        case (Arrived(), LeaveAsked()):
            return Left(facts=facts, computed=computed, promised=promised, former=state), ()
        case (VllmRunning(), LeaveAsked()):
            return Leaving(facts=facts, computed=computed, promised=promised, index=state.index), ()
        case (Leaving(), LeftBatch()):
            return Left(facts=facts, computed=computed, former=state), ()
        case (Leaving(), WentOn()):
            return VllmRunning(facts=facts, computed=computed, promised=promised, index=state.index), ()
        case (Left(former=Arrived() as former), WentOn()):
            return former, ()
        case (Left(former=Leaving() as former), WentOn()):
            promised = facts.next_block(computed)
            return VllmRunning(facts=facts, computed=computed, promised=promised, index=former.index), ()
    raise _impossible(state, event)


def _scheduled(state: State, event: Scheduled) -> tuple[State, tuple[Action, ...]]:
    facts = state.facts
    match state:
        case Submitted() | VllmPrefilling():
            started = () if isinstance(state, VllmPrefilling) else (PrefillStarted(facts.key),)
            promised = max(0, facts.block_count(facts.prompt_tokens) - event.block_count)
            prefilling = VllmPrefilling(
                facts=facts,
                computed=state.computed,
                promised=promised,
                open_id=state.open_id,
                block_count=event.block_count,
            )
            return prefilling, started
        case VllmComputed() | Arrived() | Waiting():
            return replace(state, promised=0), ()
        case VllmRunning(promised=0):
            return state, ()
        case Joining() | VllmRunning() | Evicted():
            return VllmRunning(facts=facts, computed=state.computed, index=state.index), ()
        case Leaving():
            return replace(state, promised=0), ()
    raise _impossible(state, event)


def _stepped(state: State, event: Stepped) -> tuple[State, tuple[Action, ...]]:
    facts, computed = state.facts, event.computed
    match state:
        case VllmPrefilling():
            progress = (PrefillProgress(facts.key, computed),) if computed < facts.prompt_tokens else ()
            return replace(state, computed=computed), progress
        case VllmComputed() | Arrived() | Waiting() | VllmRunning() | Leaving():
            return replace(state, computed=computed, promised=facts.next_block(computed)), ()
    raise _impossible(state, event)


def _drawn(state: State, event: Drawn) -> tuple[State, tuple[Action, ...]]:
    facts, computed, token_id, finish = state.facts, event.computed, event.token_id, event.finish
    match state:
        case VllmRunning() | Leaving():
            token = TokenStep(facts.key, state.index, token_id, event.logprobs, finish)
            if finish is not None:
                return VllmEnded(facts=facts), (token,)
            promised, index = facts.next_block(computed), state.index + 1
            return type(state)(facts=facts, computed=computed, promised=promised, index=index), (token,)
        case VllmPrefilling():
            open_id = state.open_id
            first = FirstToken(facts.key, token_id, event.logprobs, finish)
            if finish is not None:
                abort = (AbortPush(open_id),) if open_id is not None else ()
                return VllmEnded(facts=facts, open_id=open_id), (first, *abort)
            prompt = VllmComputed(facts=facts, computed=computed, open_id=open_id, first_token_id=token_id)
            return prompt, (first, PassFirstToken(facts.engine_id, token_id))
        case VllmComputed() | Arrived() | Waiting():
            index = facts.generated_count + 1 + len(state.ahead)
            token = TokenStep(facts.key, index, token_id, event.logprobs, finish)
            return replace(
                state, computed=computed, promised=facts.next_block(computed), ahead=(*state.ahead, token)
            ), ()
    raise _impossible(state, event)


def _facts(engine_id: str, request: EngineRequest, layout: KvLayout) -> RequestFacts:
    prompt_tokens = len(request.token_ids)
    return RequestFacts(engine_id, request.key, prompt_tokens, request.generated_count, layout.block_tokens)


def _impossible(state: State, event: Event) -> AssertionError:
    names = type(event).__name__, type(state).__name__
    return AssertionError(f"{names[0]} cannot happen to a request that is {names[1]}: {state}")
