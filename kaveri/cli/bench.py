"""kaveri bench: drives a cluster with a workload and reports latencies, SLO attainment and goodput."""

import asyncio
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaveri.cli import options
from kaveri.client.async_client import DEFAULT_TARGET
from kaveri.errors import ConfigError
from kaveri.loadgen.workload import (
    PlannedRequest,
    RequestLengths,
    WorkloadClass,
    draw_lengths,
    gamma_arrivals,
    plan_requests,
)

if TYPE_CHECKING:
    from rich.console import Console

    from kaveri.loadgen.driver import LoadRun
    from kaveri.loadgen.report import Slo

_WARM_UP_CONCURRENCY = 4


def bench(
    target: options.Target = DEFAULT_TARGET,
    model: options.Model = None,
    workload: Annotated[
        WorkloadClass, typer.Option(help="Light or heavy (L, H) in prefill and decode (P, D): 512 and 128 tokens.")
    ] = WorkloadClass.MIXED,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and times from a trace: Azure 2023 CSV or Mooncake JSON lines.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests to send; the first ones of a trace.", min=1)] = 100,
    rate: Annotated[
        float | None, typer.Option(help="Open loop: requests per second. With --trace: in place of its times.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Squared coefficient of variation of the gaps; 1: Poisson, more: bursts.")
    ] = 1.0,
    speed: Annotated[float, typer.Option(help="Plays a trace's times so many times as fast.")] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: so many requests at once, without a schedule.", min=1)
    ] = None,
    max_in_flight: Annotated[int, typer.Option(help="Open loop: with so many at once the next waits.", min=1)] = 1024,
    max_prompt: Annotated[int, typer.Option(help="Longest heavy prompt, in tokens.", min=1)] = 1024,
    max_output: Annotated[int, typer.Option(help="Longest heavy answer, in tokens.", min=1)] = 512,
    warm_up: Annotated[int, typer.Option(help="Requests sent before, which do not count.", min=0)] = 4,
    slo_ttft_s: Annotated[float | None, typer.Option(help="Seconds to the first token that count as met.")] = None,
    slo_tpot_s: Annotated[float | None, typer.Option(help="Seconds per further token that count as met.")] = None,
    timeout_s: options.TimeoutS = 600.0,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and prompts.", min=0)] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with a row per request, and no table.")
    ] = False,
) -> None:
    """Drive a cluster with a workload, and report TTFT, TPOT, ITL, JCT, SLO attainment and goodput.

    Prompts are random tokens; answers have exactly the length that the workload says, past the model's own end.
    Latencies count from the moment at which a request was due, and the report says when the client could not keep up.
    """
    for flag, value in (
        ("--rate", rate),
        ("--burstiness", burstiness),
        ("--speed", speed),
        ("--slo-ttft-s", slo_ttft_s),
        ("--slo-tpot-s", slo_tpot_s),
        ("--timeout-s", timeout_s),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(flag, f"is {value:g}; it must be more than 0")
    if rate is not None and concurrency is not None:
        raise ConfigError("--concurrency", "is a closed loop and --rate an open one; give one of them")
    if rate is None and concurrency is None and trace is None:
        raise ConfigError("--rate", "is not given; give --rate (open loop), --concurrency (closed loop) or --trace")
    from kaveri.loadgen.report import Slo

    rng = random.Random(seed)
    lengths, times_s = _lengths(workload, trace, requests, max_prompt, max_output, rng)
    if rate is not None:
        arrivals_s = gamma_arrivals(len(lengths), rate, burstiness, rng)
    elif concurrency is not None:
        arrivals_s = [0.0] * len(lengths)
    else:
        arrivals_s = [time_s / speed for time_s in times_s]
    planned = plan_requests(lengths, arrivals_s)
    run = _run(
        target,
        model,
        planned,
        warm_up,
        concurrency,
        max_in_flight,
        timeout_s,
        seed,
        Slo(slo_ttft_s, slo_tpot_s),
        as_json,
    )
    try:
        failed = asyncio.run(run)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(1 if failed else 0)


def _lengths(
    workload: WorkloadClass,
    trace: Path | None,
    count: int,
    max_prompt: int,
    max_output: int,
    rng: random.Random,
) -> tuple[list[RequestLengths], list[float]]:
    """Lengths, and a trace's times."""
    if trace is None:
        return draw_lengths(workload, count, rng, max_prompt, max_output), []
    from kaveri.loadgen.traces import read_trace

    entries = read_trace(trace, count)
    return [entry.lengths for entry in entries], [entry.arrival_s for entry in entries]


async def _run(
    target: str,
    model: str | None,
    planned: list[PlannedRequest],
    warm_up: int,
    concurrency: int | None,
    max_in_flight: int,
    timeout_s: float,
    seed: int,
    slo: "Slo",
    as_json: bool,
) -> bool:
    """Returns whether no request was answered."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kaveri.client.async_client import AsyncClient
    from kaveri.loadgen.driver import RequestSettings, run_closed, run_open
    from kaveri.loadgen.report import row, summarize

    async with AsyncClient(target, timeout_s=timeout_s) as client:
        served = await client.list_models()
        info = next((entry for entry in served if model is None or entry.name == model), None)
        if info is None:
            raise ConfigError("--model", f"{model!r} is not served at {target}")
        fitting = [
            entry
            for entry in planned
            if entry.lengths.prompt_tokens + entry.lengths.output_tokens <= info.max_model_len
        ]
        if not fitting:
            raise ConfigError("--max-prompt", f"no request fits into {info.name}'s {info.max_model_len} tokens")
        settings = RequestSettings(model=model, vocab_size=info.vocab_size, seed=seed, timeout_s=timeout_s)
        # Other prompts than those that count, so that no cache along the way has seen them.
        warming = RequestSettings(model=model, vocab_size=info.vocab_size, seed=seed + 1, timeout_s=timeout_s)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            if warm_up:
                bar = progress.add_task("warming up", total=warm_up)
                await run_closed(
                    client, fitting[:warm_up], warming, _WARM_UP_CONCURRENCY, lambda _: progress.advance(bar)
                )
            measured = progress.add_task("requests", total=len(fitting))
            if concurrency is None:
                run = await run_open(client, fitting, settings, max_in_flight, lambda _: progress.advance(measured))
            else:
                run = await run_closed(client, fitting, settings, concurrency, lambda _: progress.advance(measured))
    report = {"target": target, "model": info.name, "seed": seed, "too_long": len(planned) - len(fitting)}
    report |= summarize(run, slo)
    if as_json:
        print(json.dumps({**report, "rows": [row(record) for record in run.records]}))
    else:
        _show(Console(highlight=False), report, run)
    _warn(Console(stderr=True, highlight=False), report, run)
    return report["answered"] == 0


def _show(console: "Console", report: dict[str, Any], run: "LoadRun") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=f"{report['model']} at {report['target']}", title_justify="left")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for name in ("ttft_s", "tpot_s", "itl_s", "jct_s"):
        values = report[name]
        shown = (
            ["-"] * 5
            if values is None
            else [f"{values[key] * 1e3:.1f}" for key in ("mean", "p50", "p90", "p99", "max")]
        )
        table.add_row(name.removesuffix("_s").upper(), *shown)
    console.print(table)
    console.print(
        f"{report['answered']} of {report['requests']} requests answered in {run.duration_s:.1f} s: "
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} tokens/s"
    )
    if report["slo"] is not None:
        console.print(
            f"SLO met by {report['slo_attainment']:.1%}: goodput {report['goodput_requests_per_s']:.2f} requests/s"
        )


def _warn(console: "Console", report: dict[str, Any], run: "LoadRun") -> None:
    for name, count in report["errors"].items():
        reason = next(record.reason for record in run.records if record.error == name)
        console.print(f"failed: {count} with {name}, the first: {reason}", markup=False)
    if report["too_long"]:
        console.print(f"not sent: {report['too_long']} requests are longer than the model")
    client = report["client"]
    if not client["kept_schedule"]:
        late, delay = client["sent_late_s"], client["loop_delay_s"]
        console.print(
            "the client did not keep the schedule, and these latencies are partly its own: "
            f"sent late by {late['p99'] * 1e3:.0f} ms (p99), loop late by {delay['p99'] * 1e3 if delay else 0:.0f} ms"
        )
