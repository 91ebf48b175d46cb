"""Answers of one vLLM engine without Kaveri (except the sampler), to be compared with Kaveri's token by token. It runs
in its own process, because vLLM has global state."""

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kaveri.domain.sampling import ResolvedParams, SamplingParams
from kaveri.engine.contract import EngineKey, EngineRequest
from tests.support.forked_ranks import fork_ranks

_MOST_S = 300.0


def bare_vllm_answers(
    model: Path | str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **engine_args: Any
) -> list[tuple[int, ...]]:
    """Return the answers to all prompts, run concurrently; starting vLLM takes seconds. params: one per prompt, with
    max_tokens; end-of-sequence ids are ignored. engine_args: fields of vLLM's EngineArgs."""
    asked = {
        "model": str(model),
        "prompts": [list(prompt) for prompt in prompts],
        "params": [asdict(each.resolved()) for each in params],
        "engine_args": engine_args,
    }
    context = multiprocessing.get_context("forkserver")
    # So that vLLM is imported once for all of them.
    context.set_forkserver_preload(["tests.support.imported_vllm"])
    receiving, sending = context.Pipe(duplex=False)
    # Not a daemon: with tensor parallelism it has processes of its own, which end with it.
    process = context.Process(target=_serve, args=(asked, dict(os.environ), sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(_MOST_S):
            raise TimeoutError(f"a plain vLLM engine has not answered within {_MOST_S:.0f} s")
        answers: list[list[int]] = receiving.recv()
    finally:
        # vLLM's own end takes seconds, and there is nothing left to save.
        process.kill()
        process.join()
    return [tuple(answer) for answer in answers]


def _serve(asked: dict[str, Any], environment: dict[str, str], sending: Connection) -> None:
    os.environ.update(environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    fork_ranks()
    sending.send(_answer(asked))


def _answer(asked: dict[str, Any]) -> list[list[int]]:
    from vllm import EngineArgs, LLMEngine

    from kaveri.engine.vllm.draws import KeyedDraws
    from kaveri.engine.vllm.sampling import decode_params

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "kv_cache_memory_bytes": 64 * 2**20,
        "block_size": 32,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 64,
        **asked["engine_args"],
    }
    llm = LLMEngine.from_engine_args(EngineArgs(model=asked["model"], logits_processors=[KeyedDraws], **arguments))
    for number, (prompt, values) in enumerate(zip(asked["prompts"], asked["params"], strict=True)):
        request = EngineRequest(EngineKey(str(number), 1), tuple(prompt), 0, ResolvedParams(**values))
        llm.add_request(str(number), {"prompt_token_ids": prompt}, decode_params(request, frozenset()))
    answers: list[list[int]] = [[] for _ in asked["prompts"]]
    while llm.has_unfinished_requests():
        for output in llm.step():
            answers[int(output.request_id)] += output.outputs[0].token_ids
    return answers
