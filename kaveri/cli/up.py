"""kaveri up: a whole cluster on this machine, in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import enum
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cluster.store import DEFAULT_CLUSTER
from kaveri.config.sources import Given, find_given
from kaveri.errors import ConfigError
from kaveri.models import KAVERI_TINY, bundled_predictor
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.placement import DecodePlacementPolicy

if TYPE_CHECKING:
    from kaveri.local.config import StackConfig

_POLICIES = "Policies"
_REDIS_VARIABLES = {"redis_url": "KAVERI_REDIS_URL", "redis_url_file": "KAVERI_REDIS_URL_FILE"}


class _Prediction(enum.StrEnum):
    PARALLEL = "parallel"
    SEQUENTIAL = "sequential"
    OFF = "off"


def up(
    model: Annotated[
        str, typer.Option(help="Model to serve: a path, a hub id or a bundled name.", envvar="KAVERI_MODEL")
    ] = KAVERI_TINY,
    prefill: Annotated[int | None, typer.Option(help="Prefill instances; 2 by default.", min=1)] = None,
    decode: Annotated[int | None, typer.Option(help="Decode instances; 2 by default.", min=1)] = None,
    colocated: Annotated[
        int, typer.Option(help="Instances that do both phases, in place of prefill and decode instances.", min=0)
    ] = 0,
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
        str,
        typer.Option(
            help="transformers; vllm; fake: made-up tokens, no model; timed: fake, in another machine's time."
        ),
    ] = "transformers",
    engine_args: Annotated[
        str, typer.Option(help="vLLM's own options for the vllm engine: a JSON object, or a YAML or JSON file.")
    ] = "",
    latency_model: Annotated[
        str, typer.Option(help="Whose time the timed engine takes: a bundled name or a JSON file.")
    ] = "",
    profile: Annotated[
        str, typer.Option(help="File made by `kaveri profile`: chunk size for this model and machine.")
    ] = "",
    predictor: Annotated[
        str, typer.Option(help="Length predictor: a folder, none, or auto (the bundled model's own).")
    ] = "auto",
    predictors: Annotated[int, typer.Option(help="Predictor processes, where there is a predictor.", min=1)] = 1,
    prediction: Annotated[
        _Prediction | None, typer.Option(help="Predict beside prefill or before it.", rich_help_panel=_POLICIES)
    ] = None,
    prefill_policy: Annotated[
        OrderingPolicy | None, typer.Option(help="Order of waiting prompts.", rich_help_panel=_POLICIES)
    ] = None,
    prefill_sched_batch: Annotated[
        int | None, typer.Option(help="Prompts that are ordered together.", min=1, rich_help_panel=_POLICIES)
    ] = None,
    decode_placement: Annotated[
        DecodePlacementPolicy | None,
        typer.Option(help="How a decode instance is chosen.", rich_help_panel=_POLICIES),
    ] = None,
    decode_policy: Annotated[
        AdmissionPolicy | None,
        typer.Option(help="When a request joins the running batch.", rich_help_panel=_POLICIES),
    ] = None,
    redis_url: Annotated[
        str,
        typer.Option(
            help="Redis to use, better by KAVERI_REDIS_URL or KAVERI_REDIS_URL_FILE where it has a password. Unset: a "
            "private one that is started and stopped too."
        ),
    ] = "",
    cluster_name: Annotated[
        str, typer.Option(help="Clusters of other names can share one Redis.", envvar="KAVERI_CLUSTER_NAME")
    ] = DEFAULT_CLUSTER,
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
    from kaveri.rpc.process import cluster_name_text

    if colocated and (prefill is not None or decode is not None):
        raise ConfigError("--colocated", "these instances do both phases; leave --prefill and --decode out")
    variables = {name: Given(os.environ[v], v) for name, v in _REDIS_VARIABLES.items() if v in os.environ}
    found = find_given("redis_url", [variables], is_secret=True)
    redis_url = redis_url or (found.text if found else "")
    for flag, value in (("--dtype", dtype), ("--device", device), ("--engine", engine), ("--predictor", predictor)):
        if not value.strip():
            raise ConfigError(flag, "is empty")
    try:
        cluster_name_text(cluster_name)
    except ValueError as error:
        raise ConfigError("--cluster-name", str(error)) from error
    profiled = _given("--profile", profile or None)
    ordering = (
        *_given("--prefill-policy", prefill_policy),
        *_given("--prefill-sched-batch", prefill_sched_batch),
        *_given("--prediction", prediction),
    )
    admission = _given("--decode-policy", decode_policy)
    config = StackConfig(
        model=model,
        prefill_count=0 if colocated else prefill or 2,
        decode_count=0 if colocated else decode or 2,
        colocated_count=colocated,
        predictor=_predictor_of(model, engine) if predictor == "auto" else "" if predictor == "none" else predictor,
        predictor_count=predictors,
        prefill_flags=(*ordering, *_given("--decode-placement", decode_placement), *profiled),
        decode_flags=(*admission, *profiled),
        colocated_flags=(*ordering, *admission, *profiled),
        port=port,
        host=host,
        metrics_port=metrics_port,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        kv_cache_memory=kv_cache_memory,
        engine=engine,
        engine_args=engine_args,
        latency_model=latency_model,
        redis_url=redis_url,
        cluster_name=cluster_name,
        # Others may have stacks in the same cluster.
        name=f"local-{secrets.token_hex(2)}" if redis_url else "",
        log_dir=log_dir,
        log_level=log_level,
        drain_timeout_s=drain_timeout_s,
        start_timeout_s=start_timeout_s,
    )
    sys.exit(asyncio.run(_run(config)))


def _given(flag: str, value: object | None) -> tuple[str, ...]:
    """A flag for a service; nothing where none was given, so that the service's variables and defaults hold."""
    return () if value is None else (flag, str(value))


def _predictor_of(model: str, engine: str) -> str:
    """The predictor that is bundled with a model; empty when there is none, or when the engine makes tokens up."""
    return (bundled_predictor(model) or "") if engine in ("transformers", "vllm") else ""


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
