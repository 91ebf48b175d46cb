"""Converts sampling parameters, finish reasons, log-probabilities and errors between Kaveri and vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams

from kaveri.domain.sampling import Logprobs
from kaveri.engine.contract import MAX_SCORED_TOKENS, EngineRequest, PromptLogprobs
from kaveri.engine.vllm.draws import Draw
from kaveri.errors import EngineError, InvalidArgument, KaveriError


def prefill_params(request: EngineRequest, eos_token_ids: frozenset[int]) -> VllmSamplingParams:
    """Return vLLM's parameters for a prompt, whose answer may continue as the same request of vLLM."""
    params = decode_params(request, eos_token_ids)
    if request.scores_prompt:
        params.prompt_logprobs = request.params.prompt_logprobs
        # Tokens of the prefix cache are not computed and have no log-probabilities.
        params.skip_reading_prefix_cache = True
    return params


def decode_params(request: EngineRequest, eos_token_ids: frozenset[int], drawn_count: int = 0) -> VllmSamplingParams:
    """Return vLLM's parameters for a request that generates the rest of the answer. vLLM ends it under the same
    conditions as kaveri.engine.stopping. drawn_count: number of tokens that the request has after its token_ids."""
    params = request.params
    assert params.max_tokens is not None, "an EngineRequest says how many tokens it wants"
    stop_token_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
    generated = request.generated_count + drawn_count
    draw = Draw(params, request.prompt_tokens, generated, eos_token_ids)
    return VllmSamplingParams(
        # Greedy among the tokens that KeyedDraws leaves, which also enforces min_tokens: vLLM would count only the
        # tokens of this placement.
        temperature=0.0,
        max_tokens=max(1, params.max_tokens - generated),
        # vLLM would add the ids of the checkpoint's generation config; ours are in stop_token_ids.
        ignore_eos=True,
        stop_token_ids=sorted(set(stop_token_ids)),
        logprobs=params.logprobs,
        # The router handles texts, and stop texts.
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=draw.to_extra_args(),
    )


def logprobs_of(position: Mapping[int, Any] | None, token_id: int, asked: int | None) -> Logprobs | None:
    """Convert one position of vLLM's logprobs; None if not requested. position: vLLM's Logprob (logprob, rank from 1)
    by token id, for the sampled token and the `asked` likeliest."""
    if asked is None or position is None:
        return None
    top = sorted((entry.rank, other_id, entry.logprob) for other_id, entry in position.items() if entry.rank <= asked)
    return Logprobs(position[token_id].logprob, tuple((other_id, logprob) for _, other_id, logprob in top))


def prompt_logprobs_of(request: EngineRequest, positions: Sequence[Mapping[int, Any] | None]) -> list[PromptLogprobs]:
    """Convert vLLM's prompt_logprobs to events. positions: for each prompt token, vLLM's Logprob by token id; None for
    the first. Raises EngineError if some are missing."""
    token_ids, count = request.token_ids, request.params.prompt_logprobs
    entries = [logprobs_of(each, token_id, count) for each, token_id in zip(positions, token_ids, strict=False)][1:]
    known = tuple(entry for entry in entries if entry is not None)
    if len(known) + 1 != len(token_ids):
        raise EngineError(f"vLLM gave {len(known)} prompt_logprobs for a prompt of {len(token_ids)} tokens")
    return [
        PromptLogprobs(request.key, first + 1, known[first : first + MAX_SCORED_TOKENS])
        for first in range(0, len(known), MAX_SCORED_TOKENS)
    ]


def refusal_of(error: Exception) -> KaveriError:
    if isinstance(error, KaveriError):
        return error
    if isinstance(error, VLLMClientError | ValueError):
        field = getattr(error, "parameter", None) or "request"
        return InvalidArgument(field, getattr(error, "value", None), f"what vLLM takes: {error}")
    return EngineError(f"{type(error).__name__}: {error}")
