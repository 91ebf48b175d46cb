"""kaveri bench: drives a cluster with a workload and reports latencies, SLO attainment, goodput and resource time."""

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET
from kaveri.errors import ConfigError
from kaveri.workload.requests import RequestLengths, Schedule, Workload, WorkloadClass, draw_lengths

if TYPE_CHECKING:
    from rich.progress import Progress

    from kaveri.client.answer import ModelInfo
    from kaveri.client.async_client import AsyncClient
    from kaveri.loadgen.driver import LoadRun, LoadTarget, RequestSettings
    from kaveri.loadgen.report import Slo
    from kaveri.workload.goodput import GoodputSearch
    from kaveri.workload.prompts import RequestPrompt
    from kaveri.workload.resource_time import Phases

_WARM_UP_CONCURRENCY = 4
_WARM_UP_SEED = 2**32
"""Seed offset of warm-up prompts, so that no counted run sends them and no cache has seen the counted ones."""
_MAX_PROMPT = 1024
_MAX_OUTPUT = 512
_ATTAINMENT = 0.9
_MAX_RUNS = 12
_GOODPUT_RESOLUTION = 0.05
"""Relative precision of --find-goodput: it ends once a rate at most this share above the best one misses the SLOs."""


def bench(
    target: options.Target = DEFAULT_TARGET,
    http: Annotated[
        str | None,
        option("Instead of --target: drive any OpenAI endpoint, http://HOST:PORT; a key for it in OPENAI_API_KEY."),
    ] = None,
    model: options.Model = None,
    workload: Annotated[
        WorkloadClass | None,
        option(
            "Light or heavy (L, H) in prefill and decode (P, D): 512 and 128 tokens.",
            show_default=WorkloadClass.MIXED.value,
        ),
    ] = None,
    trace: options.Trace = None,
    prompts: Annotated[
        Path | None,
        option("Your own prompts, a text per line or .jsonl; answers end by themselves or at --max-output."),
    ] = None,
    requests: Annotated[int, option("Requests to send; the first ones of a file.", min=1)] = 100,
    rate: options.Rate = None,
    burstiness: Annotated[
        float | None,
        option("--rate: squared coefficient of variation of the gaps; 1: Poisson, more: bursts.", show_default="1.0"),
    ] = None,
    speed: Annotated[float | None, option("Plays a trace's times so many times as fast.", show_default="1.0")] = None,
    concurrency: options.Concurrency = None,
    max_in_flight: Annotated[int, option("Open loop: with so many at once the next waits.", min=1)] = 1024,
    max_prompt: Annotated[
        int | None, option("Longest heavy prompt, in tokens.", min=1, show_default=str(_MAX_PROMPT))
    ] = None,
    max_output: Annotated[
        int | None,
        option("Longest heavy answer, in tokens; with --prompts: any.", min=1, show_default=str(_MAX_OUTPUT)),
    ] = None,
    natural_length: Annotated[
        bool,
        option(
            "Answers end where the model ends them, at the planned length at the latest. Else they are forced "
            "to it, and the cluster can tell it beforehand.",
            "--natural-length",
        ),
    ] = False,
    warm_up: Annotated[int, option("Requests sent before, which do not count.", min=0)] = 4,
    repeats: Annotated[int, option("Runs of the same workload with other prompts.", min=1)] = 1,
    slo_ttft_s: options.SloTtftS = None,
    slo_tpot_s: options.SloTpotS = None,
    find_goodput: Annotated[
        bool,
        option(
            "Search for the highest rate that meets the SLOs, from --rate on. It takes --requests for long runs.",
            "--find-goodput",
        ),
    ] = False,
    attainment: Annotated[
        float | None, option("--find-goodput: share of requests that must meet them.", show_default=str(_ATTAINMENT))
    ] = None,
    max_runs: Annotated[
        int | None, option("--find-goodput: rates to try at most.", min=1, show_default=str(_MAX_RUNS))
    ] = None,
    timeout_s: options.TimeoutS = 600.0,
    seed: Annotated[int, option("Of lengths, arrivals and prompts.", min=0, max=2**32 - 1)] = 0,
    max_failed: Annotated[
        int | None,
        option("Exit with status 1 when more requests fail, over all runs. Unset: only when none is answered.", min=0),
    ] = None,
    as_json: Annotated[bool, option("Print one JSON object, with a row per request, and no table.", "--json")] = False,
    plot: Annotated[Path | None, option("Draw latency distributions and a timeline to .svg, .png or .pdf.")] = None,
) -> None:
    """Drive a cluster with a workload, and report TTFT, TPOT, ITL, JCT, SLO attainment, goodput and resource time.

    Prompts are random tokens, and answers have exactly the length that the workload says, past the model's own end,
    where --prompts and --natural-length do not say otherwise. Latencies count from the moment at which a request was
    due, and the report says when the client could not keep up.
    """
    options.check_positive(slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s, timeout_s=timeout_s)
    schedule = _schedule(rate, burstiness, concurrency, speed, seed, trace)
    from kaveri.loadgen.report import Slo
    from kaveri.profiling.output import check_plot

    slo = Slo(slo_ttft_s, slo_tpot_s)
    if find_goodput:
        attainment = _ATTAINMENT if attainment is None else attainment
        _check_goodput(rate, slo, attainment, repeats, max_failed)
    else:
        options.refuse_given("is the aim of --find-goodput, which is not given", attainment=attainment)
        options.refuse_given("bounds --find-goodput, which is not given", max_runs=max_runs)
    if plot is not None:
        check_plot(plot)
    load, lengths_flag = _workload(workload, trace, prompts, requests, max_prompt, max_output, seed)
    settings = _BenchSettings(
        target=target,
        http=http,
        model=model,
        load=_Load(
            workload=load,
            lengths_flag=lengths_flag,
            schedule=schedule,
            max_in_flight=max_in_flight,
            natural_length=natural_length or prompts is not None,
            timeout_s=timeout_s,
        ),
        warm_up=warm_up,
        repeats=repeats,
        slo=slo,
        attainment=attainment,
        max_runs=max_runs or _MAX_RUNS,
        output=_Output(max_failed=max_failed, as_json=as_json, plot=plot),
    )
    try:
        succeeded = asyncio.run(_run(settings))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(0 if succeeded else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Requests of each benchmark run, and the schedule on which they are sent."""

    workload: Workload
    lengths_flag: str
    """Flag that determines the lengths, or at least their maximum; for errors."""
    schedule: Schedule
    max_in_flight: int
    natural_length: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    max_failed: int | None
    as_json: bool
    plot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BenchSettings:
    target: str
    http: str | None
    """URL of an OpenAI endpoint to benchmark instead of the routers at `target`."""
    model: str | None
    load: _Load
    warm_up: int
    repeats: int
    slo: "Slo"
    attainment: float | None
    """Required SLO attainment in a search for the goodput; None: no search."""
    max_runs: int
    output: _Output

    @property
    def place(self) -> str:
        """Address of the benchmarked cluster or endpoint, for messages."""
        return self.http or self.target


def _schedule(
    rate: float | None,
    burstiness: float | None,
    concurrency: int | None,
    speed: float | None,
    seed: int,
    trace: Path | None,
) -> Schedule:
    options.check_positive(rate=rate, burstiness=burstiness, speed=speed)
    if rate is None:
        if concurrency is None and trace is None:
            raise ConfigError("--rate", "is not given; give --rate (open loop), --concurrency (closed loop) or --trace")
        options.refuse_given("is of the gaps of --rate, which is not given", burstiness=burstiness)
    if rate is not None or concurrency is not None:
        reason = "is of a trace's own times: give --trace, and neither --rate nor --concurrency"
        options.refuse_given(reason, speed=speed)
    return Schedule(
        rate_per_s=rate, concurrency=concurrency, burstiness=burstiness or 1.0, speed=speed or 1.0, seed=seed
    )


def _check_goodput(rate: float | None, slo: "Slo", attainment: float, repeats: int, max_failed: int | None) -> None:
    if rate is None:
        raise ConfigError("--find-goodput", "needs --rate, the first rate to try")
    if not slo.is_set:
        raise ConfigError("--find-goodput", "needs --slo-ttft-s, --slo-tpot-s or both")
    if not 0 < attainment <= 1:
        raise ConfigError("--attainment", f"is {attainment:g}; it must be more than 0 and at most 1")
    if repeats != 1:
        raise ConfigError("--repeats", "does not go with --find-goodput, which runs once at each rate")
    options.refuse_given("is of --find-goodput's rates too, which fail requests on purpose", max_failed=max_failed)


def _workload(
    kind: WorkloadClass | None,
    trace: Path | None,
    prompts: Path | None,
    count: int,
    max_prompt: int | None,
    max_output: int | None,
    seed: int,
) -> tuple[Workload, str]:
    if prompts is None and trace is None:
        longest = max_prompt or _MAX_PROMPT, max_output or _MAX_OUTPUT
        lengths = draw_lengths(kind or WorkloadClass.MIXED, count, random.Random(seed), *longest)
        return Workload(lengths=lengths), "--max-prompt"
    if prompts is not None and trace is not None:
        raise ConfigError("--prompts", "has prompts and --trace lengths; give one of them")
    options.refuse_given("draws lengths; --trace and --prompts have theirs", workload=kind)
    options.refuse_given("bounds drawn lengths; these have their own", max_prompt=max_prompt)
    if trace is not None:
        from kaveri.workload.traces import read_trace

        options.refuse_given("bounds drawn lengths; --trace has its own", max_output=max_output)
        return read_trace(trace, count), "--trace"
    from kaveri.workload.prompts import read_prompts

    assert prompts is not None
    texts: list[RequestPrompt] = [prompt for _, prompt in read_prompts(prompts)[:count]]
    token_counts = [len(text.content) if text.kind == "prompt_token_ids" else 0 for text in texts]
    lengths = [RequestLengths(tokens, max_output or _MAX_OUTPUT) for tokens in token_counts]
    return Workload(lengths=lengths, prompts=texts), "--max-output"


async def _run(settings: _BenchSettings) -> bool:
    """Run and report the benchmark. If cancelled, reports complete runs. Returns False if too many requests failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kaveri.cli.bench_target import reach_endpoint, reach_routers

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with contextlib.AsyncExitStack() as resources:
        if settings.http:
            client, info, phases = await reach_endpoint(settings.http, settings.model, resources)
        else:
            client, info, phases = await reach_routers(
                settings.target, settings.model, settings.load.timeout_s, resources
            )
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        bench = _BenchRuns(client, info, settings, progress)
        try:
            with progress:
                await bench.warm_up()
                if settings.attainment is not None:
                    await bench.search_goodput()
                else:
                    for number in range(settings.repeats):
                        rate_per_s = settings.load.schedule.rate_per_s
                        await bench.run(rate_per_s, f"run {number + 1} of {settings.repeats}")
        except asyncio.CancelledError:
            # Report even after Ctrl-C, perhaps hours of runs later.
            if bench.runs:
                _report(bench, phases, interrupted=True)
            raise
    return _report(bench, phases, interrupted=False)


def _report(bench: "_BenchRuns", phases: "Mapping[str, Phases]", *, interrupted: bool) -> bool:
    """Print and draw at least one complete run. Returns False if too many requests failed."""
    from rich.console import Console

    from kaveri.loadgen.provenance import provenance
    from kaveri.loadgen.report import rows, summarize
    from kaveri.loadgen.show import show_report, show_warnings
    from kaveri.profiling.output import not_written
    from kaveri.workload.summary import over_runs

    info, settings, search = bench.info, bench.settings, bench.goodput_search
    load, output = settings.load, settings.output
    summaries = [summarize(run, settings.slo, phases) for _, run in bench.runs]
    runs = [{"rate_per_s": rate, **summary} for (rate, _), summary in zip(bench.runs, summaries, strict=True)]
    report = {
        "provenance": provenance(sys.argv[1:]),
        "target": settings.place,
        "model": info.name,
        "seed": load.schedule.seed,
        "slo": asdict(settings.slo) if settings.slo.is_set else None,
        "lengths": dict.fromkeys(("forced", "known_to_the_cluster"), not load.natural_length),
        "interrupted": interrupted,
        "too_long": bench.too_long,
        "over_runs": over_runs(summaries),
        "goodput": _goodput(search, settings, len(phases), runs) if search is not None else None,
        "runs": [{**summary, "rows": list(rows(run))} for (_, run), summary in zip(bench.runs, runs, strict=True)],
    }
    if output.as_json:
        print(json.dumps(report))
    else:
        show_report(Console(highlight=False, soft_wrap=True), report)
    show_warnings(Console(stderr=True, highlight=False, soft_wrap=True), report)
    if output.plot is not None:
        from kaveri.loadgen.plot import draw_runs

        try:
            named = [(f"run {number}", run) for number, (_, run) in enumerate(bench.runs, 1)]
            if search is not None:
                named = [(f"{rate:.3g} requests/s", run) for rate, run in bench.runs]
            draw_runs(named, settings.slo, f"{info.name} at {settings.place}", output.plot)
        except OSError as error:
            raise not_written("--plot", output.plot, error) from error
    failed = sum(
        len(run.records) - summary["answered"] for (_, run), summary in zip(bench.runs, summaries, strict=True)
    )
    if output.max_failed is not None and failed > output.max_failed:
        print(f"{failed} requests failed; --max-failed is {output.max_failed}", file=sys.stderr)
        return False
    return any(summary["answered"] for summary in summaries)


class _BenchRuns:
    """Runs against one cluster, one after the other. `runs` holds request rate and results, without the warm-up."""

    def __init__(
        self, client: "AsyncClient | LoadTarget", info: "ModelInfo", settings: _BenchSettings, progress: "Progress"
    ) -> None:
        self.runs: list[tuple[float | None, LoadRun]] = []
        self.goodput_search: GoodputSearch | None = None
        load = settings.load
        # Before arrivals are planned: the rate counts only requests that are sent.
        self._workload = load.workload.fitting(info.max_model_len)
        if not self._workload.lengths:
            raise ConfigError(load.lengths_flag, f"no request fits into {info.name}'s {info.max_model_len} tokens")
        self.too_long = len(load.workload.lengths) - len(self._workload.lengths)
        self.info = info
        self.settings = settings
        self._client = client
        self._progress = progress

    async def warm_up(self) -> None:
        """Send requests that do not count, so that connections are open and every process has served some."""
        from kaveri.loadgen.driver import run_closed

        schedule = self.settings.load.schedule
        requests = schedule.plan(self._workload)[: self.settings.warm_up]
        if requests:
            bar = self._progress.add_task("warming up", total=len(requests))
            send = self._send(schedule.seed + _WARM_UP_SEED)
            await run_closed(self._client, requests, send, _WARM_UP_CONCURRENCY, lambda _: self._progress.advance(bar))

    async def run(self, rate_per_s: float | None, name: str) -> "LoadRun":
        from kaveri.loadgen.driver import run_closed, run_open

        load = self.settings.load
        requests = load.schedule.plan(self._workload, rate_per_s)
        bar = self._progress.add_task(name, total=len(requests))
        send, concurrency = self._send(load.schedule.seed + len(self.runs)), load.schedule.concurrency

        def on_end(_: object) -> None:
            self._progress.advance(bar)

        if concurrency is None:
            run = await run_open(self._client, requests, send, load.max_in_flight, on_end)
        else:
            run = await run_closed(self._client, requests, send, concurrency, on_end)
        self.runs.append((rate_per_s, run))
        return run

    async def search_goodput(self) -> None:
        """Find the highest rate that meets the SLOs, by one run per rate; `goodput_search` holds the results so far."""
        from kaveri.loadgen.report import columns_of
        from kaveri.workload.goodput import GoodputSearch, Probe

        settings, first_per_s = self.settings, self.settings.load.schedule.rate_per_s
        assert first_per_s is not None
        assert settings.attainment is not None
        if len(self._workload.lengths) < 2:
            raise ConfigError("--requests", "leaves a single request, which has no rate for --find-goodput")
        search = self.goodput_search = GoodputSearch(
            first_per_s, settings.attainment, settings.max_runs, _GOODPUT_RESOLUTION
        )
        while (rate_per_s := search.next_rate()) is not None:
            run = await self.run(rate_per_s, f"{rate_per_s:.3g} requests/s")
            search.note(Probe(rate_per_s, float(settings.slo.met(columns_of(run)).mean())))

    def _send(self, seed: int) -> "RequestSettings":
        from kaveri.loadgen.driver import RequestSettings

        settings = self.settings
        return RequestSettings(
            model=self.info.name if settings.http else settings.model,
            vocab_size=self.info.vocab_size,
            seed=seed,
            timeout_s=settings.load.timeout_s,
            natural_length=settings.load.natural_length,
        )


def _goodput(
    search: "GoodputSearch", settings: _BenchSettings, instances: int, runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the found goodput as JSON values. Its rates are measured, and may differ from the requested ones."""
    held, failed = search.held, search.failed
    offered_per_s: dict[float, float] = {run["rate_per_s"]: run["offered_per_s"] for run in runs}
    rate_per_s = offered_per_s[held.rate_per_s] if held is not None else None
    return {
        "attainment_target": settings.attainment,
        "rate_per_s": rate_per_s,
        "rate_per_s_per_instance": rate_per_s / instances if rate_per_s is not None and instances else None,
        "attainment": held.attainment if held is not None else None,
        "failed_at_per_s": offered_per_s[failed.rate_per_s] if failed is not None else None,
        "kept_schedule": all(run["client"]["kept_schedule"] for run in runs),
    }
