"""kaveri plan: finds by simulation how many instances of which configuration a workload needs."""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.cli.plan_pipeline import pipeline, read_fitting, read_lengths
from kaveri.config.commands import command_group
from kaveri.errors import ConfigError
from kaveri.policy.replication import ReplicationMode

if TYPE_CHECKING:
    from kaveri.planner.catalog import ModelShape
    from kaveri.planner.observed_workload import ObservedWorkload
    from kaveri.planner.plan import ClusterPlan
    from kaveri.planner.plan_question import PlanQuestion
    from kaveri.planner.replan import Replan
    from kaveri.planner.running_cluster import RunningCluster

plan_app = command_group("Plan a cluster: instances, parallelism and cost, by simulation.", invoke_without_command=True)
plan_app.command()(pipeline)
_DEFAULT_GPUS = 8
_DEFAULT_LAST_S = 600.0


@dataclass(frozen=True, slots=True)
class ObservedNow:
    """Recent workload and running instances that `kaveri plan --from-cluster` has observed."""

    workload: "ObservedWorkload"
    cluster: "RunningCluster"


@plan_app.callback()
@options.speaks_tls
def plan(
    context: typer.Context,
    profile: Annotated[
        list[str] | None,
        option("Bundled family such as opt-13b-a100, or a file of `kaveri profile`: FILE, or TP=FILE."),
    ] = None,
    hardware: Annotated[str, option("Bundled kind of GPU, or a TOML file with the same fields.")] = "a100-80g",
    model: Annotated[str, option("Bundled model, or a TOML file with the same fields; unset: the profile's.")] = "",
    gpus: Annotated[int | None, option("Most GPUs to use. Unset: 8, or twice what runs if that is more.")] = None,
    slo_ttft_s: Annotated[float, option("Seconds to the first token that count as met.")] = 0.0,
    slo_tpot_s: Annotated[float, option("Seconds per further token that count as met.")] = 0.0,
    attain: Annotated[float, option("Share of requests that must meet both.")] = 0.9,
    trace: Annotated[Path | None, option("Draw lengths from a trace: Azure 2023 CSV or Mooncake JSON lines.")] = None,
    lengths: Annotated[str, option("Or from these: PROMPT,ANSWER tokens, several separated by semicolons.")] = "",
    from_cluster: Annotated[
        str,
        option(
            "Or lengths, rate and burstiness from what the cluster of this router was asked for, HOST:PORT; the"
            " plan is compared with what runs there."
        ),
    ] = "",
    last_s: Annotated[float | None, option("--from-cluster: seconds of the past that count. Unset: 600.")] = None,
    running_tp: Annotated[
        str,
        option(
            "--from-cluster: tensor parallelism of what runs, TP or TP,TP of prefill and decode. Unset: as their"
            " KV layouts say, else 1."
        ),
    ] = "",
    recorded: Annotated[
        bool,
        option(
            "Requests come with the gaps of the trace and in its order, or with the gaps that --from-cluster saw,"
            " scaled to --rate. Unset: gaps are drawn.",
            "--recorded",
        ),
    ] = False,
    rate: Annotated[
        float | None,
        option("Requests per second to serve. Unset: what --from-cluster saw, or the trace with --recorded."),
    ] = None,
    burstiness: Annotated[
        float | None,
        option("Squared coefficient of variation of the gaps; 1: Poisson. Unset: what --from-cluster saw, else 1."),
    ] = None,
    prefill_tp_pp: Annotated[str, option("Only this TP,PP for prefill instances.")] = "",
    decode_tp_pp: Annotated[str, option("Only this TP,PP for decode instances.")] = "",
    same_node: Annotated[bool, option("KV never leaves a machine: DistServe's algorithm 2.", "--same-node")] = False,
    replication: Annotated[
        ReplicationMode,
        option("Where copies of decode instances' KV go, so that requests go on from them after a death."),
    ] = ReplicationMode.OFF,
    chunk_tokens: Annotated[int | None, option("Prompt tokens in a step; unset: what saturates the GPUs.")] = None,
    max_batch: Annotated[int, option("Requests that an instance decodes at once.")] = 256,
    requests: Annotated[int, option("Requests of each simulation, at least; more at high rates.")] = 1000,
    overheads: options.Overheads = None,
    seed: options.PolicySeed = 0,
    out: Annotated[Path | None, option("Write the plan here, for `kaveri up --plan`.")] = None,
    as_json: Annotated[bool, option("Print all that was found as JSON.", "--json")] = False,
) -> None:
    """Find the fewest GPUs that serve a workload within its SLOs.

    DistServe's algorithm 1: every TP and PP that fits, for prefill and for decode apart; then the whole cluster. The
    lower end of its attainment's 95 % interval must reach the share that is asked for. With --from-cluster it says
    whether to keep what runs.
    """
    if context.invoked_subcommand is not None:
        return
    from kaveri.planner.catalog import read_hardware, read_model_shape
    from kaveri.planner.expected_load import ExpectedLoad
    from kaveri.planner.parallelism import parse_parallelism
    from kaveri.planner.plan import plan as find_plan
    from kaveri.planner.plan_question import InstanceLimits, PlanQuestion, SimulationSettings, SloTarget
    from kaveri.planner.profiles import model_of
    from kaveri.simulator.spec import Overheads
    from kaveri.simulator.spec_file import read_overheads

    if not from_cluster:
        for flag, given in (("--last-s", last_s is not None), ("--running-tp", running_tp)):
            if given:
                raise ConfigError(flag, "is given, but --from-cluster is not")
    if recorded:
        if burstiness is not None:
            raise ConfigError("--burstiness", "is given, but --recorded as well; give one of them")
        if not from_cluster and (trace is None or lengths):
            raise ConfigError("--recorded", "needs --trace or --from-cluster, and no --lengths")
    profiles = profile or []
    shape = read_model_shape(model or model_of(profiles))
    now: ObservedNow | None = None
    if from_cluster:
        now = _observe(from_cluster, trace, lengths, _DEFAULT_LAST_S if last_s is None else last_s, running_tp, shape)
        seen, too_long = now.workload, now.workload.too_long_count
        demand = seen.recorded_demand(rate, seed) if recorded else seen.demand(rate, burstiness)
    elif recorded and trace is not None:
        fitting, too_long = read_fitting(trace, shape.max_model_len)
        demand = ExpectedLoad.as_recorded(fitting.lengths, fitting.times_s, rate)
    else:
        drawn, too_long = read_lengths(trace, lengths, shape.max_model_len)
        demand = ExpectedLoad(
            lengths=drawn, rate_per_s=rate or 0.0, burstiness=1.0 if burstiness is None else burstiness
        )
    taken = Overheads() if overheads is None else read_overheads(overheads)
    question = PlanQuestion(
        model=shape,
        hardware=read_hardware(hardware),
        profiles=profiles,
        gpus=max(_DEFAULT_GPUS, 2 * now.cluster.gpus if now else 0) if gpus is None else gpus,
        target=SloTarget(ttft_s=slo_ttft_s, tpot_s=slo_tpot_s, attain=attain),
        demand=demand,
        limits=InstanceLimits(
            prefill=parse_parallelism(prefill_tp_pp, "--prefill-tp-pp") if prefill_tp_pp else None,
            decode=parse_parallelism(decode_tp_pp, "--decode-tp-pp") if decode_tp_pp else None,
            same_node=same_node,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
        ),
        replication=replication,
        simulations=SimulationSettings(request_count=requests, overheads=taken, seed=seed),
    )
    if now is None:
        _report(find_plan(question), out, as_json, too_long)
    else:
        both = _compare(question, now)
        _report(both.plan, out, as_json, too_long, both)


def _compare(question: "PlanQuestion", now: ObservedNow) -> "Replan":
    """Compare the running cluster with the best plan. Without a plan, prints observations and raises ConfigError."""
    from kaveri.planner.plan import plan as find_plan
    from kaveri.planner.replan import Replan, observed_lines, verdict
    from kaveri.planner.running_cluster import running_attainment

    attainment = running_attainment(question, now.cluster)
    try:
        found = find_plan(question)
    except ConfigError:
        for line in observed_lines(question, now.workload, now.cluster, attainment):
            typer.echo(line, err=True)
        typer.echo(f"{verdict(attainment, question.target.attain)}; there is no plan to compare it with", err=True)
        raise
    return Replan(observed=now.workload, running=now.cluster, attainment=attainment, plan=found)


def _observe(
    target: str, trace: Path | None, lengths: str, last_s: float, running_tp: str, shape: "ModelShape"
) -> ObservedNow:
    from kaveri.cli.observed_cluster import observe_cluster
    from kaveri.planner.observed_workload import observed_workload
    from kaveri.planner.running_cluster import parse_tps, running_cluster

    for flag, given in (("--trace", trace), ("--lengths", lengths)):
        if given:
            raise ConfigError(flag, "is given, but --from-cluster as well; give one of them")
    if not 0 < last_s < float("inf"):
        raise ConfigError("--last-s", f"is {last_s:g}; it must be a number of seconds above 0")
    tps = parse_tps(running_tp)
    seen = asyncio.run(observe_cluster(target))
    return ObservedNow(
        observed_workload(seen.samples, last_s, shape.max_model_len), running_cluster(seen.view, seen.model, tps)
    )


def _report(found: "ClusterPlan", out: Path | None, as_json: bool, too_long: int, both: "Replan | None" = None) -> None:
    """Print the plan, and write it to `out`. both: comparison with the running cluster, for --from-cluster."""
    from kaveri.planner.plan_file import to_json
    from kaveri.planner.replan import replan_json

    if out is not None:
        _write(found, out)
    if as_json:
        print(json.dumps({**(to_json(found) if both is None else replan_json(both)), "too_long": too_long}))
    else:
        _show(found, too_long, out, both)


def _write(found: "ClusterPlan", out: Path) -> None:
    from kaveri.planner.plan_file import to_toml

    files: dict[str, str] = {}
    try:
        for role, chosen in (("prefill", found.cluster.prefill), ("decode", found.cluster.decode)):
            if not chosen.step.file:
                path = out.with_suffix(f".{role}-latency.json")
                path.write_text(json.dumps(asdict(chosen.step.latency), indent=1) + "\n")
                files[chosen.step.latency.name] = str(path)
        out.write_text(to_toml(found, files))
    except OSError as error:
        raise ConfigError("--out", f"cannot write {out}: {error.strerror}") from error


def _show(found: "ClusterPlan", too_long: int, out: Path | None, both: "Replan | None") -> None:
    from rich.console import Console
    from rich.table import Table

    from kaveri.planner.plan_file import summary_lines
    from kaveri.planner.replan import Advice, replan_lines

    console = Console(highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("phase", "TP", "PP", "GPUs", "chunk", "requests/s", "per GPU", "alone", ""):
        table.add_column(name, justify="left" if name in ("phase", "") else "right")
    for choice in (*found.prefill_options, *found.decode_options):
        parallelism = choice.parallelism
        chosen = choice in (found.cluster.prefill, found.cluster.decode)
        notes = [text for text, given in (("chosen", chosen), ("estimate", choice.step.is_estimate)) if given]
        table.add_row(
            choice.phase.value,
            str(parallelism.tp),
            str(parallelism.pp),
            str(parallelism.gpus),
            str(choice.pool.chunk_tokens),
            f"{choice.goodput_per_s:.2f}",
            f"{choice.per_gpu:.2f}",
            f"{choice.alone:.0%}",
            ", ".join(notes),
        )
    console.print(table)
    console.print()
    for line in (*summary_lines(found), *(replan_lines(both) if both else ())):
        console.print(line)
    if too_long and both is None:
        console.print(f"{too_long} requests of the trace are longer than {found.question.model.max_model_len} tokens")
    if out is not None:
        keeps = both is not None and both.advice is Advice.KEEP
        console.print(f"written to {out}" + ("; what runs can stay" if keeps else f": kaveri up --plan {out}"))
