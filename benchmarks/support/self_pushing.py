"""An engine that plays both sides and pushes to itself, and the clock that reads its events."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from kaveri.domain.grammar import Grammar
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import (
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    FirstToken,
    KvPushFailed,
    Landed,
    LandingFailed,
    RequestFailed,
    StepTokens,
)
from kaveri.engine.factory import BuiltEngine, build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.errors import EngineError

KV_CACHE_BYTES = 256 * 2**20
_DEADLINE_S = 60.0


def build_both_sides(
    engine: str,
    model: str,
    dtype: str,
    chunk_tokens: int,
    max_batch: int,
    device: str = "cpu",
    kv_cache_memory: int = KV_CACHE_BYTES,
) -> BuiltEngine:
    """An engine that takes pushes over a Unix socket, in blocks as small as it takes them."""
    return build_engine(
        EngineSettings(
            engine=engine,
            model=model,
            dtype=dtype,
            device=device,
            kv_cache_memory=kv_cache_memory,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            kv_transports=("unix",),
        )
    )


class PushedAnswers(NamedTuple):
    """The results of a batch of prompts that were all prefilled and pushed before the first was decoded."""

    prefill_s: float
    """To the last first token."""
    decode_s: float
    """From the admission of all to the last token."""
    decode_cpu_s: float
    """CPU time of the process meanwhile."""
    answers: list[list[int]]


class SelfPushingEngine:
    """An engine with both phases on it, and a Unix socket between them."""

    def __init__(self, engine: BuiltEngine) -> None:
        """engine: not started yet; closed with this."""
        self._engine = engine
        self.vocab_size = engine.info.vocab_size
        self._changed = threading.Condition()
        self._answers: dict[EngineKey, list[int]] = {}
        self._landed: set[EngineKey] = set()
        self._failures: list[str] = []
        self._started = self._finished = 0
        self._awaited: Callable[[], bool] = bool
        self._last_token_at_s = 0.0
        self._engine.start(self._listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def answer(self, prompts: Sequence[list[int]], answer_tokens: int, grammar: Grammar | None = None) -> PushedAnswers:
        """All prompts at once, greedily, past the end-of-sequence token. grammar: of longer answers."""
        params = ResolvedParams(
            max_tokens=answer_tokens, temperature=0.0, seed=0, ignore_eos=grammar is None, grammar=grammar
        )
        requests = [
            EngineRequest(EngineKey(f"request {index}", 1), tuple(prompt), 0, params)
            for index, prompt in enumerate(prompts)
        ]
        with self._changed:
            self._answers, self._landed = {request.key: [] for request in requests}, set()
            self._started = self._finished = 0
        started = time.perf_counter()
        for request in requests:
            self._engine.prefill(request)
        self._wait_until(lambda: self._started == len(requests))
        prefill_s = self._last_token_at_s - started
        for request in requests:
            self._engine.push_to(request.key, self._engine.reserve(request, _DEADLINE_S).result(_DEADLINE_S))
        self._wait_until(lambda: len(self._landed) == len(requests))
        started, cpu_s = time.perf_counter(), time.process_time()
        for request in requests:
            self._engine.admit(request.key)
        self._wait_until(lambda: self._finished == len(requests))
        cpu_s = time.process_time() - cpu_s
        answers = [self._answers[request.key] for request in requests]
        return PushedAnswers(prefill_s, self._last_token_at_s - started, cpu_s, answers)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._awaited = condition
            if not self._changed.wait_for(lambda: condition() or bool(self._failures), _DEADLINE_S):
                raise TimeoutError(f"not done after {_DEADLINE_S} s")
            if self._failures:
                raise EngineError(self._failures[0])

    def _listen(self, events: Sequence[EngineEvent]) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                if isinstance(event, FirstToken):
                    self._answers[event.key].append(event.token_id)
                    self._started += 1
                    self._last_token_at_s = now
                elif isinstance(event, Landed):
                    self._landed.add(event.key)
                elif isinstance(event, KvPushFailed | LandingFailed | RequestFailed | EngineStopped):
                    self._failures.append(event.reason)
                elif isinstance(event, StepTokens):
                    self._last_token_at_s = now
                    for step in event.steps:
                        self._answers[step.key].append(step.token_id)
                        self._finished += step.finish is not None
            # Waking the other thread with every step would take time from the engine's.
            if self._failures or self._awaited():
                self._changed.notify_all()
