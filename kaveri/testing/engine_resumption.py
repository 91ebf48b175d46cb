"""Conformance tests for engines that resume requests. Subclass ResumptionConformance together with EngineConformance. A
request is resumed from the KV of its first tokens, which the pair's prefill engine computes and pushes in place of a
replica. Each answer is compared with that of an uninterrupted run."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kaveri.domain.sampling import FinishReason, Logprobs
from kaveri.engine.contract import EngineKey, EngineRequest, FirstToken, Landed, Preempted, StepTokens
from kaveri.errors import InvalidArgument, RequestAlreadyExists
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.engine_conformance import (
    MAX_MODEL_LEN,
    EngineHarness,
    Pair,
    longest_blocks,
    make_request,
    running_pair,
    when_there_is_room,
)
from kaveri.testing.engine_recorder import SOON_S, wait_until_free

_DRAWN = 17
"""Tokens sampled before the request is resumed, in most tests."""
_LOGPROB_TOLERANCE = 1e-3
"""Allowed difference of log-probabilities: KV computed in other chunks differs by rounding."""


def reserve_resumed(pair: Pair, request: EngineRequest, held_tokens: int, expires_in_s: float = 60.0) -> Ticket:
    """Reserve blocks for the KV of the first `held_tokens` tokens of a resumed request, waiting for room."""
    layout = pair.prefill.info.layout
    return when_there_is_room(
        lambda: pair.decode.reserve(request, expires_in_s, layout, held_tokens=held_tokens).result(SOON_S)
    )


def push_held(pair: Pair, request: EngineRequest, ticket: Ticket) -> None:
    """Make the prefill engine compute and push the KV of the ticket's tokens, which are the request's first ones."""
    params = replace(
        request.params, max_tokens=MAX_MODEL_LEN, ignore_eos=True, stop_token_ids=(), logprobs=None, grammar=None
    )
    held = EngineRequest(request.key, request.token_ids[: ticket.token_count], 0, params)
    when_there_is_room(lambda: pair.prefill.prefill(held))
    pair.prefill.push_to(request.key, ticket)


def resume(pair: Pair, request: EngineRequest, held_tokens: int) -> None:
    """Resume the request on the decode engine: reserve, and push the KV of its first `held_tokens` tokens."""
    push_held(pair, request, reserve_resumed(pair, request, held_tokens))


def drawn_so_far(request: EngineRequest, answer: list[int], generated_count: int, name: str) -> EngineRequest:
    """Return the request as it is after `generated_count` tokens of its answer, with `name` as its id."""
    token_ids = request.token_ids + tuple(answer[:generated_count])
    return replace(request, key=EngineKey(name, 2), token_ids=token_ids, generated_count=generated_count)


def assert_continues(pair: Pair, request: EngineRequest, answer: list[int], generated_count: int) -> None:
    """Assert that the rest of an answer is the same when the request is prefilled again after `generated_count` tokens,
    and when it is resumed there."""
    prefilled = drawn_so_far(request, answer, generated_count, f"prefilled after {generated_count}")
    assert pair.run(prefilled) == answer[generated_count:]
    resumed = drawn_so_far(request, answer, generated_count, f"resumed after {generated_count}")
    resume(pair, resumed, pair.decode.info.layout.block_tokens)
    pair.decoded.wait_for_finish(resumed.key)
    assert pair.decoded.token_ids[resumed.key] == answer[generated_count:]


def _logprobs(pair: Pair, key: EngineKey) -> list[Logprobs | None]:
    first = [event.logprobs for event in pair.prefilled.of(FirstToken, key)]
    steps = [step for event in pair.decoded.of(StepTokens) for step in event.steps if step.key == key]
    return first + [step.logprobs for step in steps]


def _is_close(ours: Logprobs | None, theirs: Logprobs | None) -> bool:
    assert ours is not None, "log-probabilities were asked for"
    assert theirs is not None, "log-probabilities were asked for"
    pairs = [(ours.logprob, theirs.logprob)]
    pairs += [(mine[1], other[1]) for mine, other in zip(ours.top, theirs.top, strict=True)]
    return all(math.isclose(mine, other, abs_tol=_LOGPROB_TOLERANCE) for mine, other in pairs)


class ResumptionConformance:
    @pytest.mark.parametrize("sampling", ["greedy", "sampled"])
    def test_resumed_request_draws_what_an_undisturbed_one_draws(self, harness: EngineHarness, sampling: str) -> None:
        sampled = {"temperature": 1.0, "top_p": 0.95} if sampling == "sampled" else {}
        params: dict[str, Any] = {"logprobs": 2, **sampled}
        with running_pair(harness) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            undisturbed = make_request(pair.prefill, "undisturbed", 37, 40, **params)
            pair.hand_over(undisturbed)
            answer = pair.answer(undisturbed)
            logprobs = _logprobs(pair, undisturbed.key)
            for generated_count in (1, _DRAWN, 27, 39):
                whole = (37 + generated_count - 1) // block_tokens * block_tokens
                # Whole blocks, and all tokens but the last, as after a release.
                for held_tokens in {block_tokens, whole, 37 + generated_count - 1, 1}:
                    name = f"{generated_count} drawn, {held_tokens} held"
                    request = drawn_so_far(undisturbed, answer, generated_count, name)
                    resume(pair, request, held_tokens)
                    landed = pair.decoded.wait_for(Landed, request.key)
                    assert landed.first_token_id is None
                    assert pair.decoded.wait_for_finish(request.key) is FinishReason.LENGTH
                    assert pair.decoded.token_ids[request.key] == answer[generated_count:], name
                    steps = [step for event in pair.decoded.of(StepTokens) for step in event.steps]
                    indices = [step.index for step in steps if step.key == request.key]
                    assert indices == list(range(generated_count, 40)), name
                    resumed = [step.logprobs for step in steps if step.key == request.key]
                    assert all(map(_is_close, resumed, logprobs[generated_count:])), name
            wait_until_free(pair.prefill, pair.decode)

    def test_stop_tokens_and_the_models_length_end_a_resumed_answer(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            request = make_request(pair.prefill, "r", 40, 40)
            answer = harness.answer(request.token_ids, 40)
            stop = answer[_DRAWN]
            stopped = replace(
                drawn_so_far(request, answer, answer.index(stop), "stop"),
                params=replace(request.params, stop_token_ids=(stop,)),
            )
            resume(pair, stopped, block_tokens)
            assert pair.decoded.wait_for_finish(stopped.key) is FinishReason.STOP
            assert pair.decoded.token_ids[stopped.key] == [stop]
            longest = make_request(pair.prefill, "longest", MAX_MODEL_LEN - 1, 100)
            resume(pair, longest, block_tokens)
            assert pair.decoded.wait_for_finish(longest.key) is FinishReason.LENGTH
            assert pair.decoded.token_ids[longest.key] == harness.answer(longest.token_ids, 1)
            wait_until_free(pair.prefill, pair.decode)

    def test_resumed_requests_and_their_neighbours_survive_preemption(self, harness: EngineHarness) -> None:
        _, blocks = longest_blocks(harness)
        with running_pair(harness, decode_blocks=blocks) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            length = max(block_tokens + 1, MAX_MODEL_LEN // 4 - block_tokens)
            requests = [make_request(pair.prefill, f"r{i}", length, MAX_MODEL_LEN // 2) for i in range(5)]
            for number, request in enumerate(requests):
                if number % 2:
                    pair.hand_over(request)
                else:
                    resume(pair, request, (length - 1) // block_tokens * block_tokens)
            for number, request in enumerate(requests):
                answer = harness.answer(request.token_ids, MAX_MODEL_LEN // 2)
                if number % 2:
                    assert pair.answer(request) == answer
                else:
                    pair.decoded.wait_for_finish(request.key)
                    assert pair.decoded.token_ids[request.key] == answer
            assert pair.decoded.of(Preempted), "the pool was meant to be too small"
            wait_until_free(pair.prefill, pair.decode)

    @pytest.mark.parametrize("moment", ["reserved", "pushing", "landed", "admitted", "drawing"])
    def test_abort_of_a_resumed_request_frees_all_blocks(self, harness: EngineHarness, moment: str) -> None:
        with running_pair(harness, admit=False) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            requests = [make_request(pair.prefill, f"r{i}", 60, 60) for i in range(3)]
            for request in requests:
                ticket = reserve_resumed(pair, request, block_tokens)
                if moment != "reserved":
                    push_held(pair, request, ticket)
                if moment in ("landed", "admitted", "drawing"):
                    pair.decoded.wait_for(Landed, request.key)
                if moment in ("admitted", "drawing"):
                    pair.decode.admit(request.key)
                if moment == "drawing":
                    pair.decoded.wait_for_tokens(request.key, 1)
                pair.decode.abort(request.key)
                pair.decode.check_integrity()
                pair.prefill.abort(request.key)
            wait_until_free(pair.prefill, pair.decode)

    def test_held_tokens_that_no_request_can_be_resumed_from_are_refused(self, harness: EngineHarness) -> None:
        with running_pair(harness) as pair:
            block_tokens = pair.decode.info.layout.block_tokens
            request = make_request(pair.prefill, "r", 2 * block_tokens, 5)
            # With all tokens held there is nothing to compute, and so no logits to sample from.
            for held_tokens in (0, -block_tokens, 2 * block_tokens, 3 * block_tokens):
                with pytest.raises(InvalidArgument) as raised:
                    pair.decode.reserve(request, 60.0, held_tokens=held_tokens).result(SOON_S)
                assert raised.value.field == "held_tokens"
            reserve_resumed(pair, request, block_tokens)
            with pytest.raises(RequestAlreadyExists):
                pair.decode.reserve(request, 60.0, held_tokens=block_tokens).result(SOON_S)
            pair.decode.abort(request.key)
            wait_until_free(pair.decode)
