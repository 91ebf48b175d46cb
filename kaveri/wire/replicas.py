"""Converts messages about replicas between owners, holders and routers to domain values and back. Pure."""

from kaveri.domain.replica import ReplicaLocation, ReplicaOffer, Resumed, Resumption
from kaveri.errors import InvalidArgument
from kaveri.v1 import decode_pb2
from kaveri.wire.attempts import check_ownership
from kaveri.wire.messages import (
    layout_from_proto,
    layout_to_proto,
    length_from_proto,
    length_to_proto,
    params_to_proto,
    resolved_from_proto,
)


def replica_to_proto(replica: ReplicaLocation) -> decode_pb2.Replica:
    return decode_pb2.Replica(
        holder_id=replica.holder_id, holder_incarnation=replica.holder_incarnation, token_count=replica.token_count
    )


def replica_from_proto(message: decode_pb2.Replica) -> ReplicaLocation:
    return ReplicaLocation(message.holder_id, message.holder_incarnation, message.token_count)


def offer_to_proto(offer: ReplicaOffer) -> decode_pb2.OpenReplicaRequest:
    owner, router_id, secret = offer.ownership
    return decode_pb2.OpenReplicaRequest(
        request_id=offer.request_id,
        session=owner.session,
        attempt=owner.attempt,
        router_id=router_id,
        secret=secret,
        owner_id=offer.owner_id,
        owner_incarnation=offer.owner_incarnation,
        layout=layout_to_proto(offer.layout),
        token_count=offer.token_count,
        timeout_s=offer.timeout_s,
        replica=offer.number,
    )


def offer_from_proto(message: decode_pb2.OpenReplicaRequest) -> ReplicaOffer:
    """Decode an offer. Raises InvalidArgument, naming the field."""
    ownership = check_ownership(message)
    _check_timeout(message.timeout_s)
    if not message.owner_id:
        raise InvalidArgument("owner_id", message.owner_id, "set")
    if not message.token_count:
        raise InvalidArgument("token_count", 0, "at least 1")
    return ReplicaOffer(
        message.request_id,
        ownership,
        message.owner_id,
        message.owner_incarnation,
        layout_from_proto(message.layout),
        message.token_count,
        message.timeout_s,
        message.replica,
    )


def resumption_to_proto(resumption: Resumption) -> decode_pb2.ResumeRequest:
    owner, router_id, secret = resumption.ownership
    predicted = resumption.predicted_length
    return decode_pb2.ResumeRequest(
        request_id=resumption.request_id,
        session=owner.session,
        attempt=owner.attempt,
        router_id=router_id,
        secret=secret,
        token_ids=resumption.token_ids,
        generated_count=resumption.generated_count,
        params=params_to_proto(resumption.params),
        timeout_s=resumption.timeout_s,
        predicted_length=length_to_proto(predicted) if predicted is not None else None,
        holder_incarnation=resumption.holder_incarnation,
        replica_tokens=resumption.replica_tokens,
        traceparent=resumption.traceparent,
        suspect_until=resumption.suspect_until,
    )


def resumption_from_proto(message: decode_pb2.ResumeRequest) -> Resumption:
    """Decode a resumption. Raises InvalidArgument, naming the field."""
    ownership = check_ownership(message)
    _check_timeout(message.timeout_s)
    if message.generated_count >= len(message.token_ids):
        raise InvalidArgument("generated_count", message.generated_count, "less than the number of token_ids")
    return Resumption(
        message.request_id,
        ownership,
        tuple(message.token_ids),
        message.generated_count,
        resolved_from_proto(message.params),
        message.timeout_s,
        length_from_proto(message.predicted_length) if message.HasField("predicted_length") else None,
        message.holder_incarnation,
        message.replica_tokens,
        message.traceparent,
        message.suspect_until,
    )


def resumed_to_proto(resumed: Resumed) -> decode_pb2.ResumeResponse:
    return decode_pb2.ResumeResponse(incarnation=resumed.incarnation, held_tokens=resumed.held_tokens)


def resumed_from_proto(message: decode_pb2.ResumeResponse) -> Resumed:
    return Resumed(message.incarnation, message.held_tokens)


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise InvalidArgument("timeout_s", timeout_s, "more than 0")
