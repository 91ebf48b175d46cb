"""Samples vLLM's tokens as the transformers engine does: by (seed, index within the answer, token id).

vLLM runs greedily, and a logits processor masks all but the sampled token. An answer continues unchanged in another
batch, after a preemption or on another instance; vLLM's stateful per-request generators are not used. Log-probabilities
are vLLM's, computed from the unmasked logits.

    EngineArgs(logits_processors=[KeyedDraws], ...), SamplingParams from kaveri.engine.vllm.sampling
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as BatchLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState

from kaveri.domain.grammar import Grammar, GrammarKind
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import DrawnToken, SequenceSlice
from kaveri.engine.stopping import barred_token_ids
from kaveri.engine.token_rules import History, TokenRules
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.engine.vllm.connector_scheduler import engine_id_of
from kaveri.engine.vllm.request import RAISED_DRAWS, TwoLists
from kaveri.errors import EngineError
from kaveri.text.grammars import grammars_of

_EXTRA_ARG = "kaveri"
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "seed")
_ENDING = ("min_tokens", "stop_token_ids", "ignore_eos")
"""Parameters sent only for requests with min_tokens."""
_RULES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_token_ids",
    "allowed_token_ids",
    "stop_token_ids",
)
"""Parameters sent only for requests with rules."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling inputs of one request besides the logits. Sent in vLLM's SamplingParams.extra_args."""

    params: ResolvedParams
    """Temperature, top_k, top_p, min_p and seed; with min_tokens also _ENDING, with has_rules also _RULES."""
    answer_start: int
    """Number of tokens before the answer: a token's index is its position minus this."""
    first_index: int
    """Index within the answer of the first token sampled by this placement."""
    eos_token_ids: frozenset[int] = frozenset()
    """The model's end-of-answer tokens; used with min_tokens."""
    engine_id: str = ""
    """Id under which a failed sampling is recorded. Empty if sampling runs in another process, where it raises."""
    rules: TokenRules | None = None
    """Applies params to the logits. Set in vLLM's process only; None if params has no rules."""

    @property
    def changes_logits(self) -> bool:
        """True if any token is not simply the argmax: it is sampled, or parameters exclude or change some."""
        params = self.params
        return params.temperature > 0 or params.min_tokens > self.first_index or params.has_rules

    @property
    def is_drawn(self) -> bool:
        """True if draw_tokens() samples the tokens; False for an argmax of which at most min_tokens excludes some."""
        return self.params.temperature > 0 or self.rules is not None

    def to_extra_args(self) -> dict[str, Any]:
        """Convert to plain values for SamplingParams.extra_args."""
        params = self.params
        names = [*_SAMPLED]
        names += _ENDING if params.min_tokens > self.first_index else ()
        names += _RULES if params.has_rules else ()
        values = {name: getattr(params, name) for name in names}
        values |= {"seed": params.seed or 0, "answer_start": self.answer_start, "first_index": self.first_index}
        if (grammar := params.grammar) is not None:
            begins = grammar.reasoning_end_ids, grammar.reasoning_begin_ids
            values["grammar"] = grammar.kind.value, grammar.source, *begins
        return {_EXTRA_ARG: values | {"eos_token_ids": sorted(self.eos_token_ids)}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, *, is_engines: bool = False) -> "Draw | None":
        """Undo to_extra_args(); None for other users' requests. is_engines: True in the engine's own process."""
        values = (extra_args or {}).get(_EXTRA_ARG)
        if values is None:
            return None
        params = ResolvedParams(**{name: values[name] for name in (*_SAMPLED, *_ENDING, *_RULES) if name in values})
        if params.bad_token_ids:
            # Lists, where it came from another process.
            params = replace(params, bad_token_ids=tuple(map(tuple, params.bad_token_ids)))
        if "grammar" in values:
            kind, source, *begins = values["grammar"]
            params = replace(params, grammar=Grammar(GrammarKind(kind), source, *map(tuple, begins)))
        eos_token_ids = frozenset(values["eos_token_ids"])
        engine_id = engine_id_of(extra_args or {}) if is_engines else ""
        return cls(params, values["answer_start"], values["first_index"], eos_token_ids, engine_id)


class KeyedDraws(BatchLogitsProcessor, SlotLogitsProcessor):
    """Logits processor for both of vLLM's model runners: samples tokens by key and masks all others.

    The older runner identifies requests by batch row and reports how rows move; the newer one ("V2") by a slot that a
    request keeps, and reports every row's slot at each step. vLLM discards the token of a chunk that does not end its
    prompt.
    """

    def __init__(self, vllm_config: Any, *rest: object) -> None:
        parallel = getattr(vllm_config, "parallel_config", None)
        self._is_engines = parallel is not None and parallel.world_size == 1
        self._model = vllm_config.model_config if parallel is not None else None
        # Token ids of all slots; only the newer runner passes them.
        self._tokens = next((each for each in rest if isinstance(each, LogitsProcRequestState)), None)
        # By row or slot: the request; for the older runner its sampled tokens (vLLM's own, growing list) and the number
        # of tokens before them.
        self._draws: dict[int, tuple[Draw, list[int], int]] = {}

    # Both runners.

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept everything: kaveri.domain.sampling has validated the engine's requests, and others are left alone."""

    def apply(self, logits: Tensor, ctx: LogitsContext | None = None) -> Tensor:
        """Mask all but the sampled tokens with -inf. logits: [rows, vocabulary], float32; changed in place."""
        placed = self._placed_by_row() if ctx is None else self._placed_by_slot(ctx)
        keep_drawn(logits, placed)
        return logits

    # The older runner.

    def is_argmax_invariant(self) -> bool:
        """Return False: vLLM's greedy sampling must use the changed logits."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply vLLM's additions, removals and moves of batch rows."""
        if batch_update is None:
            return
        # Same order as vLLM: a removed row may already have been reassigned.
        for row in batch_update.removed:
            self._draws.pop(row, None)
        for row, params, prompt_token_ids, output_token_ids in batch_update.added:
            prompt = prompt_token_ids or []
            self._add(row, params, output_token_ids, len(prompt), TwoLists(prompt, output_token_ids))
        for source, target, direction in batch_update.moved:
            moved, replaced = self._draws.pop(source, None), self._draws.pop(target, None)
            if moved is not None:
                self._draws[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._draws[source] = replaced

    # The newer runner.

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Add a request at slot req_idx. Returns True if its logits will be changed."""
        self._add(req_idx, sampling_params, [], 0, _SlotTokens(self._tokens, req_idx))
        return req_idx in self._draws

    def _add(self, place: int, params: Any, drawn: list[int], prompt_tokens: int, history: History) -> None:
        self._draws.pop(place, None)
        draw = Draw.from_extra_args(params.extra_args, is_engines=self._is_engines)
        if draw is not None and draw.params.has_rules:
            draw = replace(draw, rules=self._rules(draw, history))
        if draw is not None and draw.changes_logits:
            self._draws[place] = draw, drawn, prompt_tokens

    def _rules(self, draw: Draw, history: History) -> TokenRules:
        assert self._model is not None, "vLLM says which model it serves"
        vocab_size = self._model.get_vocab_size()
        # A rank in another process compiles the grammars in its steps.
        grammars = grammars_of(self._model.model, vocab_size, draw.eos_token_ids)
        return TokenRules(draw.params, history, draw.answer_start, vocab_size, draw.eos_token_ids, grammars)

    def _placed_by_row(self) -> Iterable[tuple[int, Draw, int]]:
        for row, (draw, drawn, prompt_tokens) in self._draws.items():
            yield row, draw, prompt_tokens + len(drawn) - draw.answer_start

    def _placed_by_slot(self, ctx: LogitsContext) -> Iterable[tuple[int, Draw, int]]:
        # A request has one row: vLLM refuses speculative decoding with this processor.
        slots, lengths = ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist()
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=False)):
            if slot in self._draws:
                draw = self._draws[slot][0]
                yield row, draw, length - draw.answer_start


@dataclass(frozen=True, slots=True)
class _SlotTokens:
    """History of a request in the newer runner, which keeps token ids on the device. Reading waits for the device."""

    tokens: LogitsProcRequestState | None
    slot: int

    def __getitem__(self, part: slice) -> Sequence[int]:
        assert self.tokens is not None, "the newer runner hands its tokens over"
        return cast("list[int]", self.tokens.all_token_ids.gpu[self.slot, part].tolist())


def keep_drawn(logits: Tensor, placed: Iterable[tuple[int, Draw, int]]) -> None:
    """Sample a token for each row in `placed` and mask the row: 0 for the token, -inf everywhere else.

    logits: [rows, vocabulary], floating point, changed in place. placed: row, request and index within the answer of
    the next token. A greedy row loses only the tokens that must not end its answer yet; a row without any possible
    token becomes NaN. A failed sampling is recorded in RAISED_DRAWS if its engine runs in this process, else raised.
    """
    # Before first_index the row is a chunk that does not end its prompt: nothing is sampled.
    due = [each for each in placed if each[2] >= each[1].first_index]
    for row, draw, index in due:
        try:
            _bar(logits, row, draw, index)
        except Exception as error:
            _note_raised(draw, f"its draw raised {error!r}", error)
    sampled = [each for each in due if each[1].is_drawn]
    if sampled:
        rows = torch.tensor([row for row, _, _ in sampled], device=logits.device)
        slices = [SequenceSlice((), 0, (), True, index, draw.params, draw.rules) for _, draw, index in sampled]
        drawn = draw_tokens(logits[rows], slices)
        logits.index_fill_(0, rows, -torch.inf)
        kept = list[tuple[int, int]]()
        for (row, draw, _), token in zip(sampled, drawn, strict=True):
            if isinstance(token, DrawnToken):
                kept.append((row, token.token_id))
            elif token.by_rules and not draw.engine_id:
                # vLLM takes any token. The engine finds that the rules do not permit it, and ends the request.
                continue
            elif token.is_final:
                _note_raised(draw, token.reason)
            else:
                # Counted by vLLM (VllmCore.undrawable) where the logits are float32 from the beginning.
                logits[row] = torch.nan
        if kept:
            logits[*torch.tensor(kept, device=logits.device).unbind(1)] = 0.0


def _bar(logits: Tensor, row: int, draw: Draw, index: int) -> None:
    barred = barred_token_ids(draw.params, draw.eos_token_ids, index)
    # With a grammar, TokenRules decides where the answer may end.
    if barred and draw.params.grammar is None:
        logits[row, torch.tensor(sorted(barred), device=logits.device)] = -torch.inf


def _note_raised(draw: Draw, reason: str, cause: Exception | None = None) -> None:
    """Record a failed sampling, for which the engine ends the request after the step; raise it in other processes."""
    if not draw.engine_id:
        raise EngineError(reason) from cause
    RAISED_DRAWS[draw.engine_id] = reason
