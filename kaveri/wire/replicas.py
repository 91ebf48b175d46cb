"""Encodes and decodes messages about KV copies of requests at other instances. Pure."""

from kaveri.domain.replica import ReplicaLocation, ReplicaOffer, Resumed, Resumption
from kaveri.domain.sampling import ResolvedParams
from kaveri.errors import InvalidArgument
from kaveri.v1 import decode_pb2
from kaveri.wire.attempts import check_ownership, ownership_fields
from kaveri.wire.messages import (
    layout_from_proto,
    layout_to_proto,
    length_from_proto,
    length_to_proto,
    params_from_proto,
    params_to_proto,
    same_fields,
    shared_fields,
)

_OFFER_FIELDS = shared_fields(decode_pb2.OpenReplicaRequest, ReplicaOffer)
_RESUMPTION_FIELDS = shared_fields(decode_pb2.ResumeRequest, Resumption)


def replica_to_proto(replica: ReplicaLocation) -> decode_pb2.Replica:
    return decode_pb2.Replica(
        holder_id=replica.holder_id, holder_incarnation=replica.holder_incarnation, token_count=replica.token_count
    )


def replica_from_proto(message: decode_pb2.Replica) -> ReplicaLocation:
    return ReplicaLocation(message.holder_id, message.holder_incarnation, message.token_count)


def offer_to_proto(offer: ReplicaOffer) -> decode_pb2.OpenReplicaRequest:
    return decode_pb2.OpenReplicaRequest(
        **ownership_fields(offer.request_id, offer.ownership) | same_fields(offer, _OFFER_FIELDS),
        layout=layout_to_proto(offer.layout),
        replica=offer.number,
    )


def offer_from_proto(message: decode_pb2.OpenReplicaRequest) -> ReplicaOffer:
    """Decode an instance's offer to copy a request's KV to another one. Raises InvalidArgument, naming the field."""
    ownership = check_ownership(message)
    _check_timeout(message.timeout_s)
    if not message.owner_id:
        raise InvalidArgument("owner_id", message.owner_id, "set")
    if not message.token_count:
        raise InvalidArgument("token_count", 0, "at least 1")
    return ReplicaOffer(
        **same_fields(message, _OFFER_FIELDS),
        ownership=ownership,
        layout=layout_from_proto(message.layout),
        number=message.replica,
    )


def resumption_to_proto(resumption: Resumption) -> decode_pb2.ResumeRequest:
    predicted = resumption.predicted_length
    return decode_pb2.ResumeRequest(
        **ownership_fields(resumption.request_id, resumption.ownership) | same_fields(resumption, _RESUMPTION_FIELDS),
        token_ids=resumption.token_ids,
        params=params_to_proto(resumption.params),
        predicted_length=length_to_proto(predicted) if predicted is not None else None,
    )


def resumption_from_proto(message: decode_pb2.ResumeRequest) -> Resumption:
    """Decode an order to resume a request from a KV copy. Raises InvalidArgument, naming the field."""
    ownership = check_ownership(message)
    _check_timeout(message.timeout_s)
    if message.generated_count >= len(message.token_ids):
        raise InvalidArgument("generated_count", message.generated_count, "less than the number of token_ids")
    return Resumption(
        **same_fields(message, _RESUMPTION_FIELDS),
        ownership=ownership,
        token_ids=tuple(message.token_ids),
        params=params_from_proto(message.params, ResolvedParams),
        predicted_length=length_from_proto(message.predicted_length) if message.HasField("predicted_length") else None,
    )


def resumed_to_proto(resumed: Resumed) -> decode_pb2.ResumeResponse:
    return decode_pb2.ResumeResponse(incarnation=resumed.incarnation, held_tokens=resumed.held_tokens)


def resumed_from_proto(message: decode_pb2.ResumeResponse) -> Resumed:
    return Resumed(message.incarnation, message.held_tokens)


def _check_timeout(timeout_s: float) -> None:
    if not timeout_s > 0:
        raise InvalidArgument("timeout_s", timeout_s, "more than 0")
