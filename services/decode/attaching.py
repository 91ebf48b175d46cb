"""What a new owner of a request must show, and what it gets to know. Pure: no clock, no I/O."""

from typing import NamedTuple

from kaveri.domain.attachment import Attached, Attachment, check_received
from kaveri.domain.owner import Owner
from kaveri.engine.contract import EngineRequest
from kaveri.errors import InvalidArgument, RequestNotFound
from services.decode.lifecycle import InLine, Reserved, Reserving
from services.decode.requests import DecodeRequest


class Awaited(NamedTuple):
    """A request whose tokens a router waits for on a new stream."""

    request_id: str
    owner: Owner
    next_index: int
    """Of the first token that the router lacks."""


def attached_of(request: DecodeRequest, attachment: Attachment) -> tuple[Attached, int]:
    """What the new owner must know, and the index from which it gets tokens. Raises RequestNotFound and
    InvalidArgument."""
    log, engine_request = request.log, request.engine_request
    generated_count, params = engine_request.generated_count, engine_request.params
    has_landed = not isinstance(request.state, InLine | Reserving | Reserved)
    is_from_elsewhere = attachment.placed_by != request.placed_by and attachment.placed_by and request.placed_by
    if is_from_elsewhere:
        # The router has its report, and perhaps a first token, from another computation than the one that came here.
        raise RequestNotFound(request.request_id, f"{request.placed_by} has placed it here, not {attachment.placed_by}")
    if attachment.landed and not has_landed:
        raise RequestNotFound(request.request_id, "its KV has not landed")
    prompt_count = prompt_tokens(engine_request)
    prompt, generated = engine_request.token_ids[:prompt_count], engine_request.token_ids[prompt_count:]
    unknown = [None] * (log.first_index - generated_count)
    try:
        check_received(attachment, prompt, [*generated, *unknown, *log.token_ids], is_all=True)
    except InvalidArgument as refusal:
        if log.end.error and refusal.field.startswith("received."):
            # It was given up or moved, and went on elsewhere: the client has the tokens from there.
            reason = f"it ended before its client's last tokens: {log.end.error}"
            raise RequestNotFound(request.request_id, reason) from refusal
        raise
    if log.end.error and not (log.end.moved or log.end.is_final) and attachment.generated_count >= log.next_index:
        # To take it over would be a lost attempt.
        raise RequestNotFound(request.request_id, f"it ended, and its client has all of its tokens: {log.end.error}")
    next_index = max(attachment.generated_count, generated_count)
    if attachment.landed and next_index < log.first_index:
        raise RequestNotFound(request.request_id, "its first token is known to prefill alone")
    missing = generated[attachment.generated_count :]
    if missing and params.logprobs is not None:
        raise RequestNotFound(request.request_id, "the log-probabilities of earlier placements are not known here")
    return Attached(params, generated_count, missing), next_index


def prompt_tokens(request: EngineRequest) -> int:
    """Tokens of the client's own prompt."""
    return len(request.token_ids) - request.generated_count
