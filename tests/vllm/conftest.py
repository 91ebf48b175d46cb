"""Environment of the vLLM tests: scheduler and worker in this process, quiet, on the CPU."""

import os

# Read by vLLM when it is first asked for.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Ranks of one engine may share a core here.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import pytest


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_services: None) -> None:
    """Start services warm: importing vLLM takes most of an instance's start."""
