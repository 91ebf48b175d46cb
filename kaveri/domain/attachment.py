"""Attachment: another router, or a later session of the client, takes over a request. Pure: no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.owner import OwnedRequest
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Attachment(OwnedRequest):
    """Call of a router to take over a running or kept request, with the tokens that its client already has."""

    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens that the client has."""
    generated_count: int
    """Number of generated tokens in token_ids."""
    landed: bool = False
    """At decode: match only a request whose KV has landed."""
    at_prefill: bool = False
    """Match a request at prefill; otherwise at decode."""
    placed_by: str = ""
    """At decode: match only a request placed by this prefill instance, as far as known. Empty: any."""


@dataclass(frozen=True, slots=True)
class Attached:
    """Response to an attachment: the state of the request that the new owner needs."""

    params: SamplingParams
    """Only max_tokens, temperature, top_p and top_k, as resolved by the request's first router."""
    first_index: int
    """Index of the token that prefill samples or sampled."""
    token_ids: tuple[int, ...] = ()
    """Tokens of earlier placements that the client lacks, up to first_index."""


def check_received(
    attachment: Attachment, prompt: Sequence[int], generated: Sequence[int | None], *, is_all: bool
) -> None:
    """Raise InvalidArgument unless the attachment has the request's own prompt, and answer tokens that were generated.
    generated: answer tokens from index 0 on; None: a token unknown here. is_all: True if no more were generated
    anywhere."""
    count = attachment.generated_count
    prompt_count = len(attachment.token_ids) - count
    if attachment.token_ids[:prompt_count] != tuple(prompt):
        raise InvalidArgument("prompt", f"of {prompt_count} tokens", "the one of the request's first session")
    if is_all and count > len(generated):
        limit = f"at most {len(generated)}: no more were generated"
        raise InvalidArgument("received.token_ids", f"{count} tokens", limit)
    for index, (received, known) in enumerate(zip(attachment.token_ids[prompt_count:], generated, strict=False)):
        if known is not None and known != received:
            raise InvalidArgument(f"received.token_ids[{index}]", received, "the token that was generated")
