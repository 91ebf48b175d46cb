"""Decides when an answer ends, the same for every engine and for prefill and decode. Pure."""

from collections.abc import Set as AbstractSet

from kaveri.domain.sampling import FinishReason, SamplingParams

_NONE: frozenset[int] = frozenset()


def barred_token_ids(params: SamplingParams, eos_token_ids: AbstractSet[int], index: int) -> AbstractSet[int]:
    """Return the token ids that must not be drawn at `index` of the answer: they would end it before min_tokens."""
    if index >= params.min_tokens:
        return _NONE
    return frozenset(params.stop_token_ids) | (_NONE if params.ignore_eos else eos_token_ids)


def finish_reason(
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    token_id: int,
    index: int,
    context_tokens: int,
    max_model_len: int,
) -> FinishReason | None:
    """Return why the answer ends with `token_id`, drawn at `index` of the answer; None if it continues.

    context_tokens: tokens of prompt and answer, this one included. Stop strings are left to the router.
    """
    if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids):
        return FinishReason.STOP
    if params.max_tokens is not None and index + 1 >= params.max_tokens:
        return FinishReason.LENGTH
    if context_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
