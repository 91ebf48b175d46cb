from dataclasses import replace

import pytest

from kaveri.domain.attachment import Attached, Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import SamplingParams
from kaveri.errors import InvalidArgument, Unavailable
from kaveri.v1 import feed_pb2
from kaveri.wire.attempts import (
    attached_from_proto,
    attached_to_proto,
    attachment_from_proto,
    attachment_to_proto,
    check_ownership,
)

ATTACHMENT = Attachment("r", Ownership(Term(2, 3), "router-1", bytes(16)), (1, 2, 3, 4), 2)


def test_what_a_new_owner_shows_and_gets_survives_the_wire() -> None:
    for attachment in (ATTACHMENT, replace(ATTACHMENT, landed=True)):
        assert attachment_from_proto(attachment_to_proto(attachment)) == attachment
    attached = Attached(SamplingParams(max_tokens=20, temperature=0.5, top_p=0.75, top_k=3), 2, (5, 6))
    assert attached_from_proto(attached_to_proto(attached)) == attached


def test_an_answer_without_a_limit_of_tokens_is_its_senders_fault() -> None:
    with pytest.raises(Unavailable, match=r"answer to Attach .*max_tokens"):
        attached_from_proto(feed_pb2.Attached(first_index=2))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("request_id", ""),
        ("request_id", "é" * 65),
        ("router_id", ""),
        ("router_id", "x" * 513),
        ("attempt", 0),
        ("attempt", 2**31),
        ("session", 65_536),
        ("session", 2**32 - 1),
        ("secret", b"short"),
        ("secret", bytes(65)),
        ("generated_count", 4),
        ("generated_count", 2**32 - 1),
    ],
)
def test_a_wrong_field_is_refused_by_its_name_and_limit(field: str, wrong: object) -> None:
    message = attachment_to_proto(ATTACHMENT)
    setattr(message.term if field in ("session", "attempt") else message, field, wrong)
    with pytest.raises(InvalidArgument) as caught:
        attachment_from_proto(message)
    assert caught.value.field == field
    assert caught.value.limit


def test_a_secret_is_not_shown() -> None:
    message = attachment_to_proto(ATTACHMENT)
    message.secret = b"a secret"
    with pytest.raises(InvalidArgument) as caught:
        check_ownership(message)
    assert "a secret" not in str(caught.value)
