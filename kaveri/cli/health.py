"""kaveri health: asks a server for its grpc.health.v1 status, as container health checks do."""

import asyncio
import sys
from typing import Annotated

import typer


def health(
    target: Annotated[str, typer.Option(help="Server to ask, HOST:PORT.", envvar="KAVERI_TARGET")] = "127.0.0.1:50051",
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
) -> None:
    """Exit with status 0 when the server says SERVING, else with 1."""
    from kaveri.rpc.server import check_health

    serving = asyncio.run(check_health(target, timeout_s))
    print("SERVING" if serving else "NOT_SERVING")
    sys.exit(0 if serving else 1)
