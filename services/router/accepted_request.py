"""A validated request, and the part of its answer that its client has already received."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import Phase
from kaveri.errors import InvalidArgument
from kaveri.lives.request_values import InstanceLife
from kaveri.parsers.answer import PLAIN, AnswerForm
from kaveri.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class OwnerHint:
    """Instances last known to serve a request, to be asked for it first when its client re-attaches; None: unknown."""

    prefill: InstanceLife | None = None
    decode: InstanceLife | None = None
    holder: InstanceLife | None = None
    """Instance that holds a replica: a copy of the request's KV cache."""
    suspect_until: int = 0
    """Answer length in tokens until which the request is suspected of breaking engines; 0: it is not."""

    def names_others_than(self, life: InstanceLife, phase: Phase) -> bool:
        """True if, by this hint, an instance other than `life` was the last to serve the request in `phase`."""
        if phase is Phase.PREFILL:
            return self.decode is not None or self.prefill not in (None, life)
        return (self.decode or self.prefill) is not None and self.decode != life


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


def hint_from_store(value: bytes) -> OwnerHint:
    """Parse a hint from the cluster store; an empty hint if the bytes are invalid."""
    try:
        return hint_from_proto(inference_pb2.OwnerHint.FromString(value))
    except DecodeError:
        return OwnerHint()


def _life(instance_id: str, incarnation: int) -> InstanceLife | None:
    return InstanceLife(instance_id, incarnation) if instance_id else None


@dataclass(frozen=True, slots=True)
class AlreadyReceived:
    """The part of an answer that a re-attaching client already has."""

    token_ids: tuple[int, ...] = ()
    characters: int = 0
    owner: OwnerHint = OwnerHint()
    """Instances to ask for the request first: the store's hint if there is one, else the client's."""
    told: OwnerHint = OwnerHint()
    """The client's hint. The store's may be older, if the store was unreachable."""

    def excuses(self, refusal: BaseException, life: InstanceLife, phase: Phase) -> bool:
        """True if `life` refused the client's tokens only because another instance has replaced it since. Its own
        tokens are then fewer than the client's or, in low precision, different."""
        if not (isinstance(refusal, InvalidArgument) and refusal.field.startswith("received.")):
            return False
        return self.owner.names_others_than(life, phase) or self.told.names_others_than(life, phase)


NOTHING_RECEIVED = AlreadyReceived()


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A validated, tokenized request with all parameters filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams
    """Includes max_tokens and seed."""
    room: int
    """Max answer tokens that the model's context length allows."""
    arrived_s: float
    """time.monotonic() at its arrival."""
    deadline_s: float
    """time.monotonic() of its deadline."""
    session: int = 0
    """Number of times the client has re-attached."""
    secret: bytes = b""
    """Proof of a re-attaching client that the request is its own; empty: the client cannot re-attach."""
    received: AlreadyReceived = NOTHING_RECEIVED
    """Tokens and text from earlier sessions."""
    form: AnswerForm = PLAIN
    """How the answer's text is read."""
    direct: bool = False
    """True if the client may read the answer directly from decode instances."""
