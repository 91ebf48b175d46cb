"""Converts domain values to protobuf messages and back, for values used in several services' messages. Pure."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Final, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from kaveri.domain.grammar import Grammar, GrammarKind
from kaveri.domain.length import TokenRange
from kaveri.domain.sampling import (
    FinishReason,
    Logprobs,
    ResolvedParams,
    SamplingParams,
    check_counts,
)
from kaveri.domain.view import (
    WIRE,
    DrainWay,
    InstanceLoad,
    InstanceRecord,
    InstanceState,
    InstanceStatus,
    LoadBroadcast,
    Phase,
    PhaseOrder,
    ReplicaCounts,
    Role,
    ViewedInstance,
)
from kaveri.errors import EngineBroke, EngineError, InvalidArgument, Unavailable
from kaveri.kv.layout.layout import KvLayout, PartPlace
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, TicketPart
from kaveri.parsers.answer import AnswerForm
from kaveri.seconds import DAY_S, require_seconds
from kaveri.v1 import cluster_pb2, decode_pb2, inference_pb2, instance_pb2, kv_pb2, predictor_pb2, sampling_pb2

ParamsT = TypeVar("ParamsT", bound=SamplingParams)
_OLDEST_HEARTBEAT_S = 365 * DAY_S
"""Max heartbeat age in a message. While Redis is unavailable no lease ends, so ages are unbounded."""
FINISH_TO_PROTO = {None: sampling_pb2.FINISH_REASON_UNSPECIFIED} | {
    finish: sampling_pb2.FinishReason.Value(f"FINISH_REASON_{finish.name}") for finish in FinishReason
}
"""Finish reasons in messages. UNSPECIFIED: the answer has not ended."""
FINISH_FROM_PROTO = {value: key for key, value in FINISH_TO_PROTO.items()}
"""Inverse of FINISH_TO_PROTO. Lacks the values of newer protocol versions."""
_ROLE_TO_PROTO = {role: cluster_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLE_FROM_PROTO = {value: key for key, value in _ROLE_TO_PROTO.items()}
_PHASE_TO_PROTO = {phase: cluster_pb2.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}
_PHASE_FROM_PROTO = {value: key for key, value in _PHASE_TO_PROTO.items()}
_STATE_TO_PROTO = {state: cluster_pb2.InstanceState.Value(f"INSTANCE_STATE_{state.name}") for state in InstanceState}
_STATE_FROM_PROTO = {value: key for key, value in _STATE_TO_PROTO.items()}
_DRAWING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OPTIONAL_PARAMS: Final = ("max_tokens", *_DRAWING, "seed", "logprobs", "prompt_logprobs")


def shared_fields(message: type[Message], value: type[Any]) -> Sequence[str]:
    """Return the names of non-optional numeric, text and bytes fields shared by a message and a dataclass."""
    empty, names = message(), {field.name for field in fields(value)}
    return tuple(
        field.name
        for field in message.DESCRIPTOR.fields
        if field.name in names
        and isinstance(getattr(empty, field.name), int | float | str | bytes)
        and not (field.has_presence or field.enum_type)
    )


_FORM_FIELDS = ("tool_parser", "reasoning_parser", "reasoning_has_begun")
_LAYOUT_FIELDS = shared_fields(kv_pb2.KvLayout, KvLayout)
_TICKET_FIELDS = shared_fields(kv_pb2.Ticket, Ticket)
_RECORD_FIELDS = shared_fields(cluster_pb2.InstanceRecord, InstanceRecord)
_LOAD_FIELDS = shared_fields(cluster_pb2.InstanceLoad, InstanceLoad)
_COUNTS_FIELDS = shared_fields(cluster_pb2.ReplicaCounts, ReplicaCounts)


def same_fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the named attributes of `source`, as keyword arguments."""
    return {name: getattr(source, name) for name in names}


def params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Encode sampling parameters, leaving None unset."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _OPTIONAL_PARAMS},
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        show_special_tokens=not params.skip_special_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_words=params.bad_words,
        allowed_token_ids=params.allowed_token_ids,
        grammar=None if params.grammar is None else grammar_to_proto(params.grammar),
        bad_token_ids=[sampling_pb2.TokenSequence(ids=ids) for ids in getattr(params, "bad_token_ids", ())],
    )


def params_from_proto(message: sampling_pb2.SamplingParams, kind: type[ParamsT]) -> ParamsT:
    """Decode sampling parameters. kind: SamplingParams for a client's, where unset ones become None; ResolvedParams for
    a router's, where all are set. Raises InvalidArgument."""
    # Check before copying: a message has room for millions of them.
    names = ("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids")
    check_counts(*(len(getattr(message, name)) for name in names))
    of_routers: dict[str, Any] = {}
    if issubclass(kind, ResolvedParams):
        of_routers["bad_token_ids"] = tuple(tuple(each.ids) for each in message.bad_token_ids)
    return kind(
        **of_routers,
        **{name: getattr(message, name) for name in _OPTIONAL_PARAMS if message.HasField(name)},
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=message.min_tokens,
        skip_special_tokens=not message.show_special_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(message.logit_bias.items()),
        bad_words=tuple(message.bad_words),
        allowed_token_ids=tuple(message.allowed_token_ids),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def grammar_to_proto(grammar: Grammar) -> sampling_pb2.Grammar:
    return sampling_pb2.Grammar(
        **{grammar.kind: grammar.source},
        reasoning_end_ids=grammar.reasoning_end_ids,
        reasoning_begin_ids=grammar.reasoning_begin_ids,
    )


def grammar_from_proto(message: sampling_pb2.Grammar) -> Grammar:
    """Decode a grammar. Raises InvalidArgument."""
    kind = message.WhichOneof("grammar")
    if kind is None:
        raise InvalidArgument("params.grammar", None, "json_schema, regex, lark or choices")
    return Grammar(
        GrammarKind(kind), getattr(message, kind), tuple(message.reasoning_end_ids), tuple(message.reasoning_begin_ids)
    )


def form_to_proto(form: AnswerForm) -> inference_pb2.AnswerForm:
    return inference_pb2.AnswerForm(**same_fields(form, _FORM_FIELDS), tool_names=form.tool_names)


def form_from_proto(message: inference_pb2.AnswerForm) -> AnswerForm:
    return AnswerForm(**same_fields(message, _FORM_FIELDS), tool_names=tuple(message.tool_names))


def drawing_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Encode only the parameters for which a model may have defaults, without max_tokens."""
    return sampling_pb2.SamplingParams(**{name: getattr(params, name) for name in _DRAWING})


def shown_params(params: SamplingParams) -> dict[str, Any]:
    """Return the explicitly set parameters in printable form: 0.6 stays 0.6, not its float32 value."""
    message = sampling_pb2.SamplingParams(**params.chosen)
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def logprobs_to_proto(logprobs: Logprobs) -> sampling_pb2.Logprobs:
    top = [sampling_pb2.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in logprobs.top]
    return sampling_pb2.Logprobs(logprob=logprobs.logprob, top=top)


def prompt_logprobs_to_proto(first: int, entries: Iterable[Logprobs]) -> sampling_pb2.PromptLogprobs:
    """Encode log-probabilities of prompt tokens. first: index of the first entry within the prompt."""
    return sampling_pb2.PromptLogprobs(first=first, logprobs=[logprobs_to_proto(entry) for entry in entries])


def name_tokens(
    token_ids: Sequence[int], reports: Iterable[sampling_pb2.Logprobs], token_piece: Callable[[int], tuple[str, bytes]]
) -> None:
    """Add tokens' texts to their log-probability messages, one per token. token_piece: maps a token id to its text, and
    to its bytes if they differ from the text."""
    for token_id, report in zip(token_ids, reports, strict=False):
        report.text, report.raw_bytes = token_piece(token_id)
        for likely in report.top:
            likely.text, likely.raw_bytes = token_piece(likely.token_id)


def logprobs_from_proto(message: sampling_pb2.Logprobs) -> Logprobs:
    top = message.top
    texts = tuple(entry.text for entry in top)
    return Logprobs(
        message.logprob,
        tuple((entry.token_id, entry.logprob) for entry in top),
        message.text,
        texts if any(texts) else (),
        message.raw_bytes,
        tuple(entry.raw_bytes for entry in top) if any(texts) else (),
        message.text_offset,
    )


def length_to_proto(length: TokenRange) -> predictor_pb2.PredictedLength:
    return predictor_pb2.PredictedLength(low=length.low, high=length.high)


def length_from_proto(message: predictor_pb2.PredictedLength) -> TokenRange:
    """Decode a predicted answer length in tokens. Raises InvalidArgument."""
    if message.low >= message.high:
        raise InvalidArgument("predicted_length", f"[{message.low}, {message.high})", "a range with low below high")
    return TokenRange(message.low, message.high)


def layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(**same_fields(layout, _LAYOUT_FIELDS))


def layout_from_proto(message: kv_pb2.KvLayout) -> KvLayout:
    return KvLayout(**same_fields(message, _LAYOUT_FIELDS) | {"tensor_ranks": message.tensor_ranks or 1})


def endpoint_to_proto(endpoint: KvEndpoint) -> kv_pb2.KvEndpoint:
    return kv_pb2.KvEndpoint(transport=endpoint.transport, address=endpoint.address)


def ticket_to_proto(ticket: Ticket) -> kv_pb2.Ticket:
    return kv_pb2.Ticket(
        **same_fields(ticket, _TICKET_FIELDS),
        endpoints=map(endpoint_to_proto, ticket.endpoints),
        block_ids=ticket.block_ids,
        layout=layout_to_proto(ticket.layout),
        parts=[
            kv_pb2.TicketPart(
                endpoints=map(endpoint_to_proto, part.endpoints),
                rank=part.place.rank,
                layout=layout_to_proto(part.place.layout),
            )
            for part in ticket.parts
        ],
    )


@contextmanager
def sent_in_answer(what: str) -> Iterator[None]:
    """Convert InvalidArgument, raised while decoding a response, to Unavailable: the fault is the responder's. what:
    name of the response in the error."""
    try:
        yield
    except InvalidArgument as error:
        raise Unavailable(f"{what} is of no use: {error}") from error


@sent_in_answer("the instance's ticket")
def ticket_from_proto(message: kv_pb2.Ticket) -> Ticket:
    """Decode a ticket, a decode instance's permission to push KV to it. Raises Unavailable if it is invalid."""
    require_seconds("ticket.expires_in_s", message.expires_in_s, least_s=-DAY_S)
    return Ticket(
        **same_fields(message, _TICKET_FIELDS),
        endpoints=tuple(KvEndpoint(each.transport, each.address) for each in message.endpoints),
        block_ids=tuple(message.block_ids),
        layout=layout_from_proto(message.layout),
        parts=tuple(
            TicketPart(
                PartPlace(part.rank, layout_from_proto(part.layout)),
                tuple(KvEndpoint(each.transport, each.address) for each in part.endpoints),
            )
            for part in message.parts
        ),
    )


def record_to_proto(record: InstanceRecord) -> cluster_pb2.InstanceRecord:
    return cluster_pb2.InstanceRecord(
        **same_fields(record, _RECORD_FIELDS),
        role=_ROLE_TO_PROTO[record.role],
        layout=layout_to_proto(record.layout) if record.layout is not None else None,
        kv_endpoints=map(endpoint_to_proto, record.kv_endpoints),
        phases=phases_to_proto(record.phases),
    )


def record_from_proto(message: cluster_pb2.InstanceRecord) -> InstanceRecord:
    """Decode an instance's registration. Raises InvalidArgument; KeyError for an unknown role or phase."""
    return InstanceRecord(
        **same_fields(message, _RECORD_FIELDS)
        | {"lease_ttl_s": require_seconds("record.lease_ttl_s", message.lease_ttl_s)},
        role=_ROLE_FROM_PROTO[message.role],
        layout=layout_from_proto(message.layout) if message.HasField("layout") else None,
        kv_endpoints=tuple(KvEndpoint(each.transport, each.address) for each in message.kv_endpoints),
        phases=phases_from_proto(message.phases),
    )


def phase_order_to_proto(order: PhaseOrder) -> cluster_pb2.PhaseOrder:
    return cluster_pb2.PhaseOrder(fencing_token=order.fencing_token, number=order.number)


def phase_order_from_proto(message: cluster_pb2.PhaseOrder) -> PhaseOrder:
    return PhaseOrder(message.fencing_token, message.number)


def drain_way_to_proto(way: DrainWay) -> "instance_pb2.DrainWay.ValueType":
    return instance_pb2.DrainWay.Value(f"DRAIN_WAY_{way.name}")


def drain_way_from_proto(message: "instance_pb2.DrainWay.ValueType") -> DrainWay:
    """Decode how requests of a phase that ends are treated; an unknown value as MIGRATE."""
    ways = {drain_way_to_proto(way): way for way in DrainWay}
    return ways.get(message, DrainWay.MIGRATE)


def phases_to_proto(phases: Iterable[Phase]) -> "list[cluster_pb2.Phase.ValueType]":
    return [_PHASE_TO_PROTO[phase] for phase in phases]


def phases_from_proto(phases: "Iterable[cluster_pb2.Phase.ValueType]") -> tuple[Phase, ...]:
    """Decode phases. Raises KeyError for one of a newer version."""
    return tuple(_PHASE_FROM_PROTO[phase] for phase in phases)


def load_to_proto(load: InstanceLoad) -> cluster_pb2.InstanceLoad:
    counts = load.replica_counts
    return cluster_pb2.InstanceLoad(
        **same_fields(load, _LOAD_FIELDS),
        state=_STATE_TO_PROTO[load.state],
        queue_room=load.queue_room,
        partner_id=load.partner_id,
        phases=phases_to_proto(load.phases),
        ending_phases=phases_to_proto(load.ending_phases),
        phase_order=phase_order_to_proto(load.phase_order),
        replica_counts=None if counts is None else cluster_pb2.ReplicaCounts(**same_fields(counts, _COUNTS_FIELDS)),
    )


def load_from_proto(message: cluster_pb2.InstanceLoad) -> InstanceLoad:
    has_counts = message.HasField("replica_counts")
    return InstanceLoad(
        **same_fields(message, _LOAD_FIELDS),
        state=_STATE_FROM_PROTO[message.state],
        queue_room=message.queue_room if message.HasField("queue_room") else None,
        partner_id=message.partner_id if message.HasField("partner_id") else None,
        phases=phases_from_proto(message.phases),
        ending_phases=phases_from_proto(message.ending_phases),
        phase_order=phase_order_from_proto(message.phase_order),
        replica_counts=ReplicaCounts(**same_fields(message.replica_counts, _COUNTS_FIELDS)) if has_counts else None,
    )


def status_to_proto(status: ViewedInstance) -> cluster_pb2.InstanceStatus:
    return cluster_pb2.InstanceStatus(
        record=record_to_proto(status.record), load=load_to_proto(status.load), heartbeat_age_s=status.heartbeat_age_s
    )


def status_from_proto(message: cluster_pb2.InstanceStatus, known: InstanceRecord | None = None) -> InstanceStatus:
    """Decode an instance's registration and load. known: its registration, if already decoded. Raises InvalidArgument;
    KeyError for an unknown role, phase or state."""
    age_s = require_seconds("heartbeat_age_s", message.heartbeat_age_s, least_s=-DAY_S, most_s=_OLDEST_HEARTBEAT_S)
    return InstanceStatus(known or record_from_proto(message.record), load_from_proto(message.load), age_s)


def broadcast_to_proto(broadcast: LoadBroadcast) -> cluster_pb2.LoadBroadcast:
    return cluster_pb2.LoadBroadcast(
        leader_id=broadcast.leader_id,
        fencing_token=broadcast.fencing_token,
        sequence_number=broadcast.sequence_number,
        instances=[status_to_proto(status) for status in broadcast.instances],
        wire=WIRE,
    )


def fault_to_proto(fault: EngineError | EngineBroke) -> decode_pb2.EngineFault:
    """Encode the exception with which an engine failed a request, without its text."""
    if isinstance(fault, EngineError):
        return decode_pb2.EngineFault(is_final=True)
    return decode_pb2.EngineFault(suspect_until=fault.suspect_until)


def fault_from_proto(message: decode_pb2.EngineFault, reason: str) -> EngineError | EngineBroke:
    return EngineError(reason) if message.is_final else EngineBroke(reason, message.suspect_until)


def id_drawn_from(secret: bytes) -> str:
    """Return the request id that is derived from a request's secret, so only clients with the secret can send both."""
    return hashlib.sha256(b"request id " + secret).hexdigest()[:32]
