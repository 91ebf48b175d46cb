"""The engine seam: the service decides where and when, the engine moves the tensors.

An engine runs one model on a thread or process of its own. Services call it from the event loop and receive events
through a listener. No call here waits for a step of the model, and no step waits for a call: calls put a command in a
queue or take a short lock. No tensor crosses this seam.

Life of a request on the prefill side::

    prefill(request) ── PrefillStarted ── PrefillProgress* ── FirstToken ── [done if it finished]
        with params.prompt_logprobs, and no token generated so far: PromptLogprobs* in between, before FirstToken
    push_to(key, ticket), any time after prefill(): KvPushed (blocks free, done) | KvPushFailed (KV kept, push again)

Life of a request on the decode side::

    reserve(request) -> Ticket ── Landed | LandingFailed (done) ── admit(key) ── StepTokens* with finish (done)

A request whose owner was lost is resumed by the same calls: reserve(request, held_tokens=...) takes the KV that a
replica has, and the engine computes the rest. Such a replica grows by replicate(key, ticket), while the request is on
the decode side: Replicated* ── ReplicaEnded, or the request's own end. A request moves to the holder of its replica
without loss by release(key): LetGo (done) | ReleaseFailed, and it goes on.

`adopt(key)` moves a request from one side to the other in an engine that plays both; nothing is pushed. `abort(key)`
ends either in any phase; `RequestFailed` is the engine's own way to end one. After a request is done its blocks are
free, or become free as soon as no transfer can touch them any more. One engine may play both sides.

The contract fits an engine that is driven step by step and one that schedules inside another process. So the engine
packs chunks and forms batches by itself, in the order in which the service submits; ordering and admission stay in
the service, which submits late.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kaveri.domain.sampling import FinishReason, Logprobs, ResolvedParams, check_token_ids
from kaveri.errors import InvalidArgument
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket

MAX_SCORED_TOKENS = 256
"""Tokens of prompts whose log-probabilities one step computes, where Kaveri forms the steps, and one event carries:
the logits of a whole chunk would take gigabytes with a large vocabulary."""


class EngineKey(NamedTuple):
    """Key of a request inside one engine. Engines compare keys for equality only."""

    request_id: str
    serial: int
    """Counter of the service, so that no two requests of a process share a key. Not the router's attempt number."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request as submitted to the engine that prefills it, and to the one that decodes it."""

    key: EngineKey
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens that earlier attempts have generated. At least one."""
    generated_count: int
    """Number of generated tokens in token_ids: the index, within the answer, of the next token."""
    params: ResolvedParams
    """Has max_tokens and seed set. max_tokens counts from the beginning of the answer."""
    suspect_until: int = 0
    """The request is a suspect until its answer has this many tokens: it was in a step that raised. A step computes at
    most one suspect, alone if the engine can arrange it. 0: not a suspect."""
    stays: bool = False
    """On the prefill side: the service intends to adopt() and admit() it at its first token. An engine may draw a few
    tokens before, and reports them once the request is admitted."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the client's own prompt."""
        return len(self.token_ids) - self.generated_count

    @property
    def scores_prompt(self) -> bool:
        """True if prefill reports log-probabilities of the prompt's tokens."""
        return self.params.prompt_logprobs is not None and self.generated_count == 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Constants of an engine's lifetime."""

    engine: str
    """"transformers", "vllm", "fake" or "timed"."""
    layout: KvLayout
    total_blocks: int
    max_model_len: int
    """Most tokens of prompt and answer together; one such request always fits into the empty pool."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    epoch: int
    """Incarnation of the engine; carried by its tickets."""
    kv_endpoints: tuple[KvEndpoint, ...]
    """Addresses where its pool takes pushes. Empty for an engine that only prefills."""
    can_replicate: bool = False
    """True if replicate() works."""
    runs_ahead: bool = False
    """True if the engine decodes a few tokens of a request that stays before adopt() and admit()."""

    def require_servable(self, request: EngineRequest) -> None:
        """Raise InvalidArgument for a request that this engine can never serve."""
        token_ids, max_tokens = request.token_ids, request.params.max_tokens
        longest = self.max_model_len - 1
        if not 1 <= len(token_ids) <= longest:
            raise InvalidArgument("token_ids", f"{len(token_ids)} tokens", f"1 to {longest} tokens")
        self.require_known_ids(token_ids, request.params)
        if not 0 <= request.generated_count < len(token_ids):
            raise InvalidArgument("generated_count", request.generated_count, f"in [0, {len(token_ids)})")
        if max_tokens is not None and request.generated_count >= max_tokens:
            raise InvalidArgument("params.max_tokens", max_tokens, f"above the {request.generated_count} drawn already")

    def require_known_ids(self, token_ids: Sequence[int], params: ResolvedParams) -> None:
        """Raise InvalidArgument for ids outside the vocabulary, of tokens and of those that end the answer."""
        check_token_ids("token_ids", token_ids, self.vocab_size)
        check_token_ids("params.stop_token_ids", params.stop_token_ids, self.vocab_size)

    def require_held_tokens(self, request: EngineRequest, held_tokens: int) -> None:
        """Raise InvalidArgument unless a request may be resumed from the KV of this many of its tokens."""
        longest = len(request.token_ids) - 1
        if not 1 <= held_tokens <= longest:
            raise InvalidArgument("held_tokens", held_tokens, f"1 to {longest}, all tokens but the last")


class EngineStats(NamedTuple):
    """A snapshot, cheap enough for every heartbeat."""

    free_blocks: int
    """Blocks that no request holds or was promised; the next token of a running request counts as promised."""
    running_requests: int
    """Prefill: submitted and not fully computed. Decode: admitted, preempted ones included."""
    waiting_requests: int
    """Decode: reserved or landed, not admitted."""
    pending_prefill_tokens: int
    """Tokens submitted by prefill() and not computed yet."""
    context_tokens: int
    """Tokens whose KV is held."""
    turn_count: int = 0
    """Times that the engine's thread has looked for something to compute; it made a step if there was."""
    is_busy: bool = False
    """A turn is under way, or due. An engine that is busy for long without another turn is stuck."""
    longest_step_s: float = 0.0
    """Longest of the recent steps, in seconds. 0: there was none."""
    computed_tokens: int = 0
    """Tokens that steps have computed so far; recomputed tokens count each time."""


class EngineEvent:
    """Event of an engine, for its listener."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RequestEvent(EngineEvent):
    """Event of one request."""

    key: EngineKey


@dataclass(frozen=True, slots=True)
class PrefillStarted(RequestEvent):
    """The request's first chunk begins to be computed."""


@dataclass(frozen=True, slots=True)
class PrefillProgress(RequestEvent):
    """A chunk of the request is computed; for the last chunk FirstToken is sent instead."""

    computed_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs(RequestEvent):
    """Log-probabilities of the prompt's tokens. Only sent if generated_count is 0: otherwise an earlier attempt has
    reported them. Positions come in order, from 1 on; those of the last chunk come before FirstToken."""

    first: int
    """Position within the prompt of the first entry."""
    entries: tuple[Logprobs, ...]
    """One for each position; at most MAX_SCORED_TOKENS."""


@dataclass(frozen=True, slots=True)
class FirstToken(RequestEvent):
    """The prompt is computed and the next token drawn. With `finish` the request is done and its blocks are free."""

    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class KvPushed(RequestEvent):
    """The receiver has accepted the KV, with its hand-over. The request is done here and its blocks are free."""

    kv_bytes: int
    transport: str


@dataclass(frozen=True, slots=True)
class KvPushFailed(RequestEvent):
    """The push ended without acceptance. The KV is kept: push_to may be called again with another ticket."""

    reason: str


@dataclass(frozen=True, slots=True)
class Landed(RequestEvent):
    """All KV of a reserved request has arrived and is verified. It waits for admit()."""

    kv_bytes: int
    first_token_id: int | None
    """Token drawn by prefill, before the first one that is drawn here. None for a resumed request."""


@dataclass(frozen=True, slots=True)
class LandingFailed(RequestEvent):
    """The KV will not arrive (sender gone, digest wrong, ticket expired). The request is done here."""

    reason: str


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One token of one request."""

    key: EngineKey
    index: int
    """Position within the answer. The first one after a landing is generated_count + 1: prefill drew the one before.
    The first one of a resumed request is generated_count."""
    token_id: int
    logprobs: Logprobs | None
    finish: FinishReason | None
    """Set on the last token; the request is done and its blocks are free."""


@dataclass(frozen=True, slots=True)
class StepTokens(EngineEvent):
    """Tokens that one step of the running batch drew; at most one per request."""

    steps: tuple[TokenStep, ...]


@dataclass(frozen=True, slots=True)
class Preempted(RequestEvent):
    """Blocks ran out and this request gave up its own. The engine recomputes it; no token is lost.

    Also for a landed request that is not admitted yet: it still waits for admit().
    """


@dataclass(frozen=True, slots=True)
class Replicated(RequestEvent):
    """The holder of the request's replica now keeps the KV of its first tokens."""

    token_count: int
    """A multiple of the layout's block_tokens, higher than before in the same copy. At most what is computed."""


@dataclass(frozen=True, slots=True)
class ReplicaEnded(RequestEvent):
    """The replica grows no more: its holder is gone, full, or refuses. The request continues, and replicate() may be
    called again with another ticket. Not sent after the request's own end."""

    reason: str


@dataclass(frozen=True, slots=True)
class LetGo(RequestEvent):
    """The holder of the request's replica has the KV of all tokens but the last. The request is done here, and its
    blocks are free."""

    token_count: int
    """Tokens whose KV the holder has."""


@dataclass(frozen=True, slots=True)
class ReleaseFailed(RequestEvent):
    """The request was not released, and continues here. If its replica has ended, ReplicaEnded comes before."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestFailed(RequestEvent):
    """The engine cannot continue this request. It is done and its blocks are free."""

    reason: str
    is_final: bool = False
    """The request's own computation has raised, and would on any other engine: it must not be placed again."""


@dataclass(frozen=True, slots=True)
class EngineStopped(EngineEvent):
    """The engine is broken and accepts no more calls; the process should end. Sent at most once, as the last event."""

    reason: str
    suspects: Mapping[EngineKey, int] | None = None
    """After a step has raised: its requests, each with its new EngineRequest.suspect_until. Empty when a suspect was
    among them: RequestFailed has just ended that one, and the others are innocent. None: it broke outside of a step."""


EngineListener = Callable[[Sequence[EngineEvent]], None]
"""Called on one of the engine's own threads, with events in the order in which they happened; must not block."""


class Engine(Protocol):
    """The methods that both sides share. Every method may be called from any thread."""

    @property
    def info(self) -> EngineInfo:
        """Constants of the engine, known once it is constructed."""

    def start(self, listener: EngineListener) -> None:
        """Start the engine's threads. Events go to `listener` from now on."""

    def close(self) -> None:
        """End threads, transfers and listeners' calls, and free the pool. Idempotent; waits a few seconds at most."""

    def stats(self) -> EngineStats:
        """Snapshot of the engine. Never blocks on a step."""

    def kv_flow(self) -> KvFlow:
        """Snapshot of the KV transfers from and to this engine. Never blocks on a step."""

    def abort(self, key: EngineKey) -> None:
        """End a request in any phase. Idempotent; unknown keys are ignored. Events in flight may still follow."""

    def check_integrity(self) -> None:
        """Assert that every block is free, held by a live request, or quarantined by a live transfer."""


class PrefillEngine(Engine, Protocol):
    """Computes prompts in chunks and pushes their KV."""

    def prefill(self, request: EngineRequest) -> None:
        """Submit a request; requests are computed in the order of submission, packed into chunks.

        Allocates all blocks of the prompt at once, so that a chunk never waits for memory. Raises NoCapacity when they
        are not free now, InvalidArgument when the prompt can never fit, RequestAlreadyExists while the key is live on
        this side, and EngineError once the engine has stopped.
        """

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        """Push computed KV, and later KV layer by layer, to the ticket's blocks; then hand over.

        Raises LayoutMismatch, InvalidArgument while an earlier push of the request is open, and EngineError once the
        engine has stopped. Every other failure is a KvPushFailed. Unknown keys are ignored, and so are those of
        requests that have ended: a caller whose request ends with FirstToken aborts its reservation.
        """


class DecodeEngine(Engine, Protocol):
    """Takes requests whose KV is pushed to it and generates their tokens."""

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "Future[Ticket]":
        """Take the blocks that the prompt and one more token need, and grant a ticket for the prompt's KV.

        held_tokens: resumes a request. The ticket is for the KV of that many of its tokens: at least one, and fewer
        than all. Once admitted, the engine computes the other tokens in chunks, as it does after a preemption, and
        draws the token of index generated_count next. The note of the push is not read.

        source: the layout of the engine that will push it; None where it is this engine's own. The ticket lists a part
        for each pair of tensor-parallel ranks that have heads in common. The future fails with LayoutMismatch where
        blocks of the source cannot be mapped onto those here.

        The future fails with NoCapacity when they are not free now, and with InvalidArgument when the request can
        never fit or held_tokens is out of range; with RequestAlreadyExists while the key is live on this side,
        RequestCancelled when abort() comes first, and EngineError once the engine has stopped. The reservation ends by
        landing, abort() or after `expires_in_s` seconds (LandingFailed).
        """

    def adopt(self, key: EngineKey) -> None:
        """Decode here a request that was prefilled here: after its FirstToken it counts as landed, without a transfer.

        For an engine that plays both sides. Unknown keys, and requests whose push is open, are ignored.

        It never fails for lack of blocks, and adopted requests can be preempted. So it prevents a deadlock when no
        instance has room: computed prompts that wait for a ticket keep their blocks, and preempted requests that need
        those blocks block every reservation here.
        """

    def admit(self, key: EngineKey) -> None:
        """Let a landed request join the running batch with the next step. Unknown keys are ignored.

        Raises EngineError once the engine has stopped.
        """

    def replicate(self, key: EngineKey, ticket: Ticket) -> None:
        """Copy the KV of a request of the decode side, in the background, to an open ticket.

        Copies block by block, each when its last token is computed. The holder receives the tokens of the blocks with
        each mark (kaveri/kv/replicas/notes.py).

        Neither the request nor its blocks ever wait for the copy: not for preemption, finish or abort. When the request
        ends, the engine cancels the push, so the holder drops the replica.

        Raises LayoutMismatch unless the layouts are the same, InvalidArgument for a ticket that is not open, while an
        earlier copy of the request has not ended and where EngineInfo.can_replicate is false, and EngineError once the
        engine has stopped. Every other failure is a ReplicaEnded. For an unknown key, whose request may have just
        ended, the replica is cancelled at the holder.
        """

    def release(self, key: EngineKey, timeout_s: float) -> None:
        """Move a request of the decode side to the holder of its replica, with the KV of all tokens but the last.

        The request stops after the step under way. Its last blocks are copied, the part-full one too, and the push is
        finished with the ids of the tokens in that one. LetGo follows when the holder has taken all, after the
        request's last token. The request is computed no more from then on.

        ReleaseFailed follows instead, and the request continues here, when it has no replica, is being computed again
        after a preemption, its replica ends first, or the holder has not taken all after timeout_s seconds. No event
        follows when the request ends first: by its last token, or by abort(). Unknown keys are ignored, and so is a
        second call. A request is not admitted meanwhile: admit() comes before, or after ReleaseFailed. Raises
        EngineError once the engine has stopped.
        """
