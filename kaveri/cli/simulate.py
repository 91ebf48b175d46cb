"""kaveri simulate: runs a workload on a simulated cluster, in virtual time."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.config.presets import Preset, preset_settings
from kaveri.errors import ConfigError
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.workload.requests import PlannedRequest, Schedule, Workload, WorkloadClass, draw_lengths

if TYPE_CHECKING:
    from kaveri.simulator.spec import ClusterSpec


def simulate(
    spec: Annotated[Path, typer.Argument(help="The file of `kaveri up --config`, with a latency_model.")],
    preset: Annotated[Preset | None, option("A paper's system: policies and roles, where SPEC says nothing.")] = None,
    baseline: Annotated[
        BaselineRule | None,
        option("Another system's scheduler, on as many instances of both phases, instead of Kaveri's."),
    ] = None,
    workload: Annotated[
        WorkloadClass, option("Light or heavy (L, H) in prefill, decode (P, D).")
    ] = WorkloadClass.MIXED,
    trace: options.Trace = None,
    requests: Annotated[int, option("Requests to send; the first ones of a trace.", min=1)] = 1000,
    rate: options.Rate = None,
    burstiness: Annotated[float, option("--rate: squared coefficient of variation of the gaps; 1: Poisson.")] = 1.0,
    concurrency: options.Concurrency = None,
    max_prompt: Annotated[int, option("Longest heavy prompt, in tokens.", min=1)] = 1024,
    max_output: Annotated[int, option("Longest heavy answer, in tokens.", min=1)] = 512,
    natural_length: Annotated[bool, option("The cluster does not know answers' lengths.", "--natural-length")] = False,
    repeats: Annotated[int, option("Runs of the same workload with other draws of the policies.", min=1)] = 1,
    slo_ttft_s: options.SloTtftS = None,
    slo_tpot_s: options.SloTpotS = None,
    overheads: options.Overheads = None,
    layers: Annotated[int, option("The model's: KV is pushed layer by layer. Timed engine: 2.", min=1)] = 2,
    fail: Annotated[list[str] | None, option("An instance that dies: decode-1@30s. May be repeated.")] = None,
    mtbf: Annotated[float | None, option("Mean seconds between deaths of each instance. Unset: none.")] = None,
    repair: Annotated[float, option("Seconds until an instance that died is there again.")] = 5.0,
    compare: Annotated[Path | None, option("File of `kaveri bench --json`: its requests, and differences.")] = None,
    seed: options.PolicySeed = 0,
    as_json: Annotated[bool, option("Print the JSON object of `kaveri bench --json`, and no table.", "--json")] = False,
) -> None:
    """Simulate a cluster under a workload, and report what `kaveri bench` reports.

    Decisions are those of the services, times those of a latency model. Without --overheads the services themselves
    take no time.
    """
    from kaveri.programs import setting_sections
    from kaveri.simulator.baselines import baseline_of, simulate_baseline
    from kaveri.simulator.failures import FailureSpec, parse_death
    from kaveri.simulator.report import differences, report_of, requests_of
    from kaveri.simulator.simulate import simulate as run
    from kaveri.simulator.spec import Overheads
    from kaveri.simulator.spec_file import read_overheads, read_spec
    from kaveri.workload.summary import Slo

    options.check_positive(rate=rate, burstiness=burstiness, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s)
    schedule = Schedule(rate_per_s=rate, concurrency=concurrency, burstiness=burstiness, seed=seed)
    if baseline is not None:
        reason = f"is given; --baseline {baseline} does not follow it"
        options.refuse_given(reason, concurrency=concurrency, fail=fail or None, mtbf=mtbf, overheads=overheads)
    taken = Overheads() if overheads is None else read_overheads(overheads)
    wanted = None if preset is None else preset_settings(preset)
    read = read_spec(spec, setting_sections(), {} if wanted is None else wanted.sections)
    failures = FailureSpec(deaths=tuple(map(parse_death, fail or ())), mtbf_s=mtbf, repair_s=repair)
    prefill = replace(read.spec.prefill, layer_count=layers)
    router = replace(read.spec.router, lengths_known=not natural_length)
    cluster = replace(read.spec, prefill=prefill, router=router, overheads=taken, failures=failures)
    slo, measured, too_long = Slo(slo_ttft_s, slo_tpot_s), None, 0
    if compare is not None:
        measured = _bench_file(compare)
        planned = requests_of(measured["runs"][0])
        if not slo.is_set and measured.get("slo"):
            slo = Slo(**measured["slo"])
    else:
        longest = min(cluster.prefill.engine.max_model_len, cluster.decode.engine.max_model_len)
        planned, too_long = _plan(workload, trace, requests, schedule, max_prompt, max_output, longest)
    if baseline is not None:
        tables = [simulate_baseline(baseline_of(cluster, baseline), planned, len(cluster.instance_ids))]
    else:
        tables = [run(replace(cluster, seed=seed + number), planned, concurrency) for number in range(repeats)]
    report = report_of(
        tables,
        slo,
        # Baselines do not record busy times.
        _phases(cluster) if baseline is None else {},
        model=cluster.decode.engine.latency.name,
        seed=seed,
        rate_per_s=rate,
        lengths_known=not natural_length,
        too_long=too_long,
        all_rows=as_json,
    )
    report["simulated"] = {
        "overheads_given": taken.are_known,
        "not_simulated": list(read.not_simulated),
        "baseline": baseline,
        "preset": preset,
        "left_out": [] if wanted is None else list(wanted.left_out),
    }
    if measured is not None:
        report["differences"] = differences(measured["over_runs_medians"], _medians(report["over_runs"]))
    if as_json:
        print(json.dumps(report))
    else:
        _show(report)
    raise typer.Exit(0 if any(entry["answered"] for entry in report["runs"]) else 1)


def _phases(cluster: "ClusterSpec") -> dict[str, tuple[str, ...]]:
    apart = dict.fromkeys(cluster.prefill_ids, ("prefill",)) | dict.fromkeys(cluster.decode_ids, ("decode",))
    return apart | dict.fromkeys((*cluster.colocated_ids, *cluster.dynamic_ids), ("prefill", "decode"))


def _plan(
    workload: WorkloadClass,
    trace: Path | None,
    count: int,
    schedule: Schedule,
    max_prompt: int,
    max_output: int,
    longest: int,
) -> tuple[list[PlannedRequest], int]:
    """Plan the requests. Also returns the number left out because they have more than `longest` tokens."""
    if trace is not None:
        from kaveri.workload.traces import read_trace

        load = read_trace(trace, count)
    else:
        if schedule.rate_per_s is None and schedule.concurrency is None:
            raise ConfigError("--rate", "is not given; give --rate, --concurrency, --trace or --compare")
        load = Workload(lengths=draw_lengths(workload, count, random.Random(schedule.seed), max_prompt, max_output))
    fitting = load.fitting(longest)
    if not fitting.lengths:
        raise ConfigError("--trace" if trace else "--max-prompt", f"no request fits into {longest} tokens")
    return schedule.plan(fitting), len(load.lengths) - len(fitting.lengths)


def _bench_file(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
        runs, over_runs = document["runs"], document["over_runs"]
        if not isinstance(runs, list) or not runs:
            raise ValueError("it has no runs")
        document["over_runs_medians"] = _medians(over_runs)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("--compare", f"{path} is no file of `kaveri bench --json`: {error}") from error
    result: dict[str, Any] = document
    return result


def _medians(figures: dict[str, Any]) -> dict[str, Any]:
    if set(figures) == {"median", "min", "max"}:
        return figures["median"]  # type: ignore[no-any-return]
    return {name: _medians(value) for name, value in figures.items() if isinstance(value, dict)}


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    from kaveri.loadgen.show import show_report, show_warnings

    console = Console(highlight=False, soft_wrap=True)
    show_report(console, report)
    for entry in report.get("differences", ()):
        change = f"{entry['difference']:+.1%}" if entry["unit"] == "share" else f"{entry['difference']:+.1f} points"
        console.print(
            f"{entry['figure']}: measured {entry['measured']:.4g}, simulated {entry['simulated']:.4g}, {change}"
        )
    show_warnings(Console(stderr=True, highlight=False, soft_wrap=True), report)
    simulated = report["simulated"]
    if simulated["baseline"]:
        console.print(f"baseline {simulated['baseline']}: requests were dealt out in turn, and no policy was followed")
    if not simulated["overheads_given"]:
        console.print("no --overheads: the services themselves were taken to need no time")
    if simulated["not_simulated"]:
        console.print(f"not simulated: {', '.join(simulated['not_simulated'])}", markup=False)
    if simulated["left_out"]:
        console.print(f"preset {simulated['preset']}: without {'; '.join(simulated['left_out'])}", markup=False)
