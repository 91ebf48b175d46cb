"""kaveri status: shows the cluster as a router sees it. kaveri health: asks a server for its grpc.health.v1 status."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET

if TYPE_CHECKING:
    from rich.table import Table

    from kaveri.domain.view import ClusterView, InstanceLoad, ViewedInstance

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_PIPE_WIDTH = 240
_OF_COPIES = ("partner", "copies free/total MiB", "requests copied", "lag tokens", "resumed", "moved")


def status(
    target: options.Target = DEFAULT_TARGET,
    as_json: Annotated[bool, option("Print one JSON object, with --watch one per line.", "--json")] = False,
    watch: Annotated[bool, option("Show it again twice a second, until Ctrl-C.", "--watch")] = False,
) -> None:
    """Show the instances: role, phases served now, state, load, KV blocks and last heartbeat.

    A router with a keys file asks for a certificate, or for an admin key in KAVERI_API_KEY.
    """
    try:
        asyncio.run(_show(target, as_json, watch))
    except KeyboardInterrupt:
        return


def health(
    target: Annotated[str, option("Server to ask, HOST:PORT.", envvar="KAVERI_TARGET")] = "127.0.0.1:50051",
    timeout_s: Annotated[float, option("Seconds to wait for an answer.")] = 2.0,
) -> None:
    """Exit with status 0 when the server says SERVING, else with 1."""
    from kaveri.rpc.server import check_health

    serving = asyncio.run(check_health(target, timeout_s))
    print("SERVING" if serving else "NOT_SERVING")
    sys.exit(0 if serving else 1)


async def _show(target: str, as_json: bool, watch: bool) -> None:
    from contextlib import nullcontext

    from rich.console import Console
    from rich.live import Live

    from kaveri.cli.routers import cluster_view, first_answer, open_channels

    console = Console(highlight=False)
    if not console.is_terminal:
        # Piped output has no terminal width: print the whole table.
        console.width = _PIPE_WIDTH
    async with open_channels(target) as channels:
        view = await first_answer(channels, lambda _, channel: cluster_view(channel, _TIMEOUT_S))
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
                view = await first_answer(channels, lambda _, channel: cluster_view(channel, _TIMEOUT_S))


def _phases(shown: "ViewedInstance") -> str:
    from kaveri.domain.view import phases_now

    served = "+".join(f"{phase} (ends)" if phase in shown.load.ending_phases else phase for phase in phases_now(shown))
    return f"{served}; {shown.load.phase_fault}" if shown.load.phase_fault else served


def _of_copies(load: "InstanceLoad") -> tuple[str, ...]:
    memory = f"{load.replica_free_bytes >> 20}/{load.replica_total_bytes >> 20}" if load.replica_total_bytes else ""
    counts, partner = load.replica_counts, load.partner_id or ""
    if counts is None:
        return partner, memory, "", "", "", ""
    copied = f"{counts.owned}/{counts.owned + counts.unprotected}"
    return partner, memory, copied, str(counts.lag_tokens), str(counts.resumed), str(counts.moved)


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

    away = "" if view.store_connected else "; Redis is away: this is the last view known"
    table = Table(title=f"{target}{away}", title_justify="left")
    for name in ("instance", "role", "phases", "state", "model", "address"):
        table.add_column(name)
    # Only if some instance holds copies of others' requests.
    replicates = any(shown.load.replica_total_bytes for shown in view.instances.values())
    copies = _OF_COPIES if replicates else ()
    for name in ("waiting", "running", "queued tokens", "KV blocks free/total", *copies, "heartbeat"):
        table.add_column(name, justify="right")
    for instance_id, shown in (*sorted(view.instances.items()), *sorted(view.incompatible.items())):
        record, load = shown.record, shown.load
        table.add_row(
            instance_id,
            record.role,
            _phases(shown),
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
