"""A process with one engine in it that answers batches of prompts: Kaveri's engines, and bare vLLM.

vLLM has global state, and engines have threads of their own, so engines that are compared do not share a process. All
of them run on the same core, one at a time.
"""

import importlib.util
import multiprocessing
import os
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from benchmarks.support.self_pushing import SelfPushingEngine, build_both_sides
from kaveri.domain.grammar import Grammar
from kaveri.models import resolve_model
from kaveri.telemetry.logs import configure_logs

BARE = "bare vLLM"
TRANSFORMERS = "transformers"
KAVERI_VLLM = "Kaveri's vLLM"
BARE_XGRAMMAR = "bare vLLM, xgrammar"
BARE_GUIDANCE = "bare vLLM, guidance"
BACKENDS = {BARE: None, BARE_XGRAMMAR: "xgrammar", BARE_GUIDANCE: "guidance"}
"""Backends of structured answers in bare vLLM, by the engine's name; None: it has none."""
ENGINES = {TRANSFORMERS: "transformers", KAVERI_VLLM: "vllm"}
"""Kaveri's, by name."""
_ANSWER_TIMEOUT_S = 300.0


class Answered(NamedTuple):
    """The results of a batch."""

    prefill_s: float
    """To the last first token."""
    decode_tokens_per_s: float
    """While the whole batch decodes."""
    decode_cpu_s: float
    """CPU time of the process meanwhile, per token."""
    answers: list[list[int]]


class _Answers(Protocol):
    def __call__(self, prompts: Sequence[list[int]], answer_tokens: int, schema: str) -> Answered: ...


class MeasuredEngine:
    """The process, from outside."""

    def __init__(
        self, engine: str, model: str, dtype: str, chunk_tokens: int, max_batch: int, device: str, pool_bytes: int
    ) -> None:
        """engine: a name in BACKENDS or ENGINES. device: Kaveri's; bare vLLM computes where it was built for. Takes the
        seconds that it takes to load it."""
        self.engine = engine
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        settings = (engine, model, dtype, chunk_tokens, max_batch, device, pool_bytes)
        self._process = context.Process(target=_serve, args=(theirs, *settings), name=engine, daemon=True)
        self._process.start()
        theirs.close()
        self.vocab_size = int(self._receive())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.join(10.0)
        self._process.kill()

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int, schema: str = "") -> Answered:
        """All prompts at once, greedily, past the end-of-sequence token. RuntimeError when it does not come to an end.

        answer_tokens: of each answer. schema: a JSON Schema of longer answers, which these begin; empty: of no form.
        """
        self._control.send((list(prompts), answer_tokens, schema))
        answered = self._receive()
        assert isinstance(answered, Answered)
        return answered

    def _receive(self) -> Any:
        if not self._control.poll(_ANSWER_TIMEOUT_S):
            raise RuntimeError(f"{self.engine} has not answered within {_ANSWER_TIMEOUT_S:g} s")
        try:
            return self._control.recv()
        except EOFError:
            # Its error is on its way to the terminal.
            self._process.join(10.0)
            raise RuntimeError(f"{self.engine} has ended") from None


def has_vllm() -> bool:
    """Whether vLLM is installed here."""
    return importlib.util.find_spec("vllm") is not None


def _serve(
    control: Connection,
    engine: str,
    model: str,
    dtype: str,
    chunk_tokens: int,
    max_batch: int,
    device: str,
    pool_bytes: int,
) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    configure_logs("benchmark", engine, level="error")
    import torch

    torch.set_num_threads(1)
    # vLLM's imports warn of what is deprecated elsewhere.
    warnings.simplefilter("ignore")
    with control:
        if engine in BACKENDS:
            bare = _BareVllm(model, dtype, chunk_tokens, max_batch, pool_bytes, BACKENDS[engine])
            _answer_all(control, bare.vocab_size, bare.answer)
            return
        built = build_both_sides(ENGINES[engine], model, dtype, chunk_tokens, max_batch, device, pool_bytes)
        with SelfPushingEngine(built) as ours:

            def answer(prompts: Sequence[list[int]], answer_tokens: int, schema: str) -> Answered:
                taken = ours.answer(prompts, answer_tokens, Grammar.json_schema(schema) if schema else None)
                tokens = len(prompts) * (answer_tokens - 1)
                return Answered(taken.prefill_s, tokens / taken.decode_s, taken.decode_cpu_s / tokens, taken.answers)

            _answer_all(control, ours.vocab_size, answer)


def _answer_all(control: Connection, vocab_size: int, answer: _Answers) -> None:
    control.send(vocab_size)
    while True:
        try:
            asked = control.recv()
        except EOFError:
            return
        control.send(answer(*asked))


class _BareVllm:
    """vLLM's in-process engine, as its own documentation drives it, with the settings that Kaveri gives it."""

    def __init__(
        self, model: str, dtype: str, chunk_tokens: int, max_batch: int, pool_bytes: int, backend: str | None
    ) -> None:
        from vllm import EngineArgs, LLMEngine

        structured = {} if backend is None else {"structured_outputs_config": {"backend": backend}}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=resolve_model(model),
                dtype=dtype,
                kv_cache_memory_bytes=pool_bytes,
                max_num_batched_tokens=chunk_tokens,
                max_num_seqs=max_batch,
                enforce_eager=True,
                skip_tokenizer_init=backend is None,
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **structured,
            )
        )
        self.vocab_size: int = self._engine.model_config.get_vocab_size()

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int, schema: str) -> Answered:
        """Chunks and decode steps are mixed: what is drawn before the last first token does not count as decode, nor
        what is drawn when the first answer has ended."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        started_s = time.perf_counter()
        for number, prompt in zip(answers, prompts, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=answer_tokens,
                ignore_eos=not schema,
                structured_outputs=StructuredOutputsParams(json=schema) if schema else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(number, {"prompt_token_ids": prompt}, params)
        unstarted, all_started_s, whole_until_s, drawn_tokens, cpu_s = len(prompts), 0.0, 0.0, 0, 0.0
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter()
            if unstarted == 0 and whole_until_s == 0.0:
                drawn_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
                if any(output.finished for output in outputs):
                    whole_until_s, cpu_s = now_s, time.process_time() - cpu_s
            for output in outputs:
                answer = answers[output.request_id]
                unstarted -= not answer
                answer += output.outputs[0].token_ids
            if unstarted == 0 and all_started_s == 0.0:
                all_started_s, cpu_s = now_s, time.process_time()
        tokens_per_s = drawn_tokens / (whole_until_s - all_started_s)
        return Answered(all_started_s - started_s, tokens_per_s, cpu_s / drawn_tokens, list(answers.values()))
