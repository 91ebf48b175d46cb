"""Encodes and checks the identity of a request and its owner in protobuf messages."""

import re
from dataclasses import replace
from typing import Any, Protocol

from kaveri.domain.attachment import Attached, Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument
from kaveri.v1 import decode_pb2, feed_pb2, term_pb2
from kaveri.wire.messages import drawing_to_proto, params_from_proto, same_fields, sent_in_answer, shared_fields

MAX_REQUEST_ID_BYTES = 128
MAX_CLIENTS_ID_BYTES = 96
"""Length of an HTTP client's id that a gateway keeps as the prefix of request ids, before "-" and a suffix."""
CLIENTS_ID_SUFFIX_BYTES = 5
"""Suffix size, written in hexadecimal. If the client asked for several answers, "-" and the answer's number follow."""
_SUFFIX = re.compile(rf"-[0-9a-f]{{{2 * CLIENTS_ID_SUFFIX_BYTES}}}(-[0-9]+)?")
MAX_ROUTER_ID_BYTES = 512
MAX_ATTEMPT = 2**31 - 1
MAX_SESSION = 65_535
MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 64
_ATTACHMENT_FIELDS = shared_fields(feed_pb2.AttachRequest, Attachment)


class _NamesOwner(Protocol):
    """Message that identifies a request and its owner."""

    request_id: str
    router_id: str
    secret: bytes

    @property
    def term(self) -> term_pb2.Term: ...


def term_from_proto(message: term_pb2.Term) -> Term:
    """Decode the session and attempt of a term, without its placement."""
    return Term(message.session, message.attempt)


def check_request(request_id: str, session: int = 0, secret: bytes = b"") -> None:
    """Raise InvalidArgument, naming the field, if the request's id, session number or secret exceeds its limits. The
    error does not contain the secret."""
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidArgument("request_id", request_id, f"at most {MAX_REQUEST_ID_BYTES} bytes long, not {size}")
    if session > MAX_SESSION:
        raise InvalidArgument("session", session, f"at most {MAX_SESSION}")
    if secret and not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        limit = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes long"
        raise InvalidArgument("secret", f"{len(secret)} bytes long", limit)


def is_made_from(request_id: str, clients_id: str) -> bool:
    """Return True if a gateway derived this request id from `clients_id`, the id given by its HTTP client."""
    clients_id = clients_id[:MAX_CLIENTS_ID_BYTES]
    return request_id.startswith(clients_id) and _SUFFIX.fullmatch(request_id, len(clients_id)) is not None


def check_router_id(router_id: str) -> None:
    """Raise InvalidArgument if the router id is empty or too long."""
    if not router_id:
        raise InvalidArgument("router_id", router_id, "set")
    size = len(router_id.encode())
    if size > MAX_ROUTER_ID_BYTES:
        raise InvalidArgument("router_id", router_id, f"at most {MAX_ROUTER_ID_BYTES} bytes long, not {size}")


def ownership_from_proto(message: _NamesOwner) -> Ownership:
    """Decode the owner of a request, without checks."""
    return Ownership(term_from_proto(message.term), message.router_id, message.secret)


def ownership_fields(request_id: str, ownership: Ownership, placement: int = 0) -> dict[str, Any]:
    """Return a request's id and owner as keyword arguments for a message. placement: number of a call of Reserve."""
    (session, attempt), router_id, secret = ownership
    term = term_pb2.Term(session=session, attempt=attempt, placement=placement)
    return {"request_id": request_id, "term": term, "router_id": router_id, "secret": secret}


def ownership_to_proto(request_id: str, ownership: Ownership, placement: int = 0) -> decode_pb2.AttemptId:
    """Encode a request's id and owner. placement: number of a call of Reserve."""
    return decode_pb2.AttemptId(**ownership_fields(request_id, ownership, placement))


def check_ownership(message: _NamesOwner) -> Ownership:
    """Validate and decode the owner that a message names. Raises InvalidArgument."""
    if not message.request_id:
        raise InvalidArgument("request_id", message.request_id, "set")
    term = Term(message.term.session, message.term.attempt)
    check_request(message.request_id, term.session, message.secret)
    check_router_id(message.router_id)
    if not 0 < term.attempt <= MAX_ATTEMPT:
        raise InvalidArgument("attempt", term.attempt, f"from 1 to {MAX_ATTEMPT}")
    return Ownership(term, message.router_id, message.secret)


def wrong_secret() -> InvalidArgument:
    """Return the error for a secret that differs from the request's. Its text contains neither."""
    return InvalidArgument("secret", "another one", "the secret of the request's first session")


def attachment_from_proto(message: feed_pb2.AttachRequest) -> Attachment:
    """Decode a router's message that takes over a running request. Raises InvalidArgument, naming the field."""
    ownership = check_ownership(message)
    if message.generated_count >= len(message.token_ids):
        raise InvalidArgument("generated_count", message.generated_count, "less than the number of token_ids")
    return Attachment(
        **same_fields(message, _ATTACHMENT_FIELDS), ownership=ownership, token_ids=tuple(message.token_ids)
    )


def attachment_to_proto(attachment: Attachment, incarnation: int = 0) -> feed_pb2.AttachRequest:
    """Encode an attachment. incarnation: of the instance that it is meant for; 0: any."""
    return feed_pb2.AttachRequest(
        **ownership_fields(attachment.request_id, attachment.ownership) | same_fields(attachment, _ATTACHMENT_FIELDS),
        token_ids=attachment.token_ids,
        incarnation=incarnation,
    )


def attached_to_proto(attached: Attached) -> feed_pb2.Attached:
    return feed_pb2.Attached(
        max_tokens=attached.params.max_tokens or 0,
        first_index=attached.first_index,
        token_ids=attached.token_ids,
        resolved_params=drawing_to_proto(attached.params),
    )


@sent_in_answer("the instance's answer to Attach")
def attached_from_proto(message: feed_pb2.Attached) -> Attached:
    """Decode an instance's response to Attach. Raises Unavailable if it is invalid."""
    params = replace(params_from_proto(message.resolved_params, SamplingParams), max_tokens=message.max_tokens)
    return Attached(params, message.first_index, tuple(message.token_ids))
