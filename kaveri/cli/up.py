"""kaveri up: a whole cluster on this machine, in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.models import KAVERI_TINY

if TYPE_CHECKING:
    from kaveri.local.config import StackConfig


def up(
    model: Annotated[
        str, typer.Option(help="Model to serve: a path, a hub id or a bundled name.", envvar="KAVERI_MODEL")
    ] = KAVERI_TINY,
    prefill: Annotated[int, typer.Option(help="Prefill instances.", min=1)] = 2,
    decode: Annotated[int, typer.Option(help="Decode instances.", min=1)] = 2,
    port: Annotated[int, typer.Option(help="Port of the router; 0: a free one.", min=0, max=65535)] = 50051,
    host: Annotated[
        str, typer.Option(help="Address of the router; 0.0.0.0: all. Everything else stays on loopback.")
    ] = "127.0.0.1",
    metrics_port: Annotated[
        int,
        typer.Option(help="Port of the router's Prometheus metrics, the instances' follow; 0: none.", min=0, max=65535),
    ] = 0,
    dtype: Annotated[str, typer.Option(help="Of weights and KV cache: auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of prompt and answer together; 0: what the model can.", min=0)
    ] = 0,
    kv_cache_memory: Annotated[
        str, typer.Option(help="KV cache of each instance: 256MiB, 2GB. Unset: the services' default.")
    ] = "",
    engine: Annotated[
        str, typer.Option(help="transformers; fake: made-up tokens, no model; timed: fake, in another machine's time.")
    ] = "transformers",
    latency_model: Annotated[
        str, typer.Option(help="Whose time the timed engine takes: a bundled name or a JSON file.")
    ] = "",
    redis_url: Annotated[
        str, typer.Option(help="Redis to use. Unset: a private one that is started and stopped too.")
    ] = "",
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for one log per process. Unset: a temporary one.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds that requests in flight get at the end.", min=0.0)
    ] = 30.0,
    start_timeout_s: Annotated[float, typer.Option(help="Seconds until everything must be ready.", min=1.0)] = 300.0,
) -> None:
    """Run a router, prefill and decode instances on this machine.

    Prints one line on stdout once a request would succeed, restarts what dies, and on Ctrl-C or SIGTERM lets requests
    in flight finish and leaves no process behind. A second Ctrl-C ends everything at once.
    """
    from kaveri.local.config import StackConfig

    config = StackConfig(
        model=model,
        prefill_count=prefill,
        decode_count=decode,
        port=port,
        host=host,
        metrics_port=metrics_port,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        engine=engine,
        latency_model=latency_model,
        redis_url=redis_url,
        # Others may have stacks on the same Redis.
        name=f"local-{secrets.token_hex(2)}" if redis_url else "",
        log_dir=log_dir,
        log_level=log_level,
        drain_timeout_s=drain_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    sys.exit(asyncio.run(_run(config)))


async def _run(config: "StackConfig") -> int:
    from rich.console import Console

    from kaveri.local.stack import LocalStack
    from kaveri.telemetry.logs import configure_logs

    # What happens is told by the stack's reports; its own logs are left for what those do not say.
    configure_logs("up", "up", "error")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None
    stopping = asyncio.Event()
    ready = False

    def end() -> None:
        # Before it is ready there is nothing to drain; afterwards only a second signal ends the draining.
        if stopping.is_set() or not ready:
            running.cancel()
        stopping.set()

    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signal_number, end)
    try:
        # Drawn on terminals only.
        spinner = console.status("loading")
        spinner.start()
        async with contextlib.AsyncExitStack() as resources:
            resources.callback(spinner.stop)
            stack = await resources.enter_async_context(LocalStack(config, console.print))
            ready = True
            spinner.stop()
            print(f"kaveri is ready at {stack.target}", flush=True)
            await stopping.wait()
    except asyncio.CancelledError:
        console.print("ended at once")
        return 130
    return 0
