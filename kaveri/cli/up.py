"""kaveri up: runs a whole cluster on this machine, in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaveri.cli.options import option, port_option
from kaveri.cluster.store import DEFAULT_CLUSTER
from kaveri.config.presets import Preset, PresetSettings, preset_settings
from kaveri.config.services import UP_SECTION, ServiceKind
from kaveri.config.settings import ReadSettings, read_settings
from kaveri.config.sources import (
    CONFIG_FLAG,
    CONFIG_VARIABLE,
    FILE_SUFFIX,
    Given,
    Names,
    SettingNames,
    find_given,
    flag_of,
    read_file,
    variable_of,
)
from kaveri.errors import ConfigError
from kaveri.extras import lacks, missing_modules
from kaveri.models import KAVERI_TINY, bundled_predictor

if TYPE_CHECKING:
    from kaveri.local.config import StackConfig
    from kaveri.local.service_flags import ServiceFlags
    from kaveri.policy.flipping import FlipRules
    from kaveri.security.tls_files import TlsFiles

_GATEWAY_PACKAGES = ("starlette", "uvicorn", "h11")
_GATEWAY_PORT = 8000
_FILE_KEY = "kaveri.config"


def _read_config(context: typer.Context, path: str) -> str:
    """Callback of --config: use section [up] of the file at `path` as defaults of the options. Raises ConfigError."""
    if path:
        from kaveri.programs import setting_sections

        options = {name for parameter in context.command.params if (name := parameter.name) is not None}
        settings = SettingNames(frozenset(options - {"context", "config"}), frozenset({"redis_url"}))
        names = Names("kaveri up", settings, setting_sections)
        given = read_file(Given(path, CONFIG_FLAG), names)
        context.meta[_FILE_KEY] = given
        secrets_given = {"redis_url", "redis_url" + FILE_SUFFIX}
        context.default_map = {name: found.text for name, found in given.items() if name not in secrets_given}
    return path


def up(
    context: typer.Context,
    config: Annotated[
        str,
        option(
            "TOML file of settings, or a plan of `kaveri plan`: section [up] for this command, all others for the "
            "services.",
            "--config",
            "--plan",
            envvar=CONFIG_VARIABLE,
            callback=_read_config,
            is_eager=True,
        ),
    ] = "",
    preset: Annotated[Preset | None, option("A paper's system: policies and roles, unless given otherwise.")] = None,
    model: Annotated[str, option("Model to serve: path, hub id or bundled name.", envvar="KAVERI_MODEL")] = KAVERI_TINY,
    prefill: Annotated[int | None, option("Prefill instances; 2 by default.", min=1)] = None,
    decode: Annotated[int | None, option("Decode instances; 2 by default.", min=1)] = None,
    colocated: Annotated[int, option("Instances of both phases, instead of prefill and decode instances.", min=0)] = 0,
    dynamic: Annotated[
        int,
        option(
            "Instances that change their phase as --flip-policy decides, instead of fixed ones; half start with each. "
            "Set --slo-ttft-s and --slo-tpot-s.",
            min=0,
        ),
    ] = 0,
    pairs: Annotated[
        bool,
        option(
            "Keep each request's KV on the instance that it came from, as its copy: --replication pair --replica-place "
            "pool. With vLLM copies are in host memory.",
            "--pairs",
        ),
    ] = False,
    routers: Annotated[int, option("Routers; when one dies, clients that know others go on through them.", min=1)] = 1,
    port: Annotated[int, port_option("Port of the router, the others' follow; 0: free ones.")] = 50051,
    gateways: Annotated[
        int | None, option("Gateways for OpenAI's HTTP API; one by default where kaveri[gateway] is installed.", min=0)
    ] = None,
    gateway_port: Annotated[
        int | None,
        port_option(
            "Port of the gateway, the others' follow; 0: free ones. 8000 by default, with --port 0 a free one."
        ),
    ] = None,
    public_port: Annotated[
        int, port_option("Port of the router for clients with keys of --keys-file, the others' follow; 0: none.")
    ] = 0,
    host: Annotated[str, option("Address of routers and gateways; 0.0.0.0: all. All others: loopback.")] = "127.0.0.1",
    metrics_port: Annotated[int, port_option("Port of the router's metrics, the instances' follow; 0: none.")] = 0,
    predictor: Annotated[str, option("Length predictor: a folder, none, or auto (the bundled model's own).")] = "auto",
    predictors: Annotated[int, option("Predictor processes, where there is a predictor.", min=1)] = 1,
    redis_url: Annotated[
        str,
        option(
            "Redis to use, better by KAVERI_REDIS_URL or a file where it has a password. Unset: a private one "
            "that is started and stopped too."
        ),
    ] = "",
    redis_url_file: Annotated[str, option("File that holds the URL of the Redis to use.")] = "",
    cluster_name: Annotated[
        str, option("Clusters of other names can share one Redis.", envvar="KAVERI_CLUSTER_NAME")
    ] = DEFAULT_CLUSTER,
    log_dir: Annotated[Path | None, option("Folder for one log per process. Unset: a temporary one.")] = None,
    drain_timeout_s: Annotated[float, option("Seconds that requests in flight get at the end.", min=0.0)] = 30.0,
    start_timeout_s: Annotated[float, option("Seconds until everything must be ready.", min=1.0)] = 300.0,
) -> None:
    """Run routers, prefill and decode instances on this machine.

    Prints one line on stdout, with the routers' addresses, once a request would succeed. Restarts what dies. On Ctrl-C
    or SIGTERM it lets requests in flight finish and leaves no process behind. A second Ctrl-C ends everything at once.
    """
    from kaveri.local.config import ListeningPorts, StackConfig, Supervision
    from kaveri.local.service_flags import read_service_flags
    from kaveri.rpc.process import cluster_name_text
    from kaveri.rpc.tls import RpcTls, use_tls

    prefill, decode = _one_kind(prefill, decode, colocated, dynamic)
    wanted = None if preset is None else preset_settings(preset)
    if preset is not None and wanted is not None:
        asked, own = {"prefill": prefill, "decode": decode, "colocated": colocated}, wanted.of(UP_SECTION)
        wanted.require_roles(preset, [name for name, count in asked.items() if count])
        prefill, decode, colocated = (count or int(own.get(name, 0)) for name, count in asked.items())
        source = context.get_parameter_source("predictor")
        if source is not None and source.name == "DEFAULT":
            predictor = str(own.get("predictor", predictor))
    redis_url = _redis_url(context, redis_url, redis_url_file)
    if not predictor.strip():
        raise ConfigError("--predictor", "is empty")
    try:
        cluster_name_text(cluster_name)
    except ValueError as error:
        raise ConfigError("--cluster-name", str(error)) from error
    counts: dict[ServiceKind, int] = {
        ServiceKind.GATEWAY: _gateway_count(gateways),
        ServiceKind.ROUTER: routers,
        ServiceKind.PREFILL: 0 if colocated else prefill or 2,
        ServiceKind.DECODE: 0 if colocated else decode or 2,
        ServiceKind.COLOCATED: colocated,
        ServiceKind.PREDICTOR: 0 if predictor == "none" else predictors,
    }
    running = [role for role, count in counts.items() if count]
    own_flags = [flag for parameter in context.command.params for flag in parameter.opts]
    flags = read_service_flags(context.args, running, own_flags)
    if wanted is not None:
        flags = _with_preset(flags, running, config, wanted)
        print(f"preset {preset}: without {'; '.join(wanted.left_out)}", file=sys.stderr)
    engine, tls = _check_settings(flags, running, config)
    if dynamic:
        counts |= _first_counts(_read_settings(ServiceKind.ROUTER, flags, config).config.flip_rules, dynamic)
    if tls is not None:
        use_tls(RpcTls(tls))
    stack = StackConfig(
        model=model,
        counts=counts,
        flags=flags.of_role,
        settings=_settings(flags, predictor=_predictor_of(predictor, model, engine), pairs=pairs, engine=engine),
        config_file=config,
        redis_url=redis_url,
        cluster_name=cluster_name,
        # Other users may have stacks in the same cluster.
        name=f"local-{secrets.token_hex(2)}" if redis_url else "",
        listening=ListeningPorts(
            host=host,
            port=port,
            gateway_port=(_GATEWAY_PORT if port else 0) if gateway_port is None else gateway_port,
            public_port=public_port,
            metrics_port=metrics_port,
        ),
        supervision=Supervision(log_dir=log_dir, drain_timeout_s=drain_timeout_s, start_timeout_s=start_timeout_s),
    )
    sys.exit(asyncio.run(_run(stack)))


def _one_kind(prefill: int | None, decode: int | None, colocated: int, dynamic: int) -> tuple[int | None, int | None]:
    """Return the numbers of prefill and decode instances; None: the default. Raises ConfigError for several kinds."""
    if colocated and (prefill is not None or decode is not None):
        raise ConfigError("--colocated", "these instances do both phases; leave --prefill and --decode out")
    if not dynamic:
        return prefill, decode
    if colocated or prefill is not None or decode is not None:
        raise ConfigError("--dynamic", "these instances do either phase; leave all other instances out")
    # Both phases have an instance; how many of each, the rules say.
    return 1, 1


def _gateway_count(asked: int | None) -> int:
    """Return the number of HTTP gateways (None: one if possible). Raises ConfigError if their packages are missing."""
    missing = missing_modules(*_GATEWAY_PACKAGES)
    if not missing:
        return 1 if asked is None else asked
    reason = lacks(", ".join(missing), "gateway")
    if asked:
        raise ConfigError("--gateways", reason)
    if asked is None:
        print(f"no HTTP gateway: {reason}", file=sys.stderr)
    return 0


def _redis_url(context: typer.Context, url: str, file: str) -> str:
    """Return the Redis URL from flags, else variables, else the settings file; empty: start a private Redis."""
    in_file: dict[str, Given] = context.meta.get(_FILE_KEY, {})
    flags = {"redis_url": url, "redis_url_file": file}
    sources = [
        {name: Given(text, flag_of(name)) for name, text in flags.items() if text and name not in in_file},
        {name: Given(os.environ[key], key) for name in flags if (key := variable_of(name)) in os.environ},
        in_file,
    ]
    found = find_given("redis_url", sources, is_secret=True)
    return found.text if found is not None else ""


def _with_preset(
    flags: "ServiceFlags", running: Sequence[ServiceKind], config_file: str, wanted: PresetSettings
) -> "ServiceFlags":
    """Add the settings of a preset where no flag, variable or file gives them. Raises ConfigError."""
    of_role = dict(flags.of_role)
    for role in running:
        given = _read_settings(role, flags, config_file).given
        added = {name: value for name, value in wanted.of(role).items() if name not in given}
        words = [text for name, value in added.items() for text in (flag_of(name), str(value))]
        of_role[role] = (*of_role.get(role, ()), *words)
    return replace(flags, of_role=of_role)


def _check_settings(
    flags: "ServiceFlags", running: Sequence[ServiceKind], config_file: str
) -> "tuple[str, TlsFiles | None]":
    """Raise ConfigError for settings that a service would refuse. Returns the instances' engine, and TLS files."""
    engine, tls = "", None
    for role in running:
        read = _read_settings(role, flags, config_file)
        engine = getattr(read.config, "engine", engine)
        tls = read.config.tls
    return engine, tls


def _read_settings(role: ServiceKind, flags: "ServiceFlags", config_file: str) -> ReadSettings[Any]:
    """Read a service's settings as the service itself will. Raises ConfigError."""
    from kaveri.local.service_flags import roles_of
    from kaveri.programs import setting_sections, settings_types

    shared = [text for name, value in flags.shared.items() if role in roles_of(name) for text in (flag_of(name), value)]
    own = flags.of_role.get(role, ())
    named = (CONFIG_FLAG, config_file) if config_file else ()
    words = [*named, *shared, *own]
    try:
        return read_settings(settings_types()[role], f"kaveri {role}", words, os.environ, setting_sections)
    except ConfigError as error:
        field = error.field
        raise ConfigError(f"--{role}.{field[2:]}" if field in own else field, error.reason) from error


def _first_counts(rules: "FlipRules", instances: int) -> dict[ServiceKind, int]:
    """Return how many of so many dynamic instances start with each phase. Raises ConfigError if the rules never change
    a phase of them."""
    from kaveri.policy.flipping import FlipPolicy, first_prefill_count

    if rules.policy is FlipPolicy.NONE:
        raise ConfigError("--dynamic", "needs a flip policy; set --slo-ttft-s and --slo-tpot-s, or --flip-policy idle")
    if instances < (least := rules.min_prefill + rules.min_decode):
        raise ConfigError("--dynamic", f"is {instances}; --min-prefill and --min-decode together are {least}")
    prefills = first_prefill_count(instances, rules)
    return {ServiceKind.PREFILL: prefills, ServiceKind.DECODE: instances - prefills}


def _settings(flags: "ServiceFlags", *, predictor: str, pairs: bool, engine: str) -> dict[str, object]:
    """Return the settings that services share. pairs: --pairs, which flags may contradict."""
    paired = {"replication": "pair", "replica_place": "host" if engine == "vllm" else "pool"} if pairs else {}
    return {**paired, **flags.shared, "predictor": predictor}


def _predictor_of(asked: str, model: str, engine: str) -> str:
    """Return the length predictor to run; empty: none. auto: the model's bundled one, unless the engine is a fake."""
    if asked == "auto":
        return (bundled_predictor(model) or "") if engine in ("transformers", "vllm") else ""
    return "" if asked == "none" else asked


async def _run(config: "StackConfig") -> int:
    from rich.console import Console

    from kaveri.local.config import exposed_ports
    from kaveri.local.stack import LocalStack
    from kaveri.telemetry.logs import configure_logs

    # Users read the stack's reports; logs are for details.
    configure_logs("up", "up", "error")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    loop = asyncio.get_running_loop()
    running = asyncio.current_task()
    assert running is not None
    stopping = asyncio.Event()
    ready = False

    def end() -> None:
        # Before readiness there is nothing to drain; afterwards only a second signal ends the draining.
        if stopping.is_set() or not ready:
            running.cancel()
        stopping.set()

    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(signal_number, end)
    try:
        spinner = console.status("loading")
        spinner.start()
        async with contextlib.AsyncExitStack() as resources:
            resources.callback(spinner.stop)
            stack = await resources.enter_async_context(LocalStack(config, console.print))
            ready = True
            spinner.stop()
            for address in stack.http_targets:
                console.print(f"OpenAI's HTTP API is at http://{address}/v1")
            for text in exposed_ports(config, os.environ):
                console.print(f"WARNING: open to other machines: {text}; see docs/security.md", style="bold yellow")
            print(f"kaveri is ready at {','.join(stack.targets)}", flush=True)
            await stopping.wait()
    except asyncio.CancelledError:
        console.print("ended at once")
        return 130
    return 0
