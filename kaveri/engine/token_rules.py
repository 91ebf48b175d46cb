"""Decides which tokens a request may draw next, and how its parameters change their logits. Needs no torch.

The rules depend only on the parameters, the prompt and the answer so far, so the answer is the same on every engine and
after every resume. The state kept here is a cache: it follows the answer token by token, and is rebuilt if the answer
becomes shorter.

Logits change in vLLM's order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty; then some tokens are
ruled out. Temperature, top_k, top_p and min_p come after.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from kaveri.text.grammars import Grammars

_FIRST_ROOM = 16

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint8]
"""A bit for each token, 8 to a byte from the lowest: shape [bytes of the vocabulary]."""


class History(Protocol):
    """Tokens of a prompt and its answer, at least those drawn so far. A list of them will do."""

    def __getitem__(self, part: slice, /) -> Sequence[int]: ...


class LogitChanges(NamedTuple):
    """Changes of one row of logits, for one draw. Arrays may be views that the next draw changes."""

    token_ids: npt.NDArray[np.int64]
    """Tokens whose logits change, without duplicates: shape [changed]."""
    values: Floats
    """Their bias, added; repetition, which divides positive logits and multiplies the others; frequency, then presence,
    subtracted: shape [4, changed]."""
    barred_ids: Sequence[int]
    """Tokens ruled out."""
    allowed: Bits | None
    """Tokens that may be drawn; None: all but barred_ids."""

    def permit(self, token_id: int) -> bool:
        """Return True if the token may be drawn."""
        is_allowed = self.allowed is None or bool(self.allowed[token_id // 8] >> token_id % 8 & 1)
        return is_allowed and token_id not in self.barred_ids

    def apply(self, logits: Floats) -> None:
        """Change one row of logits, in place: shape [vocabulary]. The sampler does the same to several rows at once."""
        bias, repetition, frequency, presence = self.values
        changed = logits[self.token_ids] + bias
        changed = np.where(changed > 0, changed / repetition, changed * repetition)
        logits[self.token_ids] = changed - frequency - presence
        logits[list(self.barred_ids)] = -np.inf
        if self.allowed is not None:
            logits[tokens_in(~self.allowed, len(logits))] = -np.inf


def tokens_in(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Unpack bits into an element for each token: shape [..., vocabulary] of [..., bytes]."""
    return np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


def _bits_of(token_ids: Iterable[int], vocab_size: int) -> Bits:
    are_in = np.zeros(vocab_size, np.bool_)
    are_in[list(token_ids)] = True
    return np.packbits(are_in, bitorder="little")


class TokenRules:
    """The rules of one request on one instance.

    params: has_rules. history: prompt and answer, read as the answer grows. answer_start: tokens of the prompt.
    vocab_size: length of a row of logits. grammars: of the engine's model, for params with a grammar.
    """

    def __init__(
        self,
        params: ResolvedParams,
        history: History,
        answer_start: int,
        vocab_size: int,
        eos_token_ids: AbstractSet[int],
        grammars: "Grammars | None",
    ) -> None:
        self._params = params
        self._history = history
        self._answer_start = answer_start
        self._allowed = _bits_of(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        self._vocab_size = vocab_size
        # Tokens that end the answer, always with the model's own: ignore_eos is refused with a grammar.
        self._ending_ids = sorted({*params.stop_token_ids, *eos_token_ids})
        self._grammars = grammars
        self._changed = _ChangedTokens(params)
        self._grammar: _FollowedGrammar | None = None
        self._seen = -1

    def changes(self, index: int) -> LogitChanges:
        """Return the changes for the draw at `index` of the answer; the tokens before it are in the history. Raises
        EngineError if the grammar became too complex."""
        if self._seen < 0 or index < self._seen:
            self._begin()
        drawn = self._history[self._answer_start + self._seen : self._answer_start + index]
        self._changed.count(drawn)
        if self._grammar is not None:
            self._grammar.follow(drawn)
        self._seen = index
        return self._changed.changes(self._barred(index), self._allowed_now(index))

    def _begin(self) -> None:
        params = self._params
        self._changed = _ChangedTokens(params)
        if params.repetition_penalty != 1:
            self._changed.add_prompt(self._history[: self._answer_start])
        if params.grammar is not None:
            assert self._grammars is not None, "the engine has grammars"
            matcher = self._grammars.matcher(params.grammar)
            self._grammar = _FollowedGrammar(matcher, params.grammar)
            never_ids = [each for each in self._grammars.end_ids if each < self._vocab_size]
            self._ending = _bits_of(self._ending_ids, self._vocab_size)
            self._inner = ~(_bits_of(never_ids, self._vocab_size) | self._ending)
            # No bits behind the last token.
            self._inner &= np.packbits(np.ones(self._vocab_size, np.bool_), bitorder="little")
        self._seen = 0

    def _allowed_now(self, index: int) -> Bits | None:
        """Return the tokens that allowed_token_ids and the grammar allow; None: all."""
        if self._grammar is None or self._grammar.in_reasoning:
            return self._allowed
        known, may_end = self._grammar.allowed()
        if len(known) < len(self._inner):
            known = np.pad(known, (0, len(self._inner) - len(known)))
        allowed = known[: len(self._inner)] & self._inner
        if index == 0:
            # The answer may begin with reasoning instead.
            allowed |= _bits_of(self._grammar.reasoning_begin_ids, self._vocab_size)
        if self._allowed is not None:
            allowed &= self._allowed
        # Once nothing can follow, the answer ends, even before min_tokens.
        if may_end and (index >= self._params.min_tokens or not allowed.any()):
            allowed |= self._ending
        return allowed

    def _barred(self, index: int) -> list[int]:
        """Return the tokens that would complete a bad word and, within reasoning, those that would end the answer."""
        # An answer that ends within its reasoning would lack the text that the grammar requires.
        barred = [*self._ending_ids] if self._grammar is not None and self._grammar.in_reasoning else []
        for *before, last in self._params.bad_token_ids:
            stop = self._answer_start + index
            if len(before) <= index and list(self._history[stop - len(before) : stop]) == before:
                barred.append(last)
        return barred


class _FollowedGrammar:
    """A grammar's matcher, which follows an answer."""

    def __init__(self, matcher: "LLMatcher", grammar: Grammar) -> None:
        self._matcher = matcher
        self._reasoning_end_ids = list(grammar.reasoning_end_ids)
        self.reasoning_begin_ids = grammar.reasoning_begin_ids
        self._last: list[int] = []
        self._is_first = True
        self.in_reasoning = bool(grammar.reasoning_end_ids) and not grammar.reasoning_begin_ids
        """True while the answer is reasoning, which the grammar does not concern."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Follow further tokens of the answer."""
        for number, token_id in enumerate(token_ids):
            if self._is_first and token_id in self.reasoning_begin_ids:
                self.in_reasoning = True
            elif not self.in_reasoning:
                self._matcher.consume_tokens(list(token_ids[number:]))
                break
            self._is_first = False
            self._last = [*self._last, token_id][-len(self._reasoning_end_ids) :]
            self.in_reasoning = self._last != self._reasoning_end_ids
        self._is_first = self._is_first and not token_ids

    def allowed(self) -> tuple[Bits, bool]:
        """Return the tokens that may come next, of the tokenizer's vocabulary, and True if the answer may end here.
        Raises EngineError if the grammar does not take the answer so far."""
        may_end = self._matcher.is_accepting()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise EngineError(f"its grammar: {' '.join(self._matcher.get_error().split())}")
        return bits, may_end


class _ChangedTokens:
    """Growing arrays of the tokens whose logits change. Each draw touches only these tokens."""

    def __init__(self, params: ResolvedParams) -> None:
        self._params = params
        self._places: dict[int, int] = {}
        self._token_ids = np.zeros(_FIRST_ROOM, np.int64)
        # LogitChanges.values.
        self._values = np.zeros((4, _FIRST_ROOM), np.float32)
        self._counts = np.zeros(_FIRST_ROOM, np.int64)
        self._counts_answer = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        for token_id, bias in params.logit_bias:
            place = self._place(token_id)
            self._values[0, place] = bias

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Enter the prompt's tokens, which the repetition penalty concerns."""
        for token_id in np.unique(np.asarray(token_ids, np.int64)).tolist():
            place = self._place(token_id)
            self._values[1, place] = self._params.repetition_penalty

    def count(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer."""
        if not self._counts_answer:
            return
        params = self._params
        for token_id in token_ids:
            place = self._place(token_id)
            self._counts[place] += 1
            self._values[1, place] = params.repetition_penalty
            # As vLLM: a product of float32, subtracted before the presence penalty.
            self._values[2, place] = np.float32(params.frequency_penalty) * np.float32(self._counts[place])
            self._values[3, place] = params.presence_penalty

    def changes(self, barred_ids: Sequence[int], allowed: Bits | None) -> LogitChanges:
        count = len(self._places)
        return LogitChanges(self._token_ids[:count], self._values[:, :count], barred_ids, allowed)

    def _place(self, token_id: int) -> int:
        """Return a token's index in the arrays; a new token is added, and full arrays are reallocated."""
        place = self._places.get(token_id)
        if place is not None:
            return place
        place = len(self._places)
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._values = np.concatenate((self._values, np.zeros_like(self._values)), axis=1)
        self._places[token_id] = place
        self._token_ids[place] = token_id
        self._values[1, place] = 1.0
        return place
