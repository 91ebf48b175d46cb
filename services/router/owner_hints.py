"""Hints of which instances have a request: between the wire and the router."""

from google.protobuf.message import DecodeError

from kaveri.v1 import inference_pb2
from services.router.accepted_request import OwnerHint
from services.router.lifecycle_values import InstanceLife


def hint_to_proto(hint: OwnerHint) -> inference_pb2.OwnerHint:
    message = inference_pb2.OwnerHint(suspect_until=hint.suspect_until)
    if hint.prefill is not None:
        message.prefill_instance_id, message.prefill_incarnation = hint.prefill
    if hint.decode is not None:
        message.decode_instance_id, message.decode_incarnation = hint.decode
    if hint.holder is not None:
        message.holder_instance_id, message.holder_incarnation = hint.holder
    return message


def hint_from_proto(message: inference_pb2.OwnerHint) -> OwnerHint:
    return OwnerHint(
        _life(message.prefill_instance_id, message.prefill_incarnation),
        _life(message.decode_instance_id, message.decode_incarnation),
        _life(message.holder_instance_id, message.holder_incarnation),
        message.suspect_until,
    )


def hint_from_bytes(value: bytes) -> OwnerHint:
    """Of the store. What cannot be read says nothing."""
    try:
        return hint_from_proto(inference_pb2.OwnerHint.FromString(value))
    except DecodeError:
        return OwnerHint()


def _life(instance_id: str, incarnation: int) -> InstanceLife | None:
    return InstanceLife(instance_id, incarnation) if instance_id else None
