"""Says when a request ends, the same on every engine and on both sides. Pure."""

from kaveri.domain.sampling import FinishReason, SamplingParams


def finish_reason(
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    token_id: int,
    index: int,
    context_tokens: int,
    max_model_len: int,
) -> FinishReason | None:
    """Whether the request ends with the token `token_id` drawn at `index` of the answer.

    context_tokens: tokens of prompt and answer, this one included. Stop texts are the router's business.
    """
    if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids):
        return FinishReason.STOP
    if params.max_tokens is not None and index + 1 >= params.max_tokens:
        return FinishReason.LENGTH
    if context_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
