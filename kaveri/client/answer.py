"""What the SDK returns: pieces of an answer, the whole answer, and its timing. Values only."""

from dataclasses import dataclass, field

from kaveri.domain.sampling import FinishReason, Logprobs, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    """Tokens of the prompt after tokenizing and the chat template."""
    completion_tokens: int
    """Tokens generated and delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTiming:
    """Where a request spent its time in the cluster, in seconds, and which instances served it.

    Each part is measured by one process on its own clock, so the parts need not add up. 0: the phase did not happen.
    """

    router_s: float
    """In the router, before a prefill instance received the request."""
    prefill_queue_s: float
    """In the prefill instance's queue."""
    prefill_s: float
    """From the first chunk's start to the first token."""
    kv_transfer_s: float
    """From the ticket to the decode instance's acceptance; mostly overlaps prefill_s."""
    kv_tail_s: float
    """From the first token to the acceptance: the part of the transfer that prefill did not hide."""
    decode_queue_s: float
    """From the landing of the KV to the request's first decode step."""
    decode_s: float
    """From the first decode step to the last token."""
    kv_bytes: int
    """Bytes of KV cache pushed."""
    kv_transport: str
    """Transport that carried the KV cache; empty when nothing was pushed."""
    prefill_instance_id: str
    """The prefill instance that served the last attempt."""
    decode_instance_id: str
    """The decode instance that served the last attempt; empty when the first token was also the last."""
    attempts: int
    """How many times the request was placed: 1 when nothing failed."""
    ttft_s: float
    """From the request's arrival at the router to its first token there."""
    e2e_s: float
    """From the request's arrival at the router to its last token there."""
    reattaches: int = 0
    """How often another router took the request over. Then the other fields are what the last one knows."""
    resumes: int = 0
    """How often the request went on from a copy of its KV cache, after its decode instance was lost."""
    held_tokens: int = 0
    """Tokens whose KV those copies had."""
    recomputed_tokens: int = 0
    """Tokens that were computed again after instances were lost."""
    stall_s: float = 0.0
    """From the last token before each loss of an instance to the next one, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a request took, in seconds, on the caller's own clock."""

    ttft_s: float | None
    """From the call to the first token. None: no token came."""
    tpot_s: float | None
    """Seconds per token after the first, (last - first) / (tokens - 1). None: fewer than two tokens."""
    e2e_s: float
    """From the call to the end of the answer."""
    server: ServerTiming
    """The cluster's own timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToken:
    """One token of a prompt, and what the model thinks of it there."""

    token_id: int
    text: str
    """What it stands for, alone: a part of a character is U+FFFD."""
    logprobs: Logprobs | None
    """None: it is the first one, before which nothing comes."""
    raw_bytes: bytes = b""
    """Its bytes where they are not those of the text in UTF-8; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of an answer."""

    index: int
    """Index of the first of token_ids within the answer; consecutive over a stream."""
    token_ids: tuple[int, ...]
    """Tokens since the last chunk; several when the caller is slower than the model."""
    text: str
    """Text since the last chunk. May lag behind token_ids while a character or a stop text is undecided."""
    logprobs: tuple[Logprobs, ...]
    """One entry per token when the parameters asked for them, else empty."""
    finish_reason: FinishReason | None
    """Why the answer ended; None on every chunk but the last."""
    usage: Usage | None
    """On the last chunk."""
    timing: Timing | None
    """On the last chunk."""
    prompt_tokens: tuple[PromptToken, ...] = ()
    """The prompt's next tokens, from the first one on, when the parameters have prompt_logprobs. All come before the
    first token of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    request_id: str
    """The caller's id, or a generated one."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """One entry per token when the parameters asked for them, else empty."""
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    prompt_tokens: tuple[PromptToken, ...] = ()
    """One entry per token of the prompt when the parameters have prompt_logprobs, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model and its limits."""

    name: str
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    has_chat_template: bool
    """Whether `messages` can be used."""
    ready: bool
    """Whether a request would be accepted now."""
    default_params: SamplingParams = field(default_factory=SamplingParams)
    """What requests that leave them unset get: temperature, top_p, top_k and max_tokens, as far as the model's
    generation_config has them."""
