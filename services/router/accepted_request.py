"""A request whose input was checked, and what its client has of the answer."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import Phase
from kaveri.errors import InvalidArgument
from kaveri.v1 import inference_pb2
from services.router.lifecycle_values import InstanceLife

_MOST_AHEAD = 32
"""Tokens of the last steps before an instance has ended, which its router may lack."""


@dataclass(frozen=True, slots=True)
class OwnerHint:
    """The lives of instances that had a request last. None: there was none."""

    prefill: InstanceLife | None = None
    decode: InstanceLife | None = None
    holder: InstanceLife | None = None
    """Of the replica."""
    suspect_until: int = 0
    """As of Attempt."""

    def names_others_than(self, life: InstanceLife, phase: Phase) -> bool:
        """Whether this instance was not the last to have the request, in this phase."""
        if phase is Phase.PREFILL:
            return self.decode is not None or self.prefill not in (None, life)
        return (self.decode or self.prefill) is not None and self.decode != life

    def to_proto(self) -> inference_pb2.OwnerHint:
        message = inference_pb2.OwnerHint(suspect_until=self.suspect_until)
        if self.prefill is not None:
            message.prefill_instance_id, message.prefill_incarnation = self.prefill
        if self.decode is not None:
            message.decode_instance_id, message.decode_incarnation = self.decode
        if self.holder is not None:
            message.holder_instance_id, message.holder_incarnation = self.holder
        return message

    @classmethod
    def from_proto(cls, message: inference_pb2.OwnerHint) -> "OwnerHint":
        return cls(
            _life(message.prefill_instance_id, message.prefill_incarnation),
            _life(message.decode_instance_id, message.decode_incarnation),
            _life(message.holder_instance_id, message.holder_incarnation),
            message.suspect_until,
        )

    @classmethod
    def from_bytes(cls, value: bytes) -> "OwnerHint":
        """A hint from the store; empty if it cannot be parsed."""
        try:
            return cls.from_proto(inference_pb2.OwnerHint.FromString(value))
        except DecodeError:
            return cls()


def _life(instance_id: str, incarnation: int) -> InstanceLife | None:
    return InstanceLife(instance_id, incarnation) if instance_id else None


@dataclass(frozen=True, slots=True)
class AlreadyReceived:
    """What a client has of an answer."""

    token_ids: tuple[int, ...] = ()
    characters: int = 0
    owner: OwnerHint = OwnerHint()
    """Where the request is looked for first: the store's hint, if it has one."""
    told: OwnerHint = OwnerHint()
    """What the client was told last. The store may know less: it may have been away."""

    @property
    def suspect_until(self) -> int:
        """As of Attempt. The store may not have heard of it yet, and a client must not name any number."""
        named = max(self.owner.suspect_until, self.told.suspect_until)
        return min(named, len(self.token_ids) + _MOST_AHEAD)

    def excuses(self, refusal: BaseException, life: InstanceLife, phase: Phase) -> bool:
        """Whether an instance refuses what the client has received because it is a former owner. One that was cut off
        when the request went on elsewhere has fewer tokens than the client, or in low precision others. That is no
        fault of the client's."""
        if not (isinstance(refusal, InvalidArgument) and refusal.field.startswith("received.")):
            return False
        return self.owner.names_others_than(life, phase) or self.told.names_others_than(life, phase)


NOTHING_RECEIVED = AlreadyReceived()


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request whose input was checked."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: ResolvedParams
    """With max_tokens and seed set."""
    max_model_len: int
    arrived_s: float
    """time.monotonic() at its arrival."""
    deadline_s: float
    """time.monotonic() at which it fails."""
    session: int = 0
    """How often the client has re-attached."""
    secret: bytes = b""
    """Empty: the client cannot re-attach."""
    received: AlreadyReceived = NOTHING_RECEIVED
    """What the client has of earlier sessions."""
    direct: bool = False
    """Whether the client may read the answer at decode instances."""

    @property
    def most_tokens(self) -> int:
        """Most tokens that the answer may have."""
        assert self.params.max_tokens is not None
        return min(self.params.max_tokens, self.max_model_len - len(self.prompt_token_ids))

    @property
    def reported_prompt(self) -> tuple[int, ...]:
        """The prompt's tokens, when a report on them is wanted and the client lacks it. It comes before the first token
        of the answer, so a client that has a token has it."""
        is_wanted = self.params.prompt_logprobs is not None and not self.received.token_ids
        return self.prompt_token_ids if is_wanted else ()
