"""Values returned by the SDK: chunks of an answer, whole answers, timings, models."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import FinishReason, Logprobs, SamplingParams
from kaveri.errors import InvalidArgument, KaveriError
from kaveri.parsers.answer import PLAIN, AnswerForm
from kaveri.parsers.parts import Content, Part, Reasoning, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    """Tokens of the prompt after tokenizing and the chat template."""
    completion_tokens: int
    """Tokens generated and delivered."""
    cached_tokens: int = 0
    """Tokens of the prompt whose KV prefill had from earlier requests; 0 if unknown, as after a re-attach."""


class AnswerCut(KaveriError):
    """An answer ended before it was whole, so that no object can be read from it."""

    def __init__(self, request_id: str, text: str, finish_reason: str) -> None:
        super().__init__(f"the answer to request {request_id!r} is not whole: it ended by {finish_reason!s}")
        self.request_id = request_id
        self.text = text
        self.finish_reason = finish_reason


class JsonModel(Protocol):
    """A class whose instances JSON describes, such as a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...
    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Self: ...


JsonModelT = TypeVar("JsonModelT", bound=JsonModel)


def with_schema(params: SamplingParams | None, schema: type[JsonModel]) -> SamplingParams:
    """Return `params` with the grammar of a class. Raises InvalidArgument if they have one."""
    params = SamplingParams() if params is None else params
    if params.grammar is not None:
        raise InvalidArgument("schema", schema, "left out where params has a grammar")
    return replace(params, grammar=Grammar.json_schema(schema.model_json_schema()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTiming:
    """Durations of a request's phases in the cluster, in seconds. Each is measured by one process on its own clock, so
    they need not add up. 0: the phase did not happen."""

    router_s: float
    """Time in the router, before a prefill instance received the request."""
    prefill_queue_s: float
    """Time in the prefill instance's queue."""
    prefill_s: float
    """Time from the first chunk's start to the first token."""
    kv_transfer_s: float
    """Time from the grant of KV blocks by the decode instance to its acceptance of the KV; mostly overlaps
    prefill_s."""
    kv_tail_s: float
    """Time from the first token to acceptance: the part of the transfer not hidden by prefill."""
    decode_queue_s: float
    """Time from the arrival of the KV to the request's first decode step."""
    decode_s: float
    """Time from the first decode step to the last token."""
    ttft_s: float
    """Time from arrival at the router to the first token there."""
    e2e_s: float
    """Time from arrival at the router to the last token there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTiming(PhaseTiming):
    """Durations of a request's phases in the cluster, the instances that served it, and its recoveries."""

    kv_bytes: int
    """Bytes of KV cache pushed."""
    kv_transport: str
    """Transport of the KV cache; empty when nothing was pushed."""
    prefill_instance_id: str
    """Prefill instance of the last attempt."""
    decode_instance_id: str
    """Decode instance of the last attempt; empty when the first token was also the last."""
    attempts: int
    """Number of placements: 1 when nothing failed."""
    reattaches: int = 0
    """Number of takeovers by another router. The other fields are then those of the last router."""
    resumes: int = 0
    """Number of resumptions from a copy of the KV cache, after a decode instance was lost."""
    held_tokens: int = 0
    """Number of tokens in those copies."""
    recomputed_tokens: int = 0
    """Tokens recomputed after instances were lost."""
    stall_s: float = 0.0
    """Total time from the last token before each loss of an instance to the next token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Latencies of a request in seconds, on the caller's clock."""

    ttft_s: float | None
    """Time from the call to the first token. None: no token arrived."""
    tpot_s: float | None
    """Seconds per token after the first, (last - first) / (tokens - 1). None: fewer than two tokens."""
    e2e_s: float
    """Time from the call to the end of the answer."""
    server: ServerTiming
    """The cluster's own timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToken:
    """A token of a prompt, with log-probabilities."""

    token_id: int
    text: str
    """Text of this token alone; part of a character is U+FFFD."""
    logprobs: Logprobs | None
    """Log-probabilities of the token; None for the first token, which nothing precedes."""
    raw_bytes: bytes = b""
    """The token's bytes if they differ from the text in UTF-8, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Part of a streamed answer."""

    index: int
    """Index of the first of token_ids within the answer; consecutive over a stream."""
    token_ids: tuple[int, ...]
    """Tokens since the previous chunk; several when the caller is slower than the model."""
    text: str
    """Text since the previous chunk. May lag behind token_ids while a character or a stop text is undecided."""
    logprobs: tuple[Logprobs, ...]
    """Log-probabilities with one entry per token if requested, else empty."""
    finish_reason: FinishReason | None
    """Reason of the end; None on every chunk but the last."""
    usage: Usage | None
    """Token counts; None on every chunk but the last."""
    timing: Timing | None
    """Latencies; None on every chunk but the last."""
    prompt_tokens: tuple[PromptToken, ...] = ()
    """Next tokens of the prompt, if prompt_logprobs are requested. All precede the first token of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    request_id: str
    """The caller's id, or a generated one."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    """Log-probabilities with one entry per token if requested, else empty."""
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    prompt_tokens: tuple[PromptToken, ...] = ()
    """Tokens of the prompt if prompt_logprobs are requested, else empty."""
    answer_form: AnswerForm = PLAIN
    """How the text is read: where the model's calls of tools and its reasoning are."""

    @property
    def parts(self) -> list[Part]:
        """Reasoning, Content and ToolCalls of the text, in order. Raises ValueError if the parser is not installed."""
        parser = self.answer_form.parser()
        return [*parser.feed(self.text), *parser.close()]

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Calls of tools that the answer has, each with its name and its arguments, JSON."""
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def content(self) -> str:
        """Text without reasoning and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        """What the model thought before its answer."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    def parsed(self, schema: type[JsonModelT]) -> JsonModelT:
        """Return an object of `schema` read from the text. Raises AnswerCut if the answer ended too early, and what
        schema raises."""
        if self.finish_reason is not FinishReason.STOP:
            raise AnswerCut(self.request_id, self.text, self.finish_reason)
        return schema.model_validate_json(self.content)


class RenderedPrompt(NamedTuple):
    """A prompt as tokens, and what a request that sends them needs beside."""

    token_ids: tuple[int, ...]
    grammar: Grammar | None
    """For SamplingParams: the request's own, or one that also says which calls of tools there must be."""
    answer_form: AnswerForm
    shows_special: bool
    """SamplingParams.skip_special_tokens must be False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model and its limits."""

    name: str
    max_model_len: int
    """Max tokens of prompt and answer together."""
    vocab_size: int
    """Token ids lie in [0, vocab_size)."""
    has_chat_template: bool
    """True if `messages` can be used."""
    ready: bool
    """True if a request would be accepted now."""
    default_params: SamplingParams = field(default_factory=SamplingParams)
    """Defaults of unset parameters: temperature, top_p, top_k and max_tokens, from the model's generation_config."""
