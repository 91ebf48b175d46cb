"""Conformance tests of min_tokens for every engine. Subclass EndingConformance together with EngineConformance. Tokens
that would end an answer are not sampled before it has min_tokens tokens, counted over all instances. Not verified: the
log-probabilities of such tokens, and stop texts, which the router handles."""

from dataclasses import replace
from typing import Any

import pytest

from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import EngineKey
from kaveri.testing.engine_conformance import EngineHarness, make_request, request_that_draws, running_pair, with_params
from kaveri.testing.engine_recorder import wait_until_free
from kaveri.testing.engine_resumption import assert_continues, drawn_so_far

_TOKENS = 40
_MIN_TOKENS = 20


class EndingConformance:
    @pytest.mark.parametrize("sampling", ["greedy", "sampled"])
    @pytest.mark.parametrize("index", [0, 5])
    def test_stop_token_is_not_drawn_before_min_tokens(self, harness: EngineHarness, sampling: str, index: int) -> None:
        sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95} if sampling == "sampled" else {}
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 19, _TOKENS, **sampled)
            whole = pair.run(free)
            stop = whole[index]
            first = whole.index(stop)
            ended = with_params(free, "ended", stop_token_ids=(stop,), min_tokens=first)
            assert pair.run(ended) == whole[: first + 1]
            for min_tokens in (first + 1, _MIN_TOKENS, _TOKENS):
                asked = with_params(free, f"min{min_tokens}", stop_token_ids=(stop,), min_tokens=min_tokens)
                answer = pair.run(asked)
                assert answer[:first] == whole[:first]
                assert stop not in answer[:min_tokens]
                assert len(answer) >= min_tokens
                assert (answer[-1] == stop) == (pair.decoded.finished[asked.key] is FinishReason.STOP)
                assert stop not in answer[:-1]
            wait_until_free(pair.prefill, pair.decode)

    def test_end_of_sequence_is_not_drawn_before_min_tokens_unless_it_is_ignored(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            eos_token_ids = pair.decode.info.eos_token_ids
            request, whole, end = request_that_draws(harness, pair.prefill, eos_token_ids)
            ignoring = with_params(request, "ignoring", min_tokens=end + 1)
            assert pair.run(ignoring) == whole
            asked = with_params(request, "asked", min_tokens=end + 1, ignore_eos=False)
            answer = pair.run(asked)
            assert answer[:end] == whole[:end]
            assert not eos_token_ids.intersection(answer[: end + 1])
            # Prefill samples that token.
            placed = drawn_so_far(asked, whole, end, "placed")
            assert pair.run(placed) == answer[end:]
            wait_until_free(pair.prefill, pair.decode)

    def test_tokens_of_earlier_attempts_count(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            free = make_request(pair.prefill, "free", 37, _TOKENS)
            stop = harness.answer(free.token_ids, 8)[7]
            asked = with_params(free, "asked", stop_token_ids=(stop,), min_tokens=_MIN_TOKENS)
            answer = pair.run(asked)
            assert stop not in answer[:_MIN_TOKENS]
            for drawn in (1, 7, 8, _MIN_TOKENS - 1):
                assert_continues(pair, asked, answer, drawn)
            # After min_tokens the token is sampled as usual.
            token_ids = asked.token_ids + tuple(answer[:_MIN_TOKENS])
            last = replace(asked, key=EngineKey("last", 1), token_ids=token_ids, generated_count=_MIN_TOKENS)
            due = pair.run(replace(last, params=replace(last.params, stop_token_ids=(), min_tokens=0)))[0]
            ends = replace(last.params, stop_token_ids=(due,))
            assert pair.run(replace(last, key=EngineKey("ends", 1), params=ends)) == [due]
            wait_until_free(pair.prefill, pair.decode)
