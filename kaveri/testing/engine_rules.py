"""Conformance tests of penalties, biases and tokens ruled out, for every engine. Subclass RulesConformance together
with EngineConformance. The parameters change the answer, and it is the same wherever and however often it goes on. Not
verified: the arithmetic, which the engines share (kaveri.engine.token_rules)."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kaveri.engine.contract import EngineKey, EngineRequest, RequestFailed
from kaveri.testing.engine_conformance import EngineHarness, Pair, make_request, running_pair
from kaveri.testing.engine_recorder import wait_until_free
from kaveri.testing.engine_resumption import drawn_so_far, resume

_TOKENS = 40
_FEW = 12
_RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "all penalties, sampled": {
        "temperature": 1.0,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.4,
    },
}


def _asked_again(request: EngineRequest, name: str, **params: object) -> EngineRequest:
    changed = replace(request.params, **params)  # type: ignore[arg-type]
    return replace(request, key=EngineKey(name, 1), params=changed)


def _answer(pair: Pair, request: EngineRequest) -> list[int]:
    pair.hand_over(request)
    return pair.answer(request)


class RulesConformance:
    @pytest.mark.parametrize("rules", _RULES)
    def test_penalties_count_all_tokens_wherever_the_answer_goes_on(self, harness: EngineHarness, rules: str) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 37, _TOKENS)
            # Of few tokens, so that they repeat.
            few = _asked_again(free, "few", allowed_token_ids=tuple(range(_FEW)))
            asked = _asked_again(few, "asked", **_RULES[rules])
            answer = _answer(pair, asked)
            assert answer != _answer(pair, few)
            for drawn in (1, 9, _TOKENS - 2):
                placed = drawn_so_far(asked, answer, drawn, f"placed behind {drawn}")
                assert _answer(pair, placed) == answer[drawn:]
                resumed = drawn_so_far(asked, answer, drawn, f"resumed behind {drawn}")
                resume(pair, resumed, pair.decode.info.layout.block_tokens)
                pair.decoded.wait_for_finish(resumed.key)
                assert pair.decoded.token_ids[resumed.key] == answer[drawn:]
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("sampling", ["greedy", "sampled"])
    def test_tokens_are_ruled_out_and_forced(self, harness: EngineHarness, sampling: str) -> None:
        sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if sampling == "sampled" else {}
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS, **sampled)
            whole = _answer(pair, free)
            repeated = max(whole, key=whole.count)
            barred = _answer(pair, _asked_again(free, "barred", bad_token_ids=((repeated,),)))
            assert repeated not in barred
            pairs = list(pairwise(whole))
            bigrams = _answer(pair, _asked_again(free, "bigrams", bad_token_ids=tuple(pairs[5:6])))
            assert bigrams[:6] == whole[:6]
            assert pairs[5] not in pairwise(bigrams)
            few = tuple(sorted({*whole[:3], repeated}))
            assert set(_answer(pair, _asked_again(free, "few", allowed_token_ids=few))) <= set(few)
            forced = _answer(pair, _asked_again(free, "forced", logit_bias=((repeated, 100.0),)))
            assert set(forced) == {repeated}
            wait_until_free(pair.prefill, pair.decode)

    def test_request_whose_rules_leave_no_token_fails_alone(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS)
            token_id = harness.answer(free.token_ids, 1)[0]
            asked = _asked_again(free, "none", allowed_token_ids=(token_id,), bad_token_ids=((token_id, token_id),))
            pair.hand_over(asked)
            failure = pair.decoded.wait_for(RequestFailed, asked.key)
            assert failure.is_final
            assert "rule out every token" in failure.reason
            assert _answer(pair, free) == harness.answer(free.token_ids, _TOKENS)
            wait_until_free(pair.prefill, pair.decode)
