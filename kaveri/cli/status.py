"""kaveri status: the cluster as a router sees it."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.client.defaults import DEFAULT_TARGET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from kaveri.domain.view import ClusterView, InstanceLoad
    from kaveri.v1 import cluster_pb2_grpc

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_PIPE_WIDTH = 240
_OF_COPIES = ("copies free/total MiB", "requests copied", "lag tokens", "resumed", "moved")


def status(
    target: options.Target = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with --watch one per line.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again twice a second, until Ctrl-C.")] = False,
) -> None:
    """Show the instances: role, phases served now, state, load, KV blocks and last heartbeat.

    A router with a keys file asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    try:
        asyncio.run(_show(target, as_json, watch))
    except KeyboardInterrupt:
        # The end of --watch.
        return


async def _show(target: str, as_json: bool, watch: bool) -> None:
    from contextlib import AsyncExitStack, nullcontext

    from rich.console import Console
    from rich.live import Live

    from kaveri.client.targets import check_targets
    from kaveri.rpc.server import open_channel
    from kaveri.v1 import cluster_pb2_grpc

    console = Console(highlight=False)
    if not console.is_terminal:
        # Piped output has no terminal width: print the whole table.
        console.width = _PIPE_WIDTH
    async with AsyncExitStack() as channels:
        stubs = {
            one: cluster_pb2_grpc.ClusterServiceStub(await channels.enter_async_context(open_channel(one)))
            for one in check_targets(options.targets_of(target))
        }
        view = await _view(stubs)
        with Live(console=console, auto_refresh=False) if watch and not as_json else nullcontext() as live:
            while True:
                if as_json:
                    print(json.dumps(_as_json(view)), flush=True)
                elif live is not None:
                    live.update(_as_table(view, target), refresh=True)
                else:
                    console.print(_as_table(view, target))
                if not watch:
                    return
                await asyncio.sleep(_INTERVAL_S)
                view = await _view(stubs)


async def _view(stubs: "Mapping[str, cluster_pb2_grpc.ClusterServiceAsyncStub]") -> "ClusterView":
    """Return the view of the first router that answers. Raises KaveriError when none does."""
    from grpc import aio

    from kaveri.client.api_key import find_api_key, key_metadata
    from kaveri.domain.view import ClusterView
    from kaveri.errors import KaveriError
    from kaveri.v1 import cluster_pb2
    from kaveri.wire.messages import status_from_proto
    from kaveri.wire.status import error_of

    failure: KaveriError | None = None
    metadata = key_metadata(find_api_key(None))
    for target, stub in stubs.items():
        try:
            answer = await stub.GetClusterView(
                cluster_pb2.GetClusterViewRequest(), timeout=_TIMEOUT_S, metadata=metadata
            )
        except aio.AioRpcError as error:
            failure = failure or error_of(error, peer=target)
            continue
        shown, incompatible = (
            {one.record.instance_id: one for one in map(status_from_proto, statuses)}
            for statuses in (answer.instances, answer.incompatible)
        )
        return ClusterView(shown, answer.store_connected, incompatible)
    assert failure is not None
    raise failure


def _of_copies(load: "InstanceLoad") -> tuple[str, ...]:
    """Return a cell for each of _OF_COPIES."""
    memory = f"{load.replica_free_bytes >> 20}/{load.replica_total_bytes >> 20}" if load.replica_total_bytes else ""
    counts = load.replica_counts
    if counts is None:
        return memory, "", "", "", ""
    copied = f"{counts.owned}/{counts.owned + counts.unprotected}"
    return memory, copied, str(counts.lag_tokens), str(counts.resumed), str(counts.moved)


def _as_json(view: "ClusterView") -> dict[str, object]:
    import dataclasses

    from kaveri.domain.view import status_now

    instances, incompatible = (
        [dataclasses.asdict(status_now(shown[instance_id])) for instance_id in sorted(shown)]
        for shown in (view.instances, view.incompatible)
    )
    return {"store_connected": view.store_connected, "instances": instances, "incompatible": incompatible}


def _as_table(view: "ClusterView", target: str) -> "Table":
    from rich.table import Table

    from kaveri.domain.view import phases_now

    away = "" if view.store_connected else "; Redis is away: this is the last view known"
    table = Table(title=f"{target}{away}", title_justify="left")
    for name in ("instance", "role", "phases", "state", "model", "address"):
        table.add_column(name)
    # Only where some instance holds copies of others' requests.
    replicates = any(shown.load.replica_total_bytes for shown in view.instances.values())
    copies = _OF_COPIES if replicates else ()
    for name in ("waiting", "running", "queued tokens", "KV blocks free/total", *copies, "heartbeat"):
        table.add_column(name, justify="right")
    for instance_id, shown in (*sorted(view.instances.items()), *sorted(view.incompatible.items())):
        record, load = shown.record, shown.load
        table.add_row(
            instance_id,
            record.role,
            "+".join(phases_now(shown)),
            load.state if instance_id in view.instances else f"ignored: version {record.version}",
            record.model,
            record.address,
            str(load.waiting_requests),
            str(load.running_requests),
            str(load.queued_prefill_tokens),
            f"{load.free_blocks}/{load.total_blocks}" if load.total_blocks else "",
            *(_of_copies(load) if replicates else ()),
            f"{shown.heartbeat_age_s * 1000:.0f} ms ago",
        )
    return table
