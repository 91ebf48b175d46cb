"""Compiles grammars for a model's tokens, with llguidance, and keeps them. Does not import torch.

The same grammar masks the same tokens on every instance: engines share one version of llguidance, these options, and
the tokenizer. llguidance releases the GIL while it compiles and while it computes a mask.
"""

import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from kaveri.domain.grammar import Grammar, GrammarKind
from kaveri.errors import InvalidArgument
from kaveri.models import resolve_model
from kaveri.parsers.schemas import NOTHING_MATCHES, one_line_schema

_KEPT = 64
"""Limit on the number of compiled grammars that are cached."""
_KEPT_CHARACTERS = 2**19
"""Limit on their total source length, in characters: one nested schema of 300 kB took 90 MB."""
_ERROR_CHARACTERS = 200
_TRIED_TOKENS = 16
_MARKER = re.compile(r"<.*>", re.DOTALL)
_NO_CHARACTER = "\ufdd0"
"""Unicode noncharacter, which no text contains."""


def parser_limits() -> LLParserLimits:
    """Return the limits on a grammar's size and on the work of one mask. They count steps, and so are the same on every
    machine."""
    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        # Errors would show the prompt's schema in logs.
        verbose_errors=False,
    )


def read_tokenizer(model: str) -> str:
    """Return a model's tokenizer as the JSON of a tokenizer.json. Blocks, for seconds where there is no such file."""
    file = Path(resolve_model(model)) / "tokenizer.json"
    if file.is_file():
        return file.read_text()
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(resolve_model(model)).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


def grammar_tokenizer(tokenizer_json: str | None, vocab_size: int, eos_token_ids: AbstractSet[int]) -> LLTokenizer:
    """Build the tokenizer that masks refer to. tokenizer_json: None for a model whose tokens 0 to 255 are bytes."""
    if tokenizer_json is None:
        return LLTokenizer("byte")
    eos_token = sorted(eos_token_ids) or None
    tokenizer_json = _without_marker_texts(tokenizer_json)
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_token)
    except ValueError:
        # The tokenizer has tokens beyond the model's vocabulary, which masks then leave out.
        return LLTokenizer(tokenizer_json, eos_token=eos_token)


def _without_marker_texts(tokenizer_json: str) -> str:
    """Return the tokenizer with markers such as <tool_call> renamed, so that no text is encoded as one.

    llguidance would encode forced text as such a token, and then reject it. Grammars name markers by id: <[128]>."""
    tokenizer = json.loads(tokenizer_json)
    names = {
        token["content"]: f"<{_NO_CHARACTER}{token['id']}>"
        for token in tokenizer.get("added_tokens") or ()
        if not token.get("special") and _MARKER.fullmatch(token["content"])
    }
    if not names:
        return tokenizer_json
    for token in tokenizer["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokenizer["model"]["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:
        tokenizer["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    return json.dumps(tokenizer, ensure_ascii=False)


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return a matcher at the beginning of the answer. Raises InvalidArgument if the grammar is wrong, too large, or no
    text can match it."""
    try:
        compiled = _notation_of_llguidance(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(grammar, str(error)) from error
    matcher = LLMatcher(tokenizer, compiled, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            raise _refused(grammar, NOTHING_MATCHES)
    if matcher.is_error():
        nothing = "NoExtension" in matcher.get_error()
        raise _refused(grammar, NOTHING_MATCHES if nothing else matcher.get_error())
    return matcher


def check_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Compile a grammar and try it on a short made-up answer. Raises InvalidArgument as compile_grammar() does, and if
    the grammar is too complex for that answer."""
    matcher, rng = compile_grammar(tokenizer, grammar), random.Random(0)
    for _ in range(_TRIED_TOKENS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped() or not mask:
            break
        # An allowed token that is somewhere in the vocabulary.
        above = mask >> (start := rng.randrange(mask.bit_length()))
        token_id = start + (above & -above).bit_length() - 1
        if token_id in tokenizer.eos_tokens or not matcher.consume_token(token_id):
            break
    if matcher.is_error():
        raise _refused(grammar, matcher.get_error())


def _notation_of_llguidance(grammar: Grammar) -> str:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(json.dumps(one_line_schema(json.loads(source))))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICES:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in json.loads(source)))
        case GrammarKind.LARK:
            return grammar_from("grammar", source)


def _refused(grammar: Grammar, reason: str) -> InvalidArgument:
    reason = " ".join(reason.replace("<non-verbose/>", "").split())[:_ERROR_CHARACTERS]
    value = f"a {grammar.kind.value} of {len(grammar.source)} characters"
    return InvalidArgument("params.grammar", value, f"a grammar that llguidance takes: {reason}")


@cache
def grammars_of(model: str, vocab_size: int, eos_token_ids: frozenset[int]) -> "Grammars":
    """Return this process's Grammars of a model: vLLM's engine and its logits processor share one instance."""
    return Grammars(model, vocab_size, eos_token_ids)


class Grammars:
    """Compiled grammars of an engine's model, by content. Thread-safe."""

    def __init__(self, model: str | None, vocab_size: int, eos_token_ids: AbstractSet[int]) -> None:
        """model: a path, a hub id or a bundled name; its tokenizer is read when the first grammar is compiled. None:
        byte tokens, see grammar_tokenizer()."""
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[GrammarKind, str], LLMatcher] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def prepare(self, grammar: Grammar) -> "Future[None]":
        """Compile a grammar on a thread of its own. The result raises InvalidArgument as compile_grammar()."""
        if self._kept(grammar) is not None:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        return self._thread.submit(self._prepare, grammar)

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher at the beginning of the answer. Compiles the grammar if it was not prepared, or is not
        kept any more."""
        return (self._kept(grammar) or self._compile(grammar)).deep_copy()

    def close(self) -> None:
        """Stop compiling. Grammars not begun are cancelled; prepare() may be called again."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    @property
    def _kept_characters(self) -> int:
        return sum(len(source) for _, source in self._compiled)

    @property
    def end_ids(self) -> Sequence[int]:
        """The tokenizer's end-of-text tokens, which may differ from the model's end-of-answer tokens."""
        assert self._tokenizer is not None, "a grammar has been compiled"
        return self._tokenizer.eos_tokens

    def _prepare(self, grammar: Grammar) -> None:
        # It may have been prepared since.
        if self._kept(grammar) is None:
            self._compile(grammar)

    def _kept(self, grammar: Grammar) -> LLMatcher | None:
        key = grammar.kind, grammar.source
        with self._lock:
            kept = self._compiled.get(key)
            if kept is not None:
                self._compiled.move_to_end(key)
            return kept

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            tokenizer_json = None if self._model is None else read_tokenizer(self._model)
            self._tokenizer = grammar_tokenizer(tokenizer_json, self._vocab_size, self._eos_token_ids)
        compiled = compile_grammar(self._tokenizer, grammar)
        with self._lock:
            self._compiled[grammar.kind, grammar.source] = compiled
            while len(self._compiled) > 1 and (len(self._compiled) > _KEPT or self._kept_characters > _KEPT_CHARACTERS):
                self._compiled.popitem(last=False)
        return compiled
