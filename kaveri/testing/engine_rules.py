"""Conformance tests of penalties, biases, tokens ruled out and grammars, for every engine. Subclass RulesConformance
together with EngineConformance. To the model's tokenizer, tokens 0 to 255 must be bytes, and others their ids between
"<" and ">". The parameters change the answer, and it is the same wherever and however often it goes on. Not verified:
the arithmetic, which the engines share (kaveri.engine.token_rules)."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import RequestFailed
from kaveri.testing.engine_conformance import EngineHarness, Pair, make_request, running_pair, with_params
from kaveri.testing.engine_recorder import SOON_S, wait_until_free
from kaveri.testing.engine_resumption import assert_continues

_TOKENS = 40
_BYTES = 256
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": -0.3, "frequency_penalty": 0.4}
_FEW = 12
_RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "all penalties, sampled": {"temperature": 1.0, "min_p": 0.02, **_PENALTIES},
}
_SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9999}, "kind": {"enum": ["ab", "cd"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}


def _text(pair: Pair, token_ids: list[int]) -> str:
    *others, last = token_ids
    assert last in pair.decode.info.eos_token_ids
    parts = [bytes([each]) if each < _BYTES else f"<{each}>".encode() for each in others]
    return b"".join(parts).decode()


class RulesConformance:
    @pytest.mark.parametrize("rules", [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.01, **_PENALTIES}])
    def test_answer_with_a_schema_is_json_of_it_wherever_it_goes_on(
        self, harness: EngineHarness, rules: dict[str, Any]
    ) -> None:
        with running_pair(harness) as pair:
            grammar = Grammar.json_schema(_SCHEMA)
            for engine in (pair.prefill, pair.decode):
                engine.prepare(grammar).result(SOON_S)
            free = make_request(pair.prefill, "free", 37, _TOKENS)
            asked = with_params(free, "asked", ignore_eos=False, grammar=grammar, **rules)
            answer = pair.run(asked)
            found = json.loads(_text(pair, answer))
            assert list(found) == ["size", "kind"]
            assert 0 <= found["size"] <= 9999
            assert found["kind"] in ("ab", "cd")
            for drawn in (1, 2, len(answer) // 2, len(answer) - 1):
                assert_continues(pair, asked, answer, drawn)
            wait_until_free(pair.prefill, pair.decode)

    def test_grammar_says_where_the_answer_ends(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS)
            yes, several = Grammar.choices(["yes"]), Grammar.regex("a{3,}")
            # An answer ends before min_tokens only if its grammar lets nothing follow.
            whole = pair.run(with_params(free, "whole", ignore_eos=False, grammar=yes, min_tokens=20))
            assert _text(pair, whole) == "yes"
            bias = dict.fromkeys(pair.decode.info.eos_token_ids, 100.0)
            longer = with_params(free, "longer", ignore_eos=False, grammar=several, min_tokens=9, logit_bias=bias)
            assert len(pair.run(longer)) == 10
            shorter = with_params(free, "shorter", ignore_eos=False, grammar=several, logit_bias=bias)
            assert _text(pair, pair.run(shorter)) == "aaa"
            # A stop token ends it where the grammar may end, and nowhere else.
            stopped = with_params(free, "stopped", ignore_eos=False, grammar=several, stop_token_ids=(300,))
            stopped = replace(stopped, params=replace(stopped.params, logit_bias=((300, 100.0),)))
            assert pair.run(stopped) == [*b"aaa", 300]
            cut = with_params(free, "cut", ignore_eos=False, grammar=Grammar.regex("a{30,}"), max_tokens=7)
            assert bytes(pair.run(cut)) == b"a" * 7
            assert pair.decoded.finished[cut.key] is FinishReason.LENGTH
            # The grammar masks the tokens after the reasoning, and not those of the reasoning.
            begin = pair.run(free)[2:4]
            after = with_params(free, "after", ignore_eos=False, grammar=replace(yes, reasoning_end_ids=tuple(begin)))
            answer = pair.run(after)
            assert answer[:4] == pair.run(with_params(free, "free again"))[:4]
            assert _text(pair, answer[4:]) == "yes"
            # An answer that does not start with reasoning is masked from its first token.
            think = _BYTES + 50
            either = replace(yes, reasoning_end_ids=tuple(begin), reasoning_begin_ids=(think,))
            for forced, expected in ((ord("y"), None), (think, [think] * 9)):
                name, given = f"biased to {forced}", {"logit_bias": ((forced, 100.0),), "max_tokens": 9}
                answer = pair.run(with_params(free, name, ignore_eos=False, grammar=either, **given))
                assert answer == expected if expected else _text(pair, answer) == "yes"
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("rules", _RULES)
    def test_penalties_count_all_tokens_wherever_the_answer_goes_on(self, harness: EngineHarness, rules: str) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 37, _TOKENS)
            # Of few tokens, so that they repeat.
            few = with_params(free, "few", allowed_token_ids=tuple(range(_FEW)))
            asked = with_params(few, "asked", **_RULES[rules])
            answer = pair.run(asked)
            assert answer != pair.run(few)
            for drawn in (1, 9, _TOKENS - 2):
                assert_continues(pair, asked, answer, drawn)
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("sampling", ["greedy", "sampled"])
    def test_tokens_are_ruled_out_and_forced(self, harness: EngineHarness, sampling: str) -> None:
        sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if sampling == "sampled" else {}
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS, **sampled)
            whole = pair.run(free)
            repeated = max(whole, key=whole.count)
            barred = pair.run(with_params(free, "barred", bad_token_ids=((repeated,),)))
            assert repeated not in barred
            pairs = list(pairwise(whole))
            bigrams = pair.run(with_params(free, "bigrams", bad_token_ids=tuple(pairs[5:6])))
            assert bigrams[:6] == whole[:6]
            assert pairs[5] not in pairwise(bigrams)
            few = tuple(sorted({*whole[:3], repeated}))
            assert set(pair.run(with_params(free, "few", allowed_token_ids=few))) <= set(few)
            forced = pair.run(with_params(free, "forced", logit_bias=((repeated, 100.0),)))
            assert set(forced) == {repeated}
            wait_until_free(pair.prefill, pair.decode)

    def test_request_whose_rules_leave_no_token_fails_alone(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS)
            token_id = harness.answer(free.token_ids, 1)[0]
            asked = with_params(free, "none", allowed_token_ids=(token_id,), bad_token_ids=((token_id, token_id),))
            pair.hand_over(asked)
            failure = pair.decoded.wait_for(RequestFailed, asked.key)
            assert failure.is_final
            assert "rule out every token" in failure.reason
            assert pair.run(free) == harness.answer(free.token_ids, _TOKENS)
            wait_until_free(pair.prefill, pair.decode)
