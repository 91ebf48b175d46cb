"""The sampler: the effect of each parameter, and that a draw depends only on its own row."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.runner import NOT_FINITE, DrawnToken, NoToken, SequenceSlice
from kaveri.engine.transformers import sampler
from kaveri.engine.transformers.sampler import draw_tokens, stream_state, waiting_times

VOCAB_SIZE = 50


def row(draw_index: int = 0, **params: object) -> SequenceSlice:
    return SequenceSlice([1], 0, [0], True, draw_index, ResolvedParams(**params))  # type: ignore[arg-type]


def random_logits(seed: int, count: int) -> Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def ids(logits: Tensor, slices: list[SequenceSlice]) -> list[int]:
    return [token.token_id for token in draw_tokens(logits, slices) if isinstance(token, DrawnToken)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3, "logprobs": 2}, {"top_p": 0.5}])
def test_no_token_is_drawn_from_logits_that_are_not_finite(params: dict[str, object], dtype: torch.dtype) -> None:
    whole = random_logits(4, 6).to(dtype)
    broken = whole.clone()
    broken[1, 7] = torch.nan
    broken[2, 7] = torch.inf
    broken[3] = -torch.inf
    broken[4, 1:] = -torch.inf
    slices = [row(index, seed=index, **params) for index in range(6)]
    drawn = draw_tokens(broken, slices)
    assert drawn[1:4] == [NoToken(NOT_FINITE)] * 3
    assert isinstance(drawn[4], DrawnToken)
    assert drawn[4].token_id == 0
    alone = draw_tokens(whole, slices)
    assert (drawn[0], drawn[5]) == (alone[0], alone[5])


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-30}, {"top_k": 1, "temperature": 5.0}],
)
def test_parameters_that_leave_one_token_are_greedy(params: dict[str, object]) -> None:
    logits = random_logits(1, 40)
    slices = [row(index, seed=index, **params) for index in range(40)]
    assert ids(logits, slices) == logits.argmax(-1).tolist()


def test_same_seed_and_index_draw_the_same_token_and_others_draw_others() -> None:
    logits = random_logits(2, 1).expand(64, -1)
    again = [ids(logits, [row(index, seed=9) for index in range(64)]) for _ in range(2)]
    assert again[0] == again[1]
    assert len(set(again[0])) > 5
    assert ids(logits, [row(index, seed=10) for index in range(64)]) != again[0]


def test_a_row_draws_the_same_alone_and_beside_any_neighbours() -> None:
    source = random.Random(5)
    logits = random_logits(3, 60)
    slices = [
        row(
            source.randrange(1000),
            seed=source.randrange(2**64),
            temperature=source.choice([0.0, 0.3, 1.0, 2.5]),
            top_k=source.choice([0, 0, 3, 20, 1000]),
            top_p=source.choice([1.0, 1.0, 0.2, 0.9]),
            logprobs=source.choice([None, 0, 3]),
        )
        for _ in range(60)
    ]
    together = draw_tokens(logits, slices)
    for index, piece in enumerate(slices):
        (alone,) = draw_tokens(logits[index : index + 1], [piece])
        assert alone.token_id == together[index].token_id, piece
        assert (alone.logprobs is None) == (piece.params.logprobs is None)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        # top_p reads the weights that top_k left: 0.4 and 0.3 become 0.57 and 0.43.
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"temperature": 0.5}, {0, 1, 2, 3, 4}),
    ],
)
def test_draws_follow_the_filtered_distribution(params: dict[str, object], allowed: set[int]) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    count = 20_000
    drawn = Counter(
        ids(probabilities.log().expand(count, -1), [row(index, seed=7, **params) for index in range(count)])
    )
    weights = probabilities ** (1 / float(params.get("temperature", 1.0)))  # type: ignore[arg-type]
    total = sum(float(weights[token]) for token in allowed)
    assert set(drawn) == allowed
    for token in allowed:
        # Five standard deviations of a binomial at most, for a fixed seed.
        assert drawn[token] / count == pytest.approx(float(weights[token]) / total, abs=0.0177)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.95}])
def test_rounding_of_the_logits_hardly_ever_changes_a_draw(params: dict[str, object]) -> None:
    # About ten times the noise of another batch shape on a trained model's float32 logits.
    noise = torch.Generator().manual_seed(12)
    changed = 0
    for part in range(8):
        logits = torch.randn(500, 2000, generator=noise) * 2
        rounded = logits + torch.randn(500, 2000, generator=noise) * 1e-4
        slices = [row(part * 500 + index, seed=11, **params) for index in range(500)]
        changed += sum(a != b for a, b in zip(ids(logits, slices), ids(rounded, slices), strict=True))
    # Out of 4,000; inverse transform sampling changes dozens.
    assert changed <= 2


def test_waiting_times_are_exponential_over_tokens_indices_and_seeds() -> None:
    cpu = torch.device("cpu")
    over_tokens = waiting_times([stream_state(3, 0)], 20_000, cpu)[0]
    over_indices = waiting_times([stream_state(3, index) for index in range(20_000)], 1, cpu)[:, 0]
    over_seeds = waiting_times([stream_state(seed, 0) for seed in range(20_000)], 2, cpu)[:, 1]
    for times in (over_tokens, over_indices, over_seeds):
        assert (times > 0).all()
        tenths = Counter(((-times).exp() * 10).long().tolist())
        assert all(abs(tenths[tenth] - 2000) < 220 for tenth in range(10))
        uneven = times - times.mean()
        assert abs((uneven[1:] * uneven[:-1]).mean()) < 0.04


def test_waiting_times_never_change() -> None:
    # A request that another release of Kaveri resumes must continue with the same tokens.
    states = [stream_state(0, 0), stream_state(0, 1), stream_state(2**64 - 1, 5)]
    assert states == [12035550249420947055, 12935080325729570654, 2841415184624655396]
    times = waiting_times(states, 3, torch.device("cpu"))
    # Bit for bit as in a plain implementation of SplitMix64.
    for state, row_times in zip(states, times.tolist(), strict=True):
        for token_id, time in enumerate(row_times):
            value = (state + (token_id + 1) * 0x9E3779B97F4A7C15) % 2**64
            value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
            value ^= value >> 31
            assert time == pytest.approx(-math.log(((value >> 12) + 0.5) / 2**52), rel=1e-12)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, 3).to(torch.bfloat16)
    slices = [row(seed=1, temperature=0.5, top_k=3, logprobs=4), row(), row(temperature=0.0, logprobs=0)]
    drawn = draw_tokens(logits, slices)
    expected = torch.log_softmax(logits.float(), -1)
    assert drawn[1].logprobs is None
    for index in (0, 2):
        logprobs = drawn[index].logprobs
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(expected[index, drawn[index].token_id].item())
    assert drawn[0].logprobs is not None
    assert drawn[2].logprobs is not None
    assert drawn[2].logprobs.top == ()
    values, tokens = expected[0].topk(4)
    assert [token for token, _ in drawn[0].logprobs.top] == tokens.tolist()
    assert [value for _, value in drawn[0].logprobs.top] == pytest.approx(values.tolist())


def test_tokens_of_no_probability_are_never_drawn() -> None:
    logits = torch.full((200, VOCAB_SIZE), -torch.inf)
    logits[:, 17] = 0.0
    logits[:, 31] = 0.0
    for params in ({}, {"top_p": 0.99}, {"top_k": 40}):
        assert set(ids(logits, [row(index, seed=2, **params) for index in range(200)])) == {17, 31}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_tokens_that_would_end_an_answer_too_early_are_not_drawn_and_are_reported(params: dict[str, object]) -> None:
    logits = random_logits(5, 40)
    likeliest = logits.argmax(-1).tolist()
    eos_token_ids = frozenset(range(10))
    barred = eos_token_ids | {20, 21}
    asked = {"min_tokens": 20, "stop_token_ids": (20, 21), "logprobs": 1, "seed": 3, **params}
    slices = [row(index, **asked) for index in range(40)]
    drawn = draw_tokens(logits, slices, eos_token_ids)
    unbarred = draw_tokens(logits, [row(index, **{**asked, "min_tokens": 0}) for index in range(40)], eos_token_ids)
    assert drawn[20:] == unbarred[20:]
    for index in range(20):
        token, logprobs = drawn[index].token_id, drawn[index].logprobs  # type: ignore[union-attr]
        assert token not in barred
        assert logprobs is not None
        assert logprobs.top[0][0] == likeliest[index]
        assert logprobs.logprob == pytest.approx(torch.log_softmax(logits[index], -1)[token].item(), abs=1e-5)
    assert any(token.token_id in barred for token in unbarred if isinstance(token, DrawnToken))
    ignoring = [row(index, **{**asked, "stop_token_ids": (), "ignore_eos": True}) for index in range(40)]
    assert draw_tokens(logits, ignoring, eos_token_ids) == unbarred


def _raising(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> None:
    """Make every draw of a request with one of these seeds raise."""
    stream_state = sampler.stream_state

    def raises(seed: int, index: int) -> int:
        if seed in seeds:
            raise IndexError("index 99 is out of bounds")
        return stream_state(seed, index)

    monkeypatch.setattr(sampler, "stream_state", raises)


def test_a_draw_that_raises_ends_its_row_and_the_others_draw_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(9, 5)
    slices = [row(index, seed=index, logprobs=2) for index in range(5)]
    whole = draw_tokens(logits, slices)
    _raising(monkeypatch, 3)
    drawn = draw_tokens(logits, slices)
    assert [*drawn[:3], drawn[4]] == [*whole[:3], whole[4]]
    assert drawn[3] == NoToken("its draw raised IndexError('index 99 is out of bounds')", is_final=True)
    assert draw_tokens(logits[3:4], slices[3:4]) == [drawn[3]]


def test_an_exception_that_every_row_meets_is_no_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, 0, 1, 2)
    with pytest.raises(IndexError, match="index 99"):
        draw_tokens(random_logits(9, 3), [row(index, seed=index) for index in range(3)])
