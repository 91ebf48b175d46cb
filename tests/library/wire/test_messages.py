import pytest

from kaveri.errors import InvalidArgument, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.v1 import cluster_pb2
from kaveri.wire.messages import record_from_proto, status_from_proto, ticket_from_proto, ticket_to_proto

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
NO_SECONDS = [float("nan"), float("inf"), -float("inf"), 1e10, 1e300]


@pytest.mark.parametrize("expires_in_s", NO_SECONDS)
def test_a_ticket_without_a_number_of_seconds_is_refused(expires_in_s: float) -> None:
    message = ticket_to_proto(Ticket(bytes(16), bytes(16), 1, (KvEndpoint("tcp", "h:1"),), (0,), 4, 60.0, LAYOUT))
    assert ticket_from_proto(message).expires_in_s == 60.0
    message.expires_in_s = expires_in_s
    with pytest.raises(Unavailable, match=r"ticket\.expires_in_s"):
        ticket_from_proto(message)


@pytest.mark.parametrize("seconds", NO_SECONDS)
def test_an_instance_with_no_number_of_seconds_is_refused(seconds: float) -> None:
    record = cluster_pb2.InstanceRecord(instance_id="d", role=cluster_pb2.ROLE_ENGINE, lease_ttl_s=3.0)
    load = cluster_pb2.InstanceLoad(state=cluster_pb2.INSTANCE_STATE_READY)
    message = cluster_pb2.InstanceStatus(record=record, load=load, heartbeat_age_s=0.5)
    known = record_from_proto(record)
    assert status_from_proto(message) == status_from_proto(message, known)
    message.record.lease_ttl_s = seconds
    with pytest.raises(InvalidArgument, match="lease_ttl_s"):
        status_from_proto(message)
    message.heartbeat_age_s = seconds
    with pytest.raises(InvalidArgument, match="heartbeat_age_s"):
        status_from_proto(message, known)
