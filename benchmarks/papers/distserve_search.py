"""DistServe's search for placements (arXiv 2401.09670, section 4.1, table 3, figure 12) with kaveri.planner.

--data FOLDER: see benchmarks.papers.distserve. For each model of table 3 all configurations of one phase that fit one
machine of 8 GPUs are tried, with ShareGPT's lengths and table 1's SLOs; OPT-175B is an estimate from OPT-66B. Then the
whole plan of OPT-66B on 32 GPUs is made at 8 requests/s: search, check of the cluster, frontier, what one failure does.
Times are CPU time of one core, so they hold on a busy machine.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from benchmarks.papers.distserve import A100, APPLICATIONS, ATTAIN, Application, read_lengths
from benchmarks.support.harness import Options, Report, run
from kaveri.planner.catalog import read_model_shape
from kaveri.planner.expected_load import ExpectedLoad
from kaveri.planner.placement_search import PhaseOption
from kaveri.planner.plan import best_per_gpu, plan, search
from kaveri.planner.plan_question import PlanQuestion, SimulationSettings, SloTarget
from kaveri.workload.requests import RequestLengths

ONE_MACHINE = A100.gpus_per_node + 1
"""The search leaves one GPU to the other phase."""
EVERY_CONFIGURATION_PER_S = 500.0
"""A rate so high that none is left out as larger than a cluster of others."""
PAPER_S = 1.3 * 60
ASKED_S = 30.0


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    if options.data is None:
        report.skip("needs --data FOLDER")
        return
    lengths = read_lengths(options.data, 2048)["sharegpt"]
    count = options.choose(100, 60)
    report.workload = {"requests": count, "attainment": ATTAIN}
    with ProcessPoolExecutor(4) as pool:
        whole = pool.submit(_whole_plan, _question(APPLICATIONS[1], lengths, 300))
        found = [pool.submit(_search, _question(one, lengths, count)) for one in APPLICATIONS[:3]]
        for application, searched in zip(APPLICATIONS[:3], found, strict=True):
            _compare(application, *searched.result(), report)
        seconds, text = whole.result()
    report.row("CPU time of the whole plan", [seconds], "s", model="opt-66b", gpus=32)
    report.ratio("30 s / the whole plan of OPT-66B on 32 GPUs", ASKED_S / seconds, target=1.0)
    report.ratio("CPU time of the whole plan / 1.3 min", seconds / PAPER_S)
    report.note(text)


def _question(application: Application, lengths: Sequence[RequestLengths], count: int) -> PlanQuestion:
    slo = application.slo
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    return PlanQuestion(
        model=read_model_shape(application.model),
        hardware=A100,
        profiles=[application.family],
        gpus=ONE_MACHINE,
        target=SloTarget(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, attain=ATTAIN),
        demand=ExpectedLoad(lengths=lengths, rate_per_s=EVERY_CONFIGURATION_PER_S),
        simulations=SimulationSettings(request_count=count),
    )


def _whole_plan(question: PlanQuestion) -> tuple[float, str]:
    """Seconds of CPU time, and what the plan says."""
    began_s = time.process_time()
    found = plan(replace(question, gpus=32, demand=replace(question.demand, rate_per_s=8.0)))
    seconds = time.process_time() - began_s
    return seconds, f"8 requests/s: {found.cluster.gpus} GPUs, {found.attainment.mean:.1%} meet both SLOs"


def _search(question: PlanQuestion) -> tuple[tuple[PhaseOption, ...], tuple[PhaseOption, ...], float]:
    """The options of both phases, and the CPU time in seconds."""
    began_s = time.process_time()
    prefill, decode = search(question)
    return prefill, decode, time.process_time() - began_s


def _compare(
    application: Application,
    prefill: Sequence[PhaseOption],
    decode: Sequence[PhaseOption],
    seconds: float,
    report: Report,
) -> None:
    model = application.model
    report.row("CPU time of the search in one machine", [seconds], "s", model=model)
    best = [best_per_gpu(found) for found in (prefill, decode)]
    theirs = (application.prefill, application.decode)
    report.compare(
        f"placement, {application.name}",
        " | ".join(f"{one.tp},{one.pp}" for one in theirs),
        " | ".join(f"{one.parallelism.tp},{one.parallelism.pp}" for one in best),
    )
    for phase, found, wanted, ours in zip(("prefill", "decode"), (prefill, decode), theirs, best, strict=True):
        for option in found:
            labels = {"model": model, "phase": phase, "TP,PP": f"{option.parallelism}"}
            report.row("goodput per GPU", [option.per_gpu], "requests/s", **labels)
        report.ratio(f"same placement, {phase}, {model}", float(ours.parallelism == wanted))
        chosen = [option.per_gpu for option in found if option.parallelism == wanted]
        if chosen:
            share = chosen[0] / max(option.per_gpu for option in found)
            report.ratio(f"goodput per GPU, table 3's / the best, {phase}, {model}", share)
        else:
            report.note(f"{model}, {phase}: {wanted} does not fit one machine")


if __name__ == "__main__":
    run("papers.distserve_search", measure, description=__doc__)
