"""The fake runner draws its model's tokens, and detects KV that differs from what was written."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner, StaleKv
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool

_PARAMS = ResolvedParams(max_tokens=100, seed=1)
_BLOCKS = 40


def _attached(model: FakeModel) -> tuple[FakeRunner, KvPool]:
    runner, pool = FakeRunner(model), KvPool(model.layout, _BLOCKS)
    runner.attach(pool)
    return runner, pool


def _compute(
    runner: FakeRunner, token_ids: Sequence[int], start: int, blocks: Sequence[int], draw_index: int = 0
) -> int:
    drawn = runner.run([SequenceSlice(token_ids, start, blocks, True, draw_index, _PARAMS)], None)[0]
    assert drawn is not None
    return drawn.token_id


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("eos_probability", [0.0, 0.2])
@pytest.mark.parametrize("vocab_size", [300, 150_000])
def test_tokens_do_not_depend_on_chunks_blocks_or_company(
    verify: bool, eos_probability: float, vocab_size: int
) -> None:
    model = FakeModel(vocab_size=vocab_size, eos_token_id=7, eos_probability=eos_probability, verify=verify)
    runner, _ = _attached(model)
    rng = random.Random(5)
    shuffled = rng.sample(range(_BLOCKS), _BLOCKS)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 37, 80)]
    tables = [shuffled[:8], shuffled[8:16], shuffled[16:24]]
    sequences = [list(prompt) for prompt in prompts]
    for start in range(0, 80, 11):
        batch = [
            SequenceSlice(prompt[start : start + 11], start, table, start + 11 >= len(prompt), 0, _PARAMS)
            for prompt, table in zip(prompts, tables, strict=True)
            if start < len(prompt)
        ]
        for part, drawn in zip(batch, runner.run(batch, None), strict=True):
            if drawn is not None:
                sequences[tables.index(list(part.block_ids))].append(drawn.token_id)
    for index in range(1, 30):
        batch = [
            SequenceSlice(sequence[-1:], len(sequence) - 1, table, True, index, _PARAMS)
            for sequence, table in zip(sequences, tables, strict=True)
        ]
        for sequence, drawn in zip(sequences, runner.run(batch, None), strict=True):
            assert drawn is not None
            sequence.append(drawn.token_id)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence[len(prompt) :] == model.answer(prompt, 0, 30)
        assert sequence[len(prompt)] == model.answer(prompt, 0, 1)[0]


def test_a_larger_vocabulary_changes_no_answer_and_a_small_one_has_all_of_it() -> None:
    large, small = FakeModel(vocab_size=150_000), FakeModel(vocab_size=20)
    assert large.answer([1, 2], 0, 500) == FakeModel().answer([1, 2], 0, 500)
    assert set(small.answer([1, 2], 0, 500)) == set(range(1, 20))
    # Instances of different vocabularies would refuse one another's prompts.
    assert large.layout.model_fingerprint != FakeModel().layout.model_fingerprint


def test_end_of_sequence_comes_as_often_as_asked_for() -> None:
    model = FakeModel(eos_token_id=3)
    assert 3 not in model.answer([1, 2], 0, 2000)
    often = FakeModel(eos_token_id=3, eos_probability=0.25)
    assert 400 < often.answer([1, 2], 0, 2000).count(3) < 600


def test_logprobs_are_given_to_those_who_ask() -> None:
    runner, _ = _attached(FakeModel())
    asked = ResolvedParams(max_tokens=5, logprobs=2)
    drawn = runner.run([SequenceSlice([4], 0, [0], True, 0, asked), SequenceSlice([4], 0, [1], True, 0, _PARAMS)], None)
    assert drawn[0] is not None
    assert drawn[1] is not None
    assert drawn[0].logprobs is not None
    assert len(drawn[0].logprobs.top) == 2
    assert drawn[0].logprobs.top[0] == (drawn[0].token_id, drawn[0].logprobs.logprob)
    assert drawn[1].logprobs is None


_ALL = slice(None)
_BLOCK_BYTES = FakeModel().layout.block_bytes


@pytest.mark.parametrize(
    ("target", "source"),
    [
        pytest.param((1, 3, 70), (1, 3, 71), id="a wrong byte"),
        pytest.param((_ALL, [2, 3]), (_ALL, [3, 2]), id="blocks swapped"),
        pytest.param(([0, 1], 3), ([1, 0], 3), id="layers swapped"),
        pytest.param((0, 3), (0, 3, np.roll(np.arange(_BLOCK_BYTES), _BLOCK_BYTES // 2)), id="K and V swapped"),
        pytest.param((_ALL, slice(2, 5)), (_ALL, slice(12, 15)), id="another request's"),
        pytest.param((_ALL, 4), (_ALL, 30), id="a block lost"),
    ],
)
def test_spoilt_kv_is_noticed_by_the_next_step(target: Any, source: Any) -> None:
    model = FakeModel()
    runner, pool = _attached(model)
    prompt, other = list(range(100, 148)), list(range(200, 248))
    token_id = _compute(runner, prompt, 0, [2, 3, 4])
    _compute(runner, other, 0, [12, 13, 14])
    intact = pool.memory.copy()
    pool.memory[target] = pool.memory[source]
    assert not np.array_equal(pool.memory, intact)
    with pytest.raises(StaleKv):
        _compute(runner, [token_id], 48, [2, 3, 4, 5], 1)
    np.copyto(pool.memory, intact)
    assert _compute(runner, [token_id], 48, [2, 3, 4, 5], 1) == model.answer(prompt, 0, 2)[1]


def test_layers_are_told_in_order_with_their_kv_in_the_pool() -> None:
    model = FakeModel(layer_count=3)
    runner, pool = _attached(model)
    told: list[tuple[int, list[bool]]] = []
    runner.run(
        [SequenceSlice([1, 2, 3], 0, [6], True, 0, _PARAMS)],
        lambda layer: told.append((layer, pool.memory[:, 6].any(axis=1).tolist())),
    )
    assert told == [(0, [True, False, False]), (1, [True, True, False]), (2, [True, True, True])]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        FakeModel(kv_head_count=1, head_dim=3)
    with pytest.raises(ConfigError, match="vocab_size"):
        FakeModel(vocab_size=1)
    with pytest.raises(ConfigError, match="vocab_size"):
        FakeModel(vocab_size=1536, eos_token_id=1500)
