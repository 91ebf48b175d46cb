"""Sampling parameters, finish reasons and log-probabilities: the domain values behind sampling.proto."""

import enum
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any

from kaveri.domain.grammar import Grammar
from kaveri.errors import InvalidArgument

MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_ALLOWED_TOKENS = 2**14
MAX_PROMPT_REPORT = 2**17
"""Max prompt log-probabilities of one request, (prompt_logprobs + 1) * tokens, of 100 to 200 bytes each."""
MAX_N = 128
"""Max answers to one prompt in one call, for protocols with such a parameter."""
MAX_COPIED_TOKENS = 2**20
"""Max prompt tokens of one call in total, each counted once per answer: each answer is a request."""
MAX_COPIED_CHARACTERS = 2**24
"""Max prompt characters of one call in total, before the prompts are tokenized; see MAX_COPIED_TOKENS."""
ALL_RULED_OUT = "the request's parameters rule out every token here"
"""Reason of a request's failure if its parameters exclude every token. Any other instance would fail likewise."""
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_FLOAT32_MAX = 3.4028234e38
"""Largest float32: a larger number would arrive as infinity."""
_FLOAT32_MIN = 1.4012984e-45
"""Smallest float32: a smaller top_p would arrive as 0."""
_WHOLE_NUMBERS = {
    "max_tokens": (1, _UINT32_MAX),
    "top_k": (0, _UINT32_MAX),
    "seed": (0, _UINT64_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Least and greatest value of optional parameters that are whole numbers; min_tokens depends on max_tokens."""
_NUMBERS = {
    "temperature": (0.0, _FLOAT32_MAX),
    "top_p": (_FLOAT32_MIN, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (_FLOAT32_MIN, _FLOAT32_MAX),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Least and greatest value of the other numeric parameters."""
_MAX_BIAS = 100.0
_WITH_DEFAULTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters for which a model may have defaults."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: odd, so that seeds of one request differ, and large, so that they are far apart."""


class FinishReason(enum.StrEnum):
    """Reason why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """Limits on the length of an answer, and the texts and tokens that end it."""

    max_tokens: int | None = None
    """Max tokens to generate, at least 1. None: the model's default, or all that its length leaves after the prompt."""
    min_tokens: int = 0
    """Min answer length, at most max_tokens. Until then end tokens are not sampled and stop texts are ignored."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the text is cut before the match."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(StopConditions):
    """Sampling and stop parameters of a request. Construction raises InvalidArgument, naming field, value and limit."""

    temperature: float | None = None
    """Divides the logits. 0 is greedy. None: the model's, as ModelInfo.default_params says, or 1."""
    top_p: float | None = None
    """Sample only from the smallest token set with a total probability of top_p, in (0, 1]. None: the model's, or 1."""
    top_k: int | None = None
    """Sample only from the top_k most likely tokens. 0: all. None: the model's, or 0."""
    min_p: float | None = None
    """Sample only tokens with at least min_p times the probability of the likeliest one. None: the model's, or 0."""
    repetition_penalty: float | None = None
    """Divides positive logits, and multiplies others, of tokens in prompt or answer. None: the model's, or 1."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the answer has the token, in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number in [-100, 100] added to its logit) of at most MAX_BIASED_TOKENS tokens; or a mapping. Added
    before the penalties."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens are not sampled in a row, also after a space; at most MAX_BAD_WORDS. The answer's text may
    still have one, spelled by other tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """Sample only these tokens, at most MAX_ALLOWED_TOKENS. Empty: all."""
    grammar: Grammar | None = None
    """What the answer's text must look like; not with ignore_eos. None: any text."""
    seed: int | None = None
    """Seed, combined with the token's index, in [0, 2**64). None: chosen by the router."""
    logprobs: int | None = None
    """Number of most likely tokens to report with each sampled token's log-probability. None: no report."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report at each prompt position. The prompt may then have at most
    MAX_PROMPT_REPORT / (prompt_logprobs + 1) tokens. None: no report."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. Stop texts are searched in the remaining text; one that is a special token
    still ends the answer."""

    def __post_init__(self) -> None:
        # A plain string is a common mistake; it must not become a tuple of its letters.
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = tuple(ordered_items("params.stop", texts, "a text or a sequence of texts"))
        token_ids = tuple(ordered_items("params.stop_token_ids", self.stop_token_ids, "a sequence of token ids"))
        check_counts(len(stop), len(token_ids), 0, 0, 0)
        for text in stop:
            _check_text("stop", text, MAX_STOP_TEXT_BYTES)
        stop_token_ids = tuple(_whole("stop_token_ids", token_id, 0, _UINT32_MAX) for token_id in token_ids)
        whole = {
            name: _whole(name, value, least, most)
            for name, (least, most) in _WHOLE_NUMBERS.items()
            if (value := getattr(self, name)) is not None
        }
        whole["min_tokens"] = _whole("min_tokens", self.min_tokens, 0, whole.get("max_tokens", _UINT32_MAX))
        broken = {
            name: _number(name, value, least, most)
            for name, (least, most) in _NUMBERS.items()
            if (value := getattr(self, name)) is not None
        }
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"params.{name}", getattr(self, name), "True or False")
        if self.grammar is not None:
            self._check_grammar()
        lists: dict[str, tuple[Any, ...]] = {"stop": stop, "stop_token_ids": stop_token_ids}
        # Most requests have none of them.
        if self.logit_bias or self.bad_words or self.allowed_token_ids:
            lists |= self._checked_rules()
        for name, checked in {**lists, **whole, **broken}.items():
            object.__setattr__(self, name, checked)

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise InvalidArgument("params.grammar", self.grammar, "a Grammar")
        if self.ignore_eos:
            raise InvalidArgument("params.ignore_eos", True, "False with a grammar, which says where the answer ends")

    def _checked_rules(self) -> dict[str, tuple[Any, ...]]:
        """Return logit_bias, bad_words and allowed_token_ids as tuples. Raises InvalidArgument."""
        given = self.logit_bias
        pairs = [_pair(each) for each in (given.items() if isinstance(given, Mapping) else given)]
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        bad_words = tuple(ordered_items("params.bad_words", words, "a text or a sequence of texts"))
        allowed = tuple(ordered_items("params.allowed_token_ids", self.allowed_token_ids, "a sequence of token ids"))
        check_counts(0, 0, len(pairs), len(bad_words), len(allowed))
        for text in bad_words:
            _check_text("bad_words", text, MAX_BAD_WORD_BYTES)
        bias = {
            _whole("logit_bias", token_id, 0, _UINT32_MAX): _number("logit_bias", added, -_MAX_BIAS, _MAX_BIAS)
            for token_id, added in pairs
        }
        return {
            "logit_bias": tuple(sorted(bias.items())),
            "bad_words": bad_words,
            "allowed_token_ids": tuple(_whole("allowed_token_ids", each, 0, _UINT32_MAX) for each in allowed),
        }

    def resolved(self, defaults: "SamplingParams | None" = None) -> "ResolvedParams":
        """Return the parameters for an engine: None becomes the value of `defaults`, or else the built-in one. Raises
        InvalidArgument when the default of max_tokens is below min_tokens."""
        given = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return ResolvedParams(**({} if defaults is None else defaults.chosen) | given)

    def check_known_ids(self, vocab_size: int, token_ids: Sequence[int] = ()) -> None:
        """Raise InvalidArgument if an id of token_ids or of a parameter is outside the vocabulary."""
        check_token_ids("token_ids", token_ids, vocab_size)
        check_token_ids("params.stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("params.allowed_token_ids", self.allowed_token_ids, vocab_size)
        check_token_ids("params.logit_bias", [token_id for token_id, _ in self.logit_bias], vocab_size)
        if self.grammar is not None:
            check_token_ids(
                "params.grammar", self.grammar.reasoning_end_ids + self.grammar.reasoning_begin_ids, vocab_size
            )
        # Only ResolvedParams have them.
        for ids in getattr(self, "bad_token_ids", ()):
            check_token_ids("params.bad_token_ids", ids, vocab_size)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values that a model may have defaults for and that are not None, by name."""
        return {name: value for name in _WITH_DEFAULTS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedParams(SamplingParams):
    """Sampling parameters for an engine, with all defaults filled in by the router."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Tokens of bad_words: the last of each is not sampled after the others."""

    def __post_init__(self) -> None:
        for name in _WITH_DEFAULTS[1:]:
            if getattr(self, name) is None:
                raise InvalidArgument(f"params.{name}", None, "a number")
        if self.bad_token_ids:
            too_many = len(self.bad_token_ids) > 2 * MAX_BAD_WORDS
            if too_many or not all(0 < len(ids) <= 2 * MAX_BAD_WORD_BYTES for ids in self.bad_token_ids):
                limit = f"at most {2 * MAX_BAD_WORDS} sequences of 1 to {2 * MAX_BAD_WORD_BYTES} ids"
                raise InvalidArgument("params.bad_token_ids", f"{len(self.bad_token_ids)} sequences", limit)
        SamplingParams.__post_init__(self)

    @property
    def has_rules(self) -> bool:
        """True if penalties, biases, token lists or a grammar change or exclude logits before sampling."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_token_ids
            or self.allowed_token_ids
            or self.grammar is not None
        )


def derived_seed(seed: int | None, number: int) -> int | None:
    """Seed for answer `number`, from 0, of several to one prompt; for number 0, `seed` modulo 2**64. None: no seed."""
    return None if seed is None else (seed + number * _SEED_STEP) % 2**64


def check_prompt_report(params: SamplingParams, prompt_tokens: int) -> None:
    """Raise InvalidArgument if the log-probabilities for a prompt of `prompt_tokens` exceed MAX_PROMPT_REPORT."""
    if params.prompt_logprobs is None:
        return
    most = MAX_PROMPT_REPORT // (params.prompt_logprobs + 1)
    if prompt_tokens > most:
        value = f"{params.prompt_logprobs} for a prompt of {prompt_tokens} tokens"
        limit = f"left out, or a prompt of at most {most} tokens: (prompt_logprobs + 1) * tokens <= {MAX_PROMPT_REPORT}"
        raise InvalidArgument("params.prompt_logprobs", value, limit)


def check_counts(stop: int, stop_token_ids: int, logit_bias: int, bad_words: int, allowed_token_ids: int) -> None:
    """Raise InvalidArgument if a list has more items than a request's may have. All are numbers of items."""
    for name, count, most in (
        ("stop", stop, MAX_STOP_TEXTS),
        ("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", logit_bias, MAX_BIASED_TOKENS),
        ("bad_words", bad_words, MAX_BAD_WORDS),
        ("allowed_token_ids", allowed_token_ids, MAX_ALLOWED_TOKENS),
    ):
        if count > most:
            unit = "texts" if name in ("stop", "bad_words") else "ids"
            raise InvalidArgument(f"params.{name}", f"{count} {unit}", f"at most {most} {unit}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument, naming `field`, unless all ids lie in [0, vocab_size)."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(field, token_id, f"below {vocab_size}, the size of the vocabulary")


def whole_number(value: object) -> int | None:
    """Return `value` as an int if it is a whole number of any type, such as numpy's; None otherwise, and for bools."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def ordered_items(field: str, value: object, limit: str) -> Iterable[object]:
    """Return `value` if it is an ordered collection, not a text, mapping or set. Raises InvalidArgument otherwise."""
    # Strings and mappings iterate over letters or keys, and sets in no order.
    unordered = isinstance(value, str | bytes | bytearray | Mapping | AbstractSet)
    if unordered or not isinstance(value, Iterable):
        raise InvalidArgument(field, value, limit)
    return value


def _whole(name: str, value: object, least: int, most: int) -> int:
    number = whole_number(value)
    if number is None or not least <= number <= most:
        raise InvalidArgument(f"params.{name}", value, f"a whole number in [{least}, {most}]")
    return number


def _number(name: str, value: object, least: float, most: float) -> float:
    if type(value) is float and least <= value <= most:
        return value
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:
        number = math.nan
    # NaN is in no range.
    if not least <= number <= most:
        raise InvalidArgument(f"params.{name}", value, f"a number in [{least:g}, {most:g}]")
    return number


def _pair(value: object) -> tuple[object, object]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidArgument("params.logit_bias", value, "a token id and the number added to its logit")
    return value[0], value[1]


def _check_text(name: str, text: object, most_bytes: int) -> None:
    limit = f"texts of 1 to {most_bytes} bytes"
    if not isinstance(text, str):
        raise InvalidArgument(f"params.{name}", text, limit)
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"params.{name}", text, f"Unicode text: {error.reason}") from error
    if not 0 < size_bytes <= most_bytes:
        raise InvalidArgument(f"params.{name}", text, limit)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one token and the likeliest at its position, before temperature, top_k and top_p."""

    logprob: float
    """Natural logarithm of the probability of the sampled token, or of the prompt's token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, the likeliest first."""
    text: str = field(default="", compare=False)
    """Text of this token alone: part of a character is U+FFFD. Empty: unknown here."""
    top_texts: tuple[str, ...] = field(default=(), compare=False)
    """Texts of the tokens in `top`; empty if unknown."""
    raw_bytes: bytes = field(default=b"", compare=False)
    """This token's bytes if they differ from its text in UTF-8, as for part of a character; else empty."""
    top_raw_bytes: tuple[bytes, ...] = field(default=(), compare=False)
    """Bytes of the tokens in `top`, as raw_bytes; empty if unknown."""
    text_offset: int = field(default=0, compare=False)
    """Offset of this token's text, or of the character that it is part of, in the answer, in characters."""
