"""Imports all of vLLM that the tests' models need, for processes forked from this one."""

import gc
import importlib

_MODULES = (
    "kaveri.engine.vllm.connector",
    "kaveri.engine.vllm.engine",
    "kaveri.engine.vllm.loading",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.opt",
    "vllm.model_executor.models.phi3",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)

# What an import does with a GPU may not survive a fork; tests/gpu have a copy of the package alone.
if importlib.import_module("vllm.platforms").current_platform.is_cpu():
    for _name in _MODULES:
        importlib.import_module(_name)
# vLLM names the processes of ranks. The library finds the memory of a name by the environment, which copies replace.
importlib.import_module("setproctitle").getproctitle()
# Engines collect garbage while they start, which takes a third of a second over all these modules, each time.
gc.collect()
gc.freeze()
