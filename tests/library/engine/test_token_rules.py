"""Penalties, biases and tokens ruled out, beside transformers' own processors, on random inputs."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from kaveri.domain.sampling import ALL_RULED_OUT, ResolvedParams
from kaveri.engine.stepwise.runner import NOT_FINITE, DrawnToken, NoToken, SequenceSlice
from kaveri.engine.token_rules import LogitChanges, TokenRules
from kaveri.engine.transformers import sampler
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.errors import EngineError

VOCAB_SIZE = 40
EOS = frozenset({0})
# Few, so that tokens repeat.
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
penalties = st.floats(-2, 2, width=32)


def random_logits(seed: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def ruled(params: ResolvedParams, prompt: list[int], answer: list[int]) -> SequenceSlice:
    rules = TokenRules(params, prompt + answer, len(prompt), VOCAB_SIZE, EOS, None)
    return SequenceSlice((), 0, (), True, len(answer), params, rules)


def changed(logits: Tensor, piece: SequenceSlice) -> Tensor:
    return sampler._with_rules(logits, [piece])[0]


@given(seed=st.integers(0, 99), prompt=token_ids.filter(bool), answer=token_ids, penalty=st.floats(0.5, 2.0, width=32))
def test_repetition_penalty_is_that_of_transformers(
    seed: int, prompt: list[int], answer: list[int], penalty: float
) -> None:
    logits = random_logits(seed)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), logits.clone())
    piece = ruled(ResolvedParams(repetition_penalty=penalty, logit_bias=((0, 0.0),)), prompt, answer)
    assert torch.equal(changed(logits, piece), theirs)


@given(
    seed=st.integers(0, 99),
    min_p=st.floats(0, 1, width=32),
    top_p=st.floats(0.0625, 1, width=32),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_min_p_leaves_the_tokens_that_transformers_leaves(
    seed: int, min_p: float, top_p: float, temperature: float
) -> None:
    logits = random_logits(seed)
    warpers = LogitsProcessorList([TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)])
    left = set(warpers(torch.empty(1, 0), logits.double() / temperature)[0].isfinite().nonzero().flatten().tolist())
    drawn = set[int]()
    for index in range(200):
        params = ResolvedParams(temperature=temperature, top_p=top_p, min_p=min_p, seed=seed)
        (token,) = draw_tokens(logits, [SequenceSlice((), 0, (), True, index, params)])
        assert isinstance(token, DrawnToken)
        drawn.add(token.token_id)
    assert drawn <= left
    weights = torch.softmax(logits.double() / temperature, -1)[0]
    assert all(token_id in drawn for token_id in left if weights[token_id] > 0.2)


@given(
    seed=st.integers(0, 99),
    prompt=token_ids,
    answer=token_ids,
    repetition=st.floats(0.5, 2.0, width=32),
    presence=penalties,
    frequency=penalties,
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, 100.0, 0.5, -0.25])),
)
def test_state_that_follows_the_answer_is_the_state_made_anew(
    seed: int,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    params = ResolvedParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
        bad_token_ids=((1,), (2, 3), (4, 5, 6)),
        allowed_token_ids=tuple(range(VOCAB_SIZE - 3)),
    )
    history = prompt + answer
    following = TokenRules(params, history, len(prompt), VOCAB_SIZE, EOS, None)
    # The second half again: a preempted request goes back.
    for index in (*range(len(answer) + 1), *range(len(answer) // 2, len(answer) + 1)):
        logits = random_logits(seed + index)[0].numpy()
        anew = logits.copy()
        following.changes(index).apply(logits)
        TokenRules(params, history, len(prompt), VOCAB_SIZE, EOS, None).changes(index).apply(anew)
        np.testing.assert_array_equal(logits, anew)
    # The sampler does to several rows at once what apply() does to one.
    piece = SequenceSlice((), 0, (), True, len(answer), params, following)
    rows = random_logits(seed, 3)
    together, _ = sampler._with_rules(rows, [piece, SequenceSlice((), 0, (), True, 0, ResolvedParams()), piece])
    alone = rows[0].numpy().copy()
    following.changes(len(answer)).apply(alone)
    np.testing.assert_array_equal(together[0].numpy(), alone)
    assert torch.equal(together[1], rows[1])


def test_bad_words_are_ruled_out_after_their_beginning_alone() -> None:
    params = ResolvedParams(bad_token_ids=((7,), (1, 2), (1, 2, 3)))
    for answer, barred in (([], {7}), ([1], {7, 2}), ([1, 2], {7, 3}), ([2], {7}), ([5, 1, 2], {7, 3})):
        # The prompt's last tokens begin no word.
        logits = changed(random_logits(0), ruled(params, [1], answer))
        assert set(logits[0].isinf().nonzero().flatten().tolist()) == barred


def test_biases_and_penalties_come_in_the_order_of_vllm() -> None:
    params = ResolvedParams(
        logit_bias=((3, 2.0),), repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    logits = changed(torch.full((1, VOCAB_SIZE), -1.0), ruled(params, [9], [3, 3]))
    assert logits[0, 3] == (-1.0 + 2.0) / 2.0 - 0.5 * 2 - 0.25
    assert logits[0, 9] == -2.0
    assert logits[0, 4] == -1.0


def test_rules_change_neither_the_logprobs_nor_other_rows_nor_the_callers_logits() -> None:
    logits = random_logits(5, 2).to(torch.bfloat16)
    before = logits.clone()
    params = ResolvedParams(temperature=0.0, logit_bias=((3, 100.0),), logprobs=2)
    plain = ResolvedParams(temperature=0.0, logprobs=2)
    first, second = draw_tokens(logits, [ruled(params, [1], []), SequenceSlice((), 0, (), True, 0, plain)])
    assert torch.equal(logits, before)
    assert isinstance(first, DrawnToken)
    assert first.token_id == 3
    assert first.logprobs is not None
    raw = torch.log_softmax(logits[0].float(), -1)
    assert first.logprobs.logprob == raw[3].item()
    assert first.logprobs.top[0][0] == raw.argmax().item()
    assert [second] == draw_tokens(logits[1:], [SequenceSlice((), 0, (), True, 0, plain)])


def test_row_whose_rules_leave_no_token_is_told_from_logits_that_are_not_finite() -> None:
    params = ResolvedParams(allowed_token_ids=(3,), bad_token_ids=((3,),))
    logits = random_logits(5, 2)
    logits[1] = torch.nan
    drawn = draw_tokens(logits, [ruled(params, [1], []), ruled(params, [1], [])])
    assert drawn == [NoToken(ALL_RULED_OUT, is_final=True, by_rules=True), NoToken(NOT_FINITE)]


def test_row_whose_rules_fail_ends_alone() -> None:
    class FailingRules(TokenRules):
        def changes(self, index: int) -> LogitChanges:
            raise EngineError("its grammar: too complex")

    params = ResolvedParams(logit_bias=((3, 1.0),))
    failing = SequenceSlice((), 0, (), True, 0, params, FailingRules(params, [], 0, VOCAB_SIZE, EOS, None))
    logits = random_logits(5, 2)
    # Also where all rows of a batch fail: that is the fault of each.
    assert (
        draw_tokens(logits, [failing, failing])
        == [NoToken("its grammar: too complex", is_final=True, by_rules=True)] * 2
    )
    first, second = draw_tokens(logits, [failing, SequenceSlice((), 0, (), True, 0, ResolvedParams())])
    assert isinstance(first, NoToken)
    assert isinstance(second, DrawnToken)
