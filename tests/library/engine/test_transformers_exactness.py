"""The transformers runner gives the tokens of model.generate, however its steps are cut, packed and scattered."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kaveri.domain.sampling import Logprobs, ResolvedParams
from kaveri.engine.stepwise.runner import LayerListener, ScoredSlice, SequenceSlice
from kaveri.engine.transformers.attention import PagedMemory
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.errors import LayoutMismatch
from kaveri.kv.tiers.pool import KvPool
from kaveri.models import resolve_model
from tests.support.devices import DEVICES
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import ARCHITECTURES, make_tiny_model

BLOCK_TOKENS = 16
BLOCK_COUNT = 160
CHUNK_TOKENS = 32
VOCAB_SIZE = 320
GREEDY = ResolvedParams(temperature=0.0)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: make_tiny_model(root / name, name, vocab_size=VOCAB_SIZE) for name in ARCHITECTURES}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@dataclass
class RunSequence:
    prompt: list[int]
    params: ResolvedParams = GREEDY
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    def take(self, count: int) -> SequenceSlice:
        """Return the next `count` positions; draws if they end the known tokens."""
        end = min(self.computed + count, len(self.tokens))
        return SequenceSlice(
            token_ids=self.tokens[self.computed : end],
            start=self.computed,
            block_ids=self.blocks,
            draw=end == len(self.tokens),
            draw_index=len(self.answer),
            params=self.params,
            scored_ids=() if self.params.prompt_logprobs is None else self.prompt[self.computed + 1 : end + 1],
        )


class BatchDriver:
    """Runs sequences in blocks scattered over a pool of NaNs, mixing prefill chunks and decodes in each step."""

    def __init__(self, runner: TransformersRunner, seed: int, separate_memory: bool = False) -> None:
        self.runner = runner
        self.pool = KvPool(runner.layout, BLOCK_COUNT)
        # All bits set is a NaN in each dtype: an earlier owner's data must not show.
        self.pool.memory.fill(0xFF)
        runner.attach(self.pool)
        if separate_memory:
            runner._memory = PagedMemory(self.pool, torch.device(runner.device), separate=True)
        self._free = list(range(BLOCK_COUNT))
        random.Random(seed).shuffle(self._free)

    def hold(self, sequence: RunSequence, answer_tokens: int) -> None:
        count = self.runner.layout.block_count(len(sequence.prompt) + answer_tokens)
        sequence.blocks = [self._free.pop() for _ in range(count)]

    def finish(
        self, sequences: Sequence[RunSequence], answer_tokens: int, on_layer: LayerListener | None = None
    ) -> None:
        """Step until all have `answer_tokens`: each step decodes all that can and fills up with prompt chunks."""
        for one in sequences:
            if not one.blocks:
                self.hold(one, answer_tokens)
        while True:
            running = [one for one in sequences if len(one.answer) < answer_tokens]
            if not running:
                return
            pieces: list[tuple[RunSequence, SequenceSlice]] = []
            budget = CHUNK_TOKENS
            for one in running:
                left = len(one.tokens) - one.computed
                count = 1 if left == 1 else min(left, budget)
                if count:
                    pieces.append((one, one.take(count)))
                    budget -= count if left > 1 else 0
            self.step(pieces, on_layer)

    def step(
        self, pieces: Sequence[tuple[RunSequence, SequenceSlice]], on_layer: LayerListener | None
    ) -> list[Logprobs]:
        drawn = self.runner.run([piece for _, piece in pieces], on_layer)
        entries: list[Logprobs] = []
        for (one, piece), token in zip(pieces, drawn, strict=True):
            one.computed += len(piece.token_ids)
            if isinstance(token, ScoredSlice):
                entries += token.entries
                token = token.drawn
            assert (token is not None) == piece.draw
            if token is not None:
                one.answer.append(token.token_id)
        return entries


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def new_runner(folder: Path, device: str, dtype: str = "float32") -> TransformersRunner:
    return load_runner(str(folder), dtype, device, None, BLOCK_TOKENS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_generate_however_steps_are_cut_and_packed(
    device: str, architecture: str, model_folders: dict[str, Path]
) -> None:
    folder = model_folders[architecture]
    driver = BatchDriver(new_runner(folder, device), seed=3)
    reference = PlainTransformers(folder, device=device)
    answer_tokens = 24
    sequences = [RunSequence(prompt) for prompt in prompts(5, [1, 2, 15, 16, 17, 33, 96, 131, 200])]
    driver.finish(sequences, answer_tokens)
    for one in sequences:
        expected = reference.answer(one.prompt, answer_tokens)
        assert one.answer == expected, f"{architecture}, prompt of {len(one.prompt)} tokens"
    # The comparison would prove little if the models repeated themselves.
    assert max(len(set(one.answer)) for one in sequences) > 8


def test_capped_scores_and_alternating_windows_equal_generate(device: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "gemma2", vocab_size=VOCAB_SIZE)
    driver = BatchDriver(new_runner(folder, device), seed=5)
    # Only its eager attention caps the scores.
    reference = PlainTransformers(folder, device=device, attn_implementation="eager")
    sequences = [RunSequence(prompt) for prompt in prompts(14, [1, 20, 33, 100])]
    driver.finish(sequences, 16)
    for one in sequences:
        assert one.answer == reference.answer(one.prompt, 16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompt_logprobs_equal_a_plain_forward_pass_however_prompts_are_cut(
    device: str, architecture: str, model_folders: dict[str, Path]
) -> None:
    folder = model_folders[architecture]
    driver = BatchDriver(new_runner(folder, device), seed=3)
    reference = PlainTransformers(folder, device=device)
    asking = ResolvedParams(temperature=0.0, prompt_logprobs=3)
    for prompt in prompts(15, [1, 2, 17, 70]):
        scored, plain = RunSequence(prompt, asking), RunSequence(prompts(16, [40])[0])
        driver.hold(scored, 1)
        driver.hold(plain, 1)
        expected = reference.logprobs(prompt)[:-1]
        entries: list[Logprobs] = []
        while not scored.answer:
            left = len(plain.tokens) - plain.computed
            pieces = [(scored, scored.take(33)), *([(plain, plain.take(9))] if left else [])]
            entries += driver.step(pieces, None)
        assert scored.answer == reference.answer(prompt, 1)
        found = torch.tensor([entry.logprob for entry in entries])
        wanted = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
        likeliest = torch.tensor([[value for _, value in entry.top] for entry in entries]).reshape(-1, 3)
        torch.testing.assert_close(likeliest, expected.topk(3, -1).values, atol=2e-5, rtol=0)
        for entry, row in zip(entries, expected, strict=True):
            for token_id, value in entry.top:
                assert value == pytest.approx(float(row[token_id]), abs=2e-5)


def test_bundled_model_gives_the_tokens_of_generate_in_float32(device: str) -> None:
    sequences = [RunSequence(prompt) for prompt in prompts(6, [3, 40, 77])]
    driver = BatchDriver(load_runner("kaveri-tiny", "float32", device, None, BLOCK_TOKENS), seed=8)
    reference = PlainTransformers(resolve_model("kaveri-tiny"), device=device)
    driver.finish(sequences, 12)
    for one in sequences:
        expected = reference.answer(one.prompt, 12)
        assert one.answer[: len(expected)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_its_logits_stay_near_float32(
    device: str, dtype: str, model_folders: dict[str, Path]
) -> None:
    asking = ResolvedParams(temperature=0.0, logprobs=1)
    exact, rounded = (
        BatchDriver(new_runner(model_folders["llama"], device, name), seed=1) for name in ("float32", dtype)
    )
    for prompt in prompts(9, [5, 70]):
        values = []
        for driver in (exact, rounded):
            one = RunSequence(prompt, asking)
            driver.hold(one, 1)
            (token,) = driver.runner.run([one.take(len(prompt))], None)
            assert token is not None
            assert token.logprobs is not None
            values.append(token.logprobs.top[0][1])
        assert values[0] == pytest.approx(values[1], abs=0.25)


@pytest.mark.parametrize("separate_memory", [False, True], ids=["in the pool", "in a copy as on a GPU"])
def test_kv_copied_into_other_blocks_of_another_runner_goes_on_with_the_same_tokens(
    device: str, model_folders: dict[str, Path], separate_memory: bool
) -> None:
    source, target = (
        BatchDriver(new_runner(model_folders["mistral"], device), seed, separate_memory) for seed in (20, 21)
    )
    (prompt,) = prompts(12, [90])
    here = RunSequence(prompt)
    source.finish([here], 20, on_layer=lambda _: None)

    there = RunSequence(prompt, answer=here.answer[:1], computed=len(prompt))
    target.hold(there, 20)
    moved = source.runner.layout.block_count(len(prompt))
    target.pool.memory[:, there.blocks[:moved]] = source.pool.memory[:, here.blocks[:moved]]
    target.runner.landed(there.blocks[:moved])
    target.finish([there], 20)
    assert there.answer == here.answer


def test_listener_hears_of_each_layer_in_order_once_its_kv_is_in_the_pool(
    device: str, model_folders: dict[str, Path]
) -> None:
    driver = BatchDriver(new_runner(model_folders["gpt2"], device), seed=2)
    first, second = (RunSequence(prompt) for prompt in prompts(13, [40, 1]))
    driver.hold(first, 1)
    driver.hold(second, 1)
    seen: list[tuple[int, Any]] = []

    def listen(layer: int) -> None:
        seen.append((layer, driver.pool.memory[layer].copy()))

    driver.runner.run([first.take(40), second.take(1)], listen)
    layers = list(range(driver.runner.layout.layer_count))
    assert [layer for layer, _ in seen] == layers
    for layer, then in seen:
        assert np.array_equal(then, driver.pool.memory[layer])
        # Exactly the blocks of these two were written, every byte of them.
        blocks = first.blocks[:3] + second.blocks[:1]
        assert not (then[blocks] == 0xFF).all(axis=1).any()
        assert (np.delete(then, blocks, axis=0) == 0xFF).all()


def test_runner_refuses_a_pool_of_another_layout(device: str, model_folders: dict[str, Path]) -> None:
    runner, other = new_runner(model_folders["llama"], device), new_runner(model_folders["opt"], device)
    with pytest.raises(LayoutMismatch):
        runner.attach(KvPool(other.layout, 4))
