from dataclasses import replace

import pytest

from kaveri.domain.length import TokenRange
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaLocation, ReplicaOffer, Resumed, Resumption
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import InstanceLoad, InstanceRecord, InstanceStatus, ReplicaCounts, Role
from kaveri.errors import InvalidArgument
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.wire.messages import status_from_proto, status_to_proto, ticket_from_proto, ticket_to_proto
from kaveri.wire.replicas import (
    offer_from_proto,
    offer_to_proto,
    replica_from_proto,
    replica_to_proto,
    resumed_from_proto,
    resumed_to_proto,
    resumption_from_proto,
    resumption_to_proto,
)

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
OWNERSHIP = Ownership(Term(2, 3), "router-1", bytes(range(16)))
OFFER = ReplicaOffer("r", OWNERSHIP, "decode-0", 2**63 - 1, LAYOUT, 9, 30.0)
PARAMS = ResolvedParams(max_tokens=20, seed=7)
RESUMPTION = Resumption("r", OWNERSHIP, (1, 2, 3, 4), 2, PARAMS, 30.0, TokenRange(8, 16), 2**63 - 1)


def test_what_is_said_of_replicas_survives_the_wire() -> None:
    replica, resumed = ReplicaLocation("decode-1", 5, 64), Resumed(5, 64)
    assert replica_from_proto(replica_to_proto(replica)) == replica
    assert resumed_from_proto(resumed_to_proto(resumed)) == resumed
    assert offer_from_proto(offer_to_proto(OFFER)) == OFFER
    for resumption in (RESUMPTION, replace(RESUMPTION, predicted_length=None)):
        assert resumption_from_proto(resumption_to_proto(resumption)) == resumption


def test_open_tickets_replica_room_and_failure_domains_survive_the_wire() -> None:
    ticket = Ticket(bytes(16), bytes(16), 1, (KvEndpoint("tcp", "h:1"),), (0,), 4, 60.0, LAYOUT, is_open=True)
    assert ticket_from_proto(ticket_to_proto(ticket)) == ticket
    record = InstanceRecord("d", 1, Role.ENGINE, "h:1", "m", failure_domain="rack-1")
    for counts in (None, ReplicaCounts(), ReplicaCounts(1, 2, 3, 4, 5)):
        load = InstanceLoad(replica_free_bytes=2**40, replica_total_bytes=2**41, replica_counts=counts)
        status = InstanceStatus(record, load)
        assert status_from_proto(status_to_proto(status)) == status


BOTH = [("request_id", ""), ("router_id", ""), ("attempt", 0), ("session", 70_000), ("secret", b"short")]


@pytest.mark.parametrize(
    ("field", "wrong"), [*BOTH, ("owner_id", ""), ("token_count", 0), ("timeout_s", 0.0), ("timeout_s", float("nan"))]
)
def test_an_offer_with_a_wrong_field_is_refused_by_its_name(field: str, wrong: object) -> None:
    message = offer_to_proto(OFFER)
    setattr(message.term if field in ("session", "attempt") else message, field, wrong)
    with pytest.raises(InvalidArgument) as caught:
        offer_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize("low", [5, 6])
def test_a_resume_with_an_empty_predicted_length_is_refused_by_its_name(low: int) -> None:
    message = resumption_to_proto(RESUMPTION)
    message.predicted_length.low, message.predicted_length.high = low, 5
    with pytest.raises(InvalidArgument, match="predicted_length"):
        resumption_from_proto(message)


@pytest.mark.parametrize(("field", "wrong"), [*BOTH, ("generated_count", 4), ("timeout_s", -1.0)])
def test_a_resume_with_a_wrong_field_is_refused_by_its_name(field: str, wrong: object) -> None:
    message = resumption_to_proto(RESUMPTION)
    setattr(message.term if field in ("session", "attempt") else message, field, wrong)
    with pytest.raises(InvalidArgument) as caught:
        resumption_from_proto(message)
    assert caught.value.field == field
