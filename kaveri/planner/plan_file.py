"""Writes a plan as JSON, or as the file that `kaveri up --plan` and `kaveri simulate` read. Pure."""

import json
from dataclasses import asdict
from typing import Any

from kaveri.engine.stepwise.fake import FakeModel
from kaveri.planner.cluster_check import Attainment
from kaveri.planner.colocation import ColocatedPlan
from kaveri.planner.parallelism import Parallelism
from kaveri.planner.placement_search import PhaseOption
from kaveri.planner.plan import ClusterPlan, SimulatedCluster, best_per_gpu
from kaveri.planner.plan_question import PlanQuestion
from kaveri.simulator.failures import FailureSpec

_NO_FAILURES = FailureSpec()


def to_toml(plan: ClusterPlan, latency_files: dict[str, str]) -> str:
    """Return the plan as settings for timed engines; a pipeline of PP stages becomes PP instances, as simulated.
    latency_files: file of each estimated latency model, by the model's name."""
    cluster, question = plan.cluster, plan.question
    lines = [f"# {line}" for line in summary_lines(plan)]
    lines += ["", 'engine = "timed"', f"max_model_len = {question.model.max_model_len}"]
    lines += ["", "[up]"]
    lines += [f"prefill = {cluster.prefill_count * cluster.prefill.parallelism.pp}"]
    lines += [f"decode = {cluster.decode_count * cluster.decode.parallelism.pp}"]
    for role, option in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        pool_bytes = option.pool.total_blocks * option.pool.block_tokens * FakeModel().layout.token_bytes
        file = option.step.file or latency_files[option.step.latency.name]
        lines += ["", f"[{role}]", f"latency_model = {json.dumps(file)}"]
        lines += [f"kv_cache_memory = {pool_bytes}", f"block_tokens = {option.pool.block_tokens}"]
        lines += [f"chunk_tokens = {option.pool.chunk_tokens}", f"max_batch = {option.pool.max_batch}"]
        if role == "prefill":
            link = cluster.spec(0, _NO_FAILURES).link
            assert link is not None
            lines += [f'kv_link = "{link.bytes_per_s * 8 / 1e9:g}Gbps,{link.token_bytes}B/token"']
        elif cluster.replicates:
            lines += [f'replication = "{question.replication}"', f"replica_memory = {pool_bytes}"]
    return "\n".join(lines) + "\n"


def to_json(plan: ClusterPlan) -> dict[str, Any]:
    cluster, question = plan.cluster, plan.question
    return {
        "model": question.model.name,
        "hardware": question.hardware.name,
        "rate_per_s": question.demand.rate_per_s,
        "arrivals": "recorded" if question.demand.recorded_s else "drawn",
        "slo": {"ttft_s": question.target.ttft_s, "tpot_s": question.target.tpot_s, "attain": question.target.attain},
        "gpus": cluster.gpus,
        "price_per_hour": question.price_per_hour(cluster.gpus),
        "prefill": {"instances": cluster.prefill_count, **_option(cluster.prefill)},
        "decode": {"instances": cluster.decode_count, **_option(cluster.decode)},
        "is_estimate": plan.is_estimate,
        "attainment": asdict(plan.attainment),
        "binds": plan.binds,
        "same_node": question.limits.same_node,
        "replication": question.replication.value,
        "frontier": [_point(one) for one in plan.frontier],
        "one_prefill_instance_dies": asdict(plan.without_prefill),
        "one_decode_instance_dies": asdict(plan.without_decode),
        "colocated": None if plan.colocated is None else _colocated(question, plan.colocated),
        "best_per_gpu": {
            "prefill": _parallel(best_per_gpu(plan.prefill_options).parallelism),
            "decode": _parallel(best_per_gpu(plan.decode_options).parallelism),
        },
        "options": [_option(option) for option in (*plan.prefill_options, *plan.decode_options)],
    }


def summary_lines(plan: ClusterPlan) -> list[str]:
    """Describe the plan in lines of text."""
    cluster, question = plan.cluster, plan.question
    arrivals = " as recorded" if question.demand.recorded_s else ""
    copies = f", requests go on from copies ({question.replication})" if cluster.replicates else ""
    lines = [
        f"kaveri plan: {question.model.name} on {cluster.gpus} of {question.gpus} GPUs of {question.hardware.name},"
        f" {question.price_per_hour(cluster.gpus):.2f} USD an hour",
        f"{question.demand.rate_per_s:.4g} requests/s{arrivals} within TTFT {question.target.ttft_s:g} s and TPOT"
        f" {question.target.tpot_s:g} s for {question.target.attain:.0%} of requests",
    ]
    for name, option, count in (
        ("prefill", cluster.prefill, cluster.prefill_count),
        ("decode", cluster.decode, cluster.decode_count),
    ):
        estimate = ", an estimate" if option.step.is_estimate else ""
        lines.append(
            f"{count} {name} x ({option.parallelism}): {option.goodput_per_s:.2f} requests/s each,"
            f" {option.per_gpu:.2f} per GPU{estimate}"
        )
    lines += [
        f"predicted attainment {interval_text(plan.attainment)}"
        + (f"; more requests miss {plan.binds}" if plan.binds else ""),
        *(_point_line(one) for one in plan.frontier),
        f"when one prefill instance dies for good: {interval_text(plan.without_prefill)}",
        f"when one decode instance dies for good{copies}: {interval_text(plan.without_decode)}",
    ]
    if plan.colocated is not None:
        both = plan.colocated
        lines.append(
            f"colocate: {both.count} of both phases x ({both.parallelism}) serve it with {both.gpus}"
            f" GPU{'' if both.gpus == 1 else 's'}, {question.price_per_hour(both.gpus):.2f} USD an hour:"
            f" {interval_text(both.attainment)}"
        )
    if not question.simulations.overheads.are_known:
        lines.append("no --overheads: the services themselves were taken to need no time")
    return lines


def interval_text(attainment: Attainment) -> str:
    return f"{attainment.mean:.1%} (95 % interval {attainment.low:.1%} to {attainment.high:.1%})"


def _colocated(question: PlanQuestion, one: ColocatedPlan) -> dict[str, Any]:
    return {
        "instances": one.count,
        "tp_pp": _parallel(one.parallelism),
        "gpus": one.gpus,
        "price_per_hour": question.price_per_hour(one.gpus),
        "chunk_tokens": one.spec.step_tokens,
        "is_estimate": one.step.is_estimate,
        "attainment": asdict(one.attainment),
    }


def _point(one: SimulatedCluster) -> dict[str, Any]:
    return {
        "gpus": one.cluster.gpus,
        "price_per_hour": one.cluster.question.price_per_hour(one.cluster.gpus),
        "prefill_instances": one.cluster.prefill_count,
        "decode_instances": one.cluster.decode_count,
        "attainment": asdict(one.attainment),
    }


def _point_line(one: SimulatedCluster) -> str:
    scale = one.attainment.slo_scale
    margin = "" if scale is None else f", both SLOs could be {scale:.2f} times as long"
    price = one.cluster.question.price_per_hour(one.cluster.gpus)
    return (
        f"{price:.2f} USD an hour, {one.cluster.prefill_count} prefill and"
        f" {one.cluster.decode_count} decode: {interval_text(one.attainment)}{margin}"
    )


def _parallel(parallelism: Parallelism) -> list[int]:
    return [parallelism.tp, parallelism.pp]


def _option(option: PhaseOption) -> dict[str, Any]:
    return {
        "phase": option.phase.value,
        "tp_pp": _parallel(option.parallelism),
        "goodput_per_s": option.goodput_per_s,
        "goodput_per_gpu_per_s": option.per_gpu,
        "alone": option.alone,
        "chunk_tokens": option.pool.chunk_tokens,
        "latency_model": option.step.latency.name,
        "is_estimate": option.step.is_estimate,
    }
