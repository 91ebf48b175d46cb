"""Taking over a request that another router, or an earlier session, has begun. Pure: no clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.domain.owner import Ownership
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the new owner shows: who it is, and what its client has."""

    request_id: str
    ownership: Ownership
    token_ids: tuple[int, ...]
    """Prompt, followed by the tokens that the client has."""
    generated_count: int
    """How many of token_ids the client has."""
    landed: bool = False
    """At decode: only a request whose KV has landed."""
    same_owner: bool = False
    """At prefill: only a request that has this very owner already."""
    placed_by: str = ""
    """At decode: only a request that this prefill instance has placed there, as far as that is known. Empty: any."""


@dataclass(frozen=True, slots=True)
class Attached:
    """What the new owner must know of the request."""

    params: SamplingParams
    """max_tokens, temperature, top_p and top_k as the request's first router has resolved them; no others."""
    first_index: int
    """Index of the token that prefill draws, or drew."""
    token_ids: tuple[int, ...] = ()
    """Those that the client lacks and earlier placements have drawn: up to first_index."""


def check_received(
    attachment: Attachment, prompt: Sequence[int], generated: Sequence[int | None], *, is_all: bool
) -> None:
    """Raises InvalidArgument unless the attachment shows the request's own prompt, and tokens that were generated.

    generated: from index 0 on; None: a token that is not known here. is_all: no more were generated anywhere.
    """
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
