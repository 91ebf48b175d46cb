"""Converts an HTTP request's JSON object to prompts and sampling parameters; refuses unknown fields by name. Pure."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kaveri.client.request import ChatOptions, Message
from kaveri.domain.grammar import GrammarKind
from kaveri.domain.sampling import (
    MAX_COPIED_CHARACTERS,
    MAX_COPIED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PROMPT_REPORT,
    SamplingParams,
    derived_seed,
)
from kaveri.errors import InvalidArgument
from kaveri.parsers.answer import PLAIN, AnswerForm
from services.gateway.fields import Accepts, Fields, any_of, check_items, check_object, empty, number, one_of
from services.gateway.grammars import take_grammar
from services.gateway.tools import NO_TOOLS, take_calls, take_chat_options

Prompt = str | tuple[int, ...] | tuple[Message, ...]
"""A text, token ids, or the messages of a conversation."""

_COMPLETION_TOKENS = 16
"""Default max_tokens of completions, as in OpenAI's API. Chat answers are limited by the context length only."""
_MOST_OF_PROMPTS = 2 * MAX_PROMPT_REPORT
_TOKEN_ID_BYTES = 4
_TOKEN_ID_DIGITS = 10
_IN_CALLS = re.compile(r"a grammar that llguidance takes: at ([3-9]|\d\d+)\(")
"""Limit of an error in the rules of calls, which routers write after the two lines of the request's own schema."""
_LOGPROB_BYTES = 500
"""Gateway memory per log-probability until its answer is written: 190 to 290 bytes measured, plus its JSON."""


def _all(names: str, accepts: Accepts) -> dict[str, Accepts]:
    return dict.fromkeys(names.split(), accepts)


_HARMLESS: Mapping[str, Accepts] = {
    **_all("add_special_tokens spaces_between_special_tokens", any_of(bool)),
    **_all("prompt_cache_key prompt_cache_retention safety_identifier user", any_of(str)),
    "priority": number(0),
    "length_penalty": number(1),
    **_all("include_stop_str_in_output no_stop_trim return_hidden_states return_tokens_as_token_ids", one_of(False)),
    **_all("store use_beam_search", one_of(False)),
    "metadata": any_of(dict),
    "service_tier": one_of("auto", "default"),
    **_all("cache_salt guided_decoding_backend guided_whitespace_pattern kv_transfer_params", one_of()),
    **_all("logits_processors request_id truncate_prompt_tokens vllm_xargs", one_of()),
}
"""Unsupported parameters of OpenAI, vLLM and SGLang, with predicates for the values that have no effect."""
HARMLESS_OF_COMPLETIONS: Mapping[str, Accepts] = {
    **_HARMLESS,
    "add_special_tokens": one_of(True),
    "prompt_embeds": one_of(),
    "suffix": one_of(""),
}
HARMLESS_OF_CHAT: Mapping[str, Accepts] = {
    **_HARMLESS,
    **_all("separate_reasoning stream_reasoning", one_of(True)),
    **_all("add_special_tokens", one_of(False)),
    "documents": empty,
    **_all("audio chat_template mm_processor_kwargs prediction web_search_options", one_of()),
    **NO_TOOLS,
    "modalities": one_of(["text"]),
    # OpenAI's default.
    "verbosity": one_of("medium"),
}
_HARMLESS_WITHOUT_FUNCTIONS: Mapping[str, Accepts] = {**HARMLESS_OF_CHAT, "functions": any_of(list)}
"""As HARMLESS_OF_CHAT, but functions may be listed: function_call "none" disables them."""
_HARMLESS_OF_MESSAGE: Mapping[str, Accepts] = {
    **_all("annotations reasoning_details refusal", empty),
    # LiteLLM sends back what it adds to answers.
    "provider_specific_fields": any_of(dict),
    **_all("audio function_call", one_of()),
}


class UsageEvents(enum.Enum):
    """Events of a streamed answer that carry token counts: none, an extra last one, or each one."""

    NONE = enum.auto()
    LAST = enum.auto()
    EACH = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    model: str | None
    """Name of the model; None if not stated, which is valid while one model is served."""
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    n: int = 1
    stream: bool = False
    usage_events: UsageEvents = UsageEvents.NONE
    echo: bool = False
    """True if the answer's text begins with the prompt, or with the last message that it continues."""
    shows_reasoning: bool = True
    """False: the answer is sent without the model's reasoning."""
    chat: ChatOptions | None = None
    """What a conversation has beside its messages; None for prompts that are none, or are tokenized."""
    form: AnswerForm = PLAIN
    """How answers to a prompt that was tokenized are read."""
    prompt_alone: bool = False
    """True if max_tokens is 0: the answer shows only the prompt. One token is still sampled, and dropped."""
    prompt_logprobs: bool = False
    """True if the response has a field "prompt_logprobs", as in vLLM."""
    return_token_ids: bool = False
    grammar_param: str = ""
    """Name of the parameter that has the grammar."""

    @property
    def echoes_logprobs(self) -> bool:
        """True if an answer's logprobs begin with those of the prompt (echo and logprobs)."""
        return self.echo and self.params.logprobs is not None

    @property
    def answers(self) -> tuple[tuple[Prompt, SamplingParams], ...]:
        """(prompt, parameters) of each answer, n per prompt. Only a prompt's first answer requests its logprobs."""
        first = self.params
        seeds = [derived_seed(first.seed, number) for number in range(1, self.n)]
        variants = [first, *(replace(first, seed=seed, prompt_logprobs=None) for seed in seeds)]
        return tuple((prompt, variant) for prompt in self.prompts for variant in variants)

    @property
    def copied_bytes(self) -> int:
        """Size of the prompts' token ids that are sent again for the answers after each prompt's first, in bytes."""
        return _TOKEN_ID_BYTES * (self.n - 1) * sum(len(prompt) for prompt in self.prompts if is_token_ids(prompt))

    def check_copies(self) -> None:
        """Raise InvalidArgument if n copies of the prompts exceed the limit on tokens or characters."""
        if self.n == 1:
            return
        for unit, most, is_counted in (
            ("tokens", MAX_COPIED_TOKENS, is_token_ids),
            ("characters", MAX_COPIED_CHARACTERS, lambda prompt: not is_token_ids(prompt)),
        ):
            size = sum(_size_of(prompt) for prompt in self.prompts if is_counted(prompt))
            if size * self.n > most:
                limit = f"at most {max(1, most // size)} where the prompts have {size} {unit}: n * {unit} <= {most}"
                raise InvalidArgument("n", self.n, limit)

    @property
    def report_bytes(self) -> int:
        """Approximate memory of all logprobs of prompts (token ids). Raises InvalidArgument if it is too large."""
        if self.params.prompt_logprobs is None:
            return 0
        size = sum(map(len, self.prompts)) * self.n * (self.params.prompt_logprobs + 1)
        if size > _MOST_OF_PROMPTS:
            limit = f"a report of at most {_MOST_OF_PROMPTS}: ({self._report_param} + 1) * n * tokens of the prompts"
            raise InvalidArgument(self._report_param, f"a report of {size}", limit)
        return _LOGPROB_BYTES * size

    def named(self, error: InvalidArgument) -> InvalidArgument:
        """Return the error with this request's own name of the parameter."""
        if error.field == "params.grammar" and (self.grammar_param or self.chat):
            grammar = self.params.grammar
            is_schema = grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
            of_tools = not self.grammar_param or (is_schema and _IN_CALLS.match(error.limit))
            return InvalidArgument("tools" if of_tools else self.grammar_param, error.value, error.limit)
        if error.field != "params.prompt_logprobs":
            return error
        limit = error.limit.replace("prompt_logprobs", self._report_param)
        return InvalidArgument(self._report_param, error.value, limit)

    @property
    def _report_param(self) -> str:
        return "prompt_logprobs" if self.prompt_logprobs else "logprobs"


def is_token_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, tuple) and (not prompt or type(prompt[0]) is int)


def _size_of(prompt: Prompt) -> int:
    if isinstance(prompt, str) or is_token_ids(prompt):
        return len(prompt)
    return sum(len(turn.content) for turn in prompt if isinstance(turn, Message))


def read_completion(body: Mapping[str, Any], max_answers: int) -> ParsedRequest:
    """Parse the body of /v1/completions. max_answers: limit on prompts times n. Raises InvalidArgument."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    n = _n(fields, len(prompts), max_answers)
    best_of = fields.whole("best_of", 1, MAX_N)
    if best_of not in (None, n):
        raise InvalidArgument("best_of", best_of, f"left out, or {n} as n: Kaveri does not support it")
    logprobs = fields.whole("logprobs", 0, MAX_LOGPROBS)
    max_tokens = fields.take("max_tokens")
    echo = fields.flag("echo")
    prompt_alone = type(max_tokens) is int and max_tokens == 0
    if prompt_alone and not echo:
        raise InvalidArgument("max_tokens", 0, "at least 1; it may be 0 where echo is true")
    return _read_rest(
        fields,
        HARMLESS_OF_COMPLETIONS,
        prompts=prompts,
        n=n,
        echo=echo,
        # The model samples a token after each prompt that it computes.
        max_tokens=_COMPLETION_TOKENS if max_tokens is None else 1 if prompt_alone else max_tokens,
        logprobs=logprobs,
        prompt_alone=prompt_alone,
    )


def read_chat(body: Mapping[str, Any], max_answers: int) -> ParsedRequest:
    """Parse the body of /v1/chat/completions. max_answers: limit on n. Raises InvalidArgument."""
    fields = Fields(body)
    messages = read_messages(fields.take("messages"))
    n = _n(fields, 1, max_answers)
    max_tokens, newer = fields.take("max_tokens"), fields.take("max_completion_tokens")
    if max_tokens is not None and newer is not None and newer != max_tokens:
        raise InvalidArgument("max_tokens", max_tokens, "left out, or equal to max_completion_tokens")
    wants_logprobs = fields.flag("logprobs")
    top_logprobs = fields.whole("top_logprobs", 0, MAX_LOGPROBS)
    if top_logprobs and not wants_logprobs:
        raise InvalidArgument("top_logprobs", top_logprobs, "left out unless logprobs is true")
    chat, echo = take_chat_options(fields), fields.flag("echo")
    if echo and wants_logprobs:
        raise InvalidArgument("logprobs", True, "left out, or false, with echo")
    return _read_rest(
        fields,
        _HARMLESS_WITHOUT_FUNCTIONS if body.get("function_call") == "none" else HARMLESS_OF_CHAT,
        prompts=(messages,),
        chat=chat,
        n=n,
        echo=echo,
        max_tokens=max_tokens if newer is None else newer,
        logprobs=(top_logprobs or 0) if wants_logprobs else None,
    )


def read_messages(value: Any) -> tuple[Message, ...]:
    """Parse the messages of a conversation. Raises InvalidArgument."""
    items = check_items(value, "messages")
    return tuple(_message(each, f"messages[{number}]") for number, each in enumerate(items))


def _read_rest(
    fields: Fields,
    harmless: Mapping[str, Accepts],
    *,
    prompts: tuple[Prompt, ...],
    n: int,
    echo: bool,
    max_tokens: Any,
    logprobs: int | None,
    prompt_alone: bool = False,
    chat: ChatOptions | None = None,
) -> ParsedRequest:
    """Parse the fields common to completions and chat. harmless: see Fields.refuse_rest()."""
    stream = fields.flag("stream")
    temperature, top_p, top_k = (fields.take(name) for name in ("temperature", "top_p", "top_k"))
    prompt_logprobs = _prompt_logprobs(fields, stream, logprobs if echo else None)
    stop, stop_token_ids, min_tokens = (fields.take(name) for name in ("stop", "stop_token_ids", "min_tokens"))
    skip_special_tokens = fields.take("skip_special_tokens")
    seed = fields.whole("seed", -(2**63), 2**64 - 1)
    grammar, grammar_param = take_grammar(fields)
    return_token_ids = fields.flag("return_token_ids")
    shows_reasoning = chat is None or fields.flag("include_reasoning", default=True)
    if not shows_reasoning and (return_token_ids or logprobs is not None):
        # These show the reasoning's tokens.
        raise InvalidArgument("include_reasoning", False, "true, or left out, with logprobs or return_token_ids")
    if prompt_alone and min_tokens:
        raise InvalidArgument("min_tokens", min_tokens, "left out, or 0, where max_tokens is 0")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=0 if min_tokens is None else min_tokens,
        temperature=temperature,
        top_p=top_p,
        # vLLM's value for "all".
        top_k=0 if top_k == -1 else top_k,
        seed=None if seed is None else seed % 2**64,
        stop=() if stop is None else stop,
        stop_token_ids=() if stop_token_ids is None else stop_token_ids,
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=True if skip_special_tokens is None else skip_special_tokens,
        grammar=grammar,
        **_rules(fields),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo and prompt_logprobs is None else prompt_logprobs,
    )
    asked = ParsedRequest(
        model=fields.text("model"),
        prompts=prompts,
        params=params,
        n=n,
        stream=stream,
        usage_events=_usage_events(fields, stream),
        echo=echo,
        shows_reasoning=shows_reasoning,
        chat=chat,
        prompt_alone=prompt_alone,
        prompt_logprobs=prompt_logprobs is not None,
        return_token_ids=return_token_ids,
        grammar_param=grammar_param,
    )
    fields.refuse_rest(harmless)
    return asked


def _rules(fields: Fields) -> dict[str, Any]:
    """Take the parameters that change logits, by name; those left out are missing. Raises InvalidArgument."""
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "bad_words", "allowed_token_ids")
    taken = {name: value for name in names if (value := fields.take(name)) is not None}
    if (bias := fields.take("logit_bias")) is not None:
        taken["logit_bias"] = [(_token_id(key), value) for key, value in check_object(bias, "logit_bias").items()]
    return taken


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= _TOKEN_ID_DIGITS):
        raise InvalidArgument("logit_bias", f"{key:.40}", "an object whose names are token ids")
    return int(key)


def _prompt_logprobs(fields: Fields, stream: bool, echoed: int | None) -> int | None:
    """Parse vLLM's prompt_logprobs. echoed: number of top tokens of echoed prompt logprobs, which must be equal."""
    count = fields.whole("prompt_logprobs", 0, MAX_LOGPROBS)
    if count is None:
        return None
    if stream:
        raise InvalidArgument("prompt_logprobs", count, "left out where stream is true")
    if echoed is not None and echoed != count:
        raise InvalidArgument("prompt_logprobs", count, f"left out, or {echoed} as logprobs where echo is true")
    return count


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    limit = "a text, a list of texts, a list of token ids, or a list of such lists"
    if not isinstance(value, list) or not value:
        raise InvalidArgument("prompt", value, limit)
    if all(type(each) is int for each in value):
        return (tuple(value),)
    if all(type(each) is str for each in value):
        return tuple(value)
    prompts = [tuple(each) for each in value if type(each) is list and all(type(item) is int for item in each)]
    if len(prompts) < len(value):
        raise InvalidArgument("prompt", value, limit)
    return tuple(prompts)


def _n(fields: Fields, prompt_count: int, max_answers: int) -> int:
    n = fields.whole("n", 1, MAX_N) or 1
    if n * prompt_count > max_answers:
        value = f"{prompt_count} prompts with n = {n}" if prompt_count > 1 else n
        raise InvalidArgument("prompt" if prompt_count > 1 else "n", value, f"at most {max_answers} answers together")
    return n


def _usage_events(fields: Fields, stream: bool) -> UsageEvents:
    value = fields.take("stream_options")
    if value is None:
        return UsageEvents.NONE
    if not stream:
        raise InvalidArgument("stream_options", value, "left out unless stream is true")
    options = Fields(check_object(value, "stream_options"), "stream_options.")
    last, each = options.flag("include_usage"), options.flag("continuous_usage_stats")
    # Padding is optional: Kaveri adds none.
    options.refuse_rest({"include_obfuscation": any_of(bool)})
    if each and not last:
        raise InvalidArgument("stream_options.continuous_usage_stats", each, "left out unless include_usage is true")
    return UsageEvents.EACH if each else UsageEvents.LAST if last else UsageEvents.NONE


def _message(value: Any, path: str) -> Message:
    fields = Fields(check_object(value, path), path + ".")
    role, content = fields.text("role"), fields.take("content")
    calls, call_id, name = take_calls(fields, path), fields.text("tool_call_id"), fields.text("name")
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    fields.refuse_rest(_HARMLESS_OF_MESSAGE)
    if role is None:
        raise InvalidArgument(f"{path}.role", None, "a text")
    if content is None and role == "assistant":
        # Part of OpenAI's answers, which clients send back in the history.
        content = ""
    if isinstance(content, list):
        content = tuple(_text_part(part, f"{path}.content[{number}]", role) for number, part in enumerate(content))
    elif not isinstance(content, str):
        raise InvalidArgument(f"{path}.content", content, "a text, or a list of text parts")
    # Of others than tools no template sees a name.
    name = name if role == "tool" else None
    return Message(role, content, calls, call_id or "", name or "", reasoning or "")


def _text_part(value: Any, path: str, role: str) -> str:
    fields = Fields(check_object(value, path), path + ".")
    kind = fields.text("type") or ""
    if kind not in (("text", "refusal") if role == "assistant" else ("text",)):
        raise InvalidArgument(f"{path}.type", kind, "text: Kaveri takes no other parts")
    # Both kinds have their text in the field of their name.
    text = fields.text(kind)
    fields.refuse_rest({"cache_control": any_of(dict)})
    if text is None:
        raise InvalidArgument(f"{path}.{kind}", None, "a text")
    return text
