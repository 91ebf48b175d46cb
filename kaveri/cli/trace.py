"""kaveri trace: shows the time of one request, by part, over all processes."""

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET

if TYPE_CHECKING:
    from kaveri.v1 import cluster_pb2

_TIMEOUT_S = 5.0
_WIDTH = 40


@dataclass(frozen=True, slots=True)
class TimedPart:
    """Part of a request's time, such as its prefill on one instance, in seconds after its arrival at the router."""

    where: str
    what: str
    begin_s: float
    end_s: float


def trace(
    request_id: Annotated[str, typer.Argument(help="Its id: `request_id` of an answer, X-Request-ID over HTTP.")],
    target: options.Target = DEFAULT_TARGET,
    as_json: Annotated[bool, option("Print one JSON object.", "--json")] = False,
) -> None:
    """Show where a request spent its time, over all processes.

    Routers know the requests that they serve and the last 1,024 that they served. All routers of the cluster are asked.
    A router with a keys file asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    account = asyncio.run(_find(request_id, target))
    if as_json:
        from google.protobuf.json_format import MessageToDict

        print(json.dumps(MessageToDict(account, preserving_proto_field_name=True)))
        return
    print(render(request_id, account))


def time_line(account: "cluster_pb2.GetRequestAccountResponse") -> list[TimedPart]:
    """Divide a request's time into parts, ordered by start. If it was placed on instances several times, shows the last
    time that included prefill. A KV push overlaps prefill."""
    timing, parts = account.timing, list[TimedPart]()
    sent = [step.at_s for step in account.steps if step.event.startswith("attempt ") and " to " in step.event]
    sent_s = max(sent, default=timing.router_s)
    prefill, decode = timing.prefill_instance_id, timing.decode_instance_id

    def add(where: str, what: str, begin_s: float, seconds: float) -> None:
        if seconds > 0:
            parts.append(TimedPart(where, what, begin_s, begin_s + seconds))

    add(account.router_instance_id, "until it was sent", 0.0, sent_s)
    began_s = sent_s + timing.prefill_queue_s
    first_s = began_s + timing.prefill_s
    landed_s = first_s + timing.kv_tail_s
    add(prefill, "queue", sent_s, timing.prefill_queue_s)
    add(prefill, "prompt", began_s, timing.prefill_s)
    add(prefill, f"push by {timing.kv_transport}", landed_s - timing.kv_transfer_s, timing.kv_transfer_s)
    # Counted from the end: a later session, or the holder of a copy, has not seen the beginning.
    decode_began_s = timing.e2e_s - timing.decode_s
    if timing.decode_s:
        add(decode, "waits for the batch", decode_began_s - timing.decode_queue_s, timing.decode_queue_s)
    add(decode, "decode", decode_began_s, timing.decode_s)
    return sorted(parts, key=lambda part: part.begin_s)


def render(request_id: str, account: "cluster_pb2.GetRequestAccountResponse") -> str:
    timing = account.timing
    parts = time_line(account)
    whole_s = max([timing.e2e_s, *(part.end_s for part in parts)], default=0.0)
    ended = (
        f"{account.outcome}, {_ago(account.ago_s)} ago" if account.outcome else f"in flight for {account.ago_s:.1f} s"
    )
    lines = [
        f"{request_id}: {ended}; {account.prompt_tokens} prompt tokens, {account.completion_tokens} generated",
        f"first token after {_ms(timing.ttft_s)}, last after {_ms(timing.e2e_s)}",
    ]
    if account.session:
        lines.append(f"the client had re-attached {account.session} times; this is the last session")
    if account.trace_id:
        lines.append(f"trace {account.trace_id}")
    lines += [f"{_ms(step.at_s):>12}  {step.event}" for step in account.steps]
    width = max((len(part.where) for part in parts), default=0)
    for part in parts:
        # Parts that began before the last session are cut off at the left.
        first = max(0, round(_WIDTH * part.begin_s / whole_s))
        bar = " " * first + "█" * max(1, round(_WIDTH * part.end_s / whole_s) - first)
        took = _ms(part.end_s - part.begin_s)
        lines.append(f"{_ms(part.begin_s):>12}  {part.where:<{width}}  {bar:<{_WIDTH + 1}} {took:>10}  {part.what}")
    if timing.stall_s:
        lines.append(
            f"stood still for {_ms(timing.stall_s)} after losses: {timing.resumes} resumes, "
            f"{timing.recomputed_tokens} tokens computed again"
        )
    return "\n".join(lines)


async def _find(request_id: str, target: str) -> "cluster_pb2.GetRequestAccountResponse":
    """Ask all routers for their record of a request; return the client's latest connection's. Raises KaveriError."""
    from grpc import aio

    from kaveri.cli.routers import call_options
    from kaveri.client.targets import check_targets
    from kaveri.errors import KaveriError, RequestNotFound
    from kaveri.rpc.server import open_channel
    from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
    from kaveri.wire.status import error_of

    failure: KaveriError | None = None
    found: list[cluster_pb2.GetRequestAccountResponse] = []
    asked: set[str] = set()
    targets = list(check_targets(options.targets_of(target)))
    while targets:
        one = targets.pop(0)
        if one in asked:
            continue
        asked.add(one)
        async with open_channel(one) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            try:
                view = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), **call_options(_TIMEOUT_S))
                targets += [
                    each.record.address for each in view.instances if each.record.role == cluster_pb2.ROLE_ROUTER
                ]
                request = cluster_pb2.GetRequestAccountRequest(request_id=request_id)
                found.append(await stub.GetRequestAccount(request, **call_options(_TIMEOUT_S)))
            except aio.AioRpcError as error:
                raised = error_of(error, peer=one)
                if not isinstance(raised, RequestNotFound):
                    failure = failure or raised
    if found:
        return max(found, key=lambda account: account.session)
    raise failure or RequestNotFound(request_id)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
