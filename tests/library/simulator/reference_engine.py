"""Reference for simulated engines: the stepwise engine's own Lifecycle, run step by step in virtual time."""

from dataclasses import dataclass, field
from typing import Any

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineInfo, EngineKey, EngineRequest, FirstToken, Preempted, StepTokens
from kaveri.engine.stepwise.lifecycle import Lifecycle
from kaveri.engine.stepwise.runner import DrawnToken
from kaveri.errors import NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.latency.model import LatencyModel


@dataclass
class ReferenceNews:
    """Events of one engine, by request number."""

    tokens: dict[int, list[float]] = field(default_factory=dict)
    preempted: list[tuple[int, float]] = field(default_factory=list)
    ended: dict[int, float] = field(default_factory=dict)


class ReferenceEngine:
    """Runs the stepwise engine's Lifecycle step by step; calls during a step take effect in the next one."""

    def __init__(
        self, latency: LatencyModel, layout: KvLayout, total_blocks: int, chunk_tokens: int, max_batch: int
    ) -> None:
        info = EngineInfo(
            engine="test",
            layout=layout,
            total_blocks=total_blocks,
            max_model_len=total_blocks * layout.block_tokens,
            vocab_size=10,
            eos_token_ids=frozenset(),
            epoch=1,
            kv_endpoints=(),
            can_replicate=False,
        )
        self._latency = latency
        self._events: list[Any] = []
        self.lifecycle = Lifecycle(info, chunk_tokens, max_batch, self._events.append, on_work=lambda: None)
        self._planned: list[Any] = []
        self._ends_s = 0.0
        self.told = ReferenceNews()
        self.adopts: set[int] = set()
        """Numbers of prompts that decode here once computed; they wait for admit()."""

    def advance(self, until_s: float) -> None:
        while self._planned and self._ends_s <= until_s:
            now_s = self._ends_s
            drawn = [DrawnToken(1, None) for _ in self._planned]
            self.lifecycle.apply(self._planned, drawn)
            self._planned = []
            computed = [event.key for event in self._events if isinstance(event, FirstToken)]
            self._tell(now_s)
            self._plan(now_s)
            for key in computed:
                # What is asked when a step's tokens are known concerns the step after the next one.
                if int(key.request_id) in self.adopts:
                    self.lifecycle.adopt(key)
                    self._tell(now_s)
                    self._wake(now_s)

    def prefill(self, number: int, prompt_tokens: int, answer_tokens: int, now_s: float) -> bool:
        try:
            self.lifecycle.open_prefill(_request(number, prompt_tokens, answer_tokens))
        except NoCapacity:
            return False
        self._wake(now_s)
        return True

    def decode(self, number: int, prompt_tokens: int, answer_tokens: int, now_s: float) -> bool:
        """Reserve and land at once. answer_tokens: includes the token that came with the KV."""
        try:
            sequence = self.lifecycle.open_decode(_request(number, prompt_tokens, answer_tokens), None)
        except NoCapacity:
            return False
        self.lifecycle.land(sequence, 1)
        self._wake(now_s)
        return True

    def admit(self, number: int, now_s: float) -> None:
        self.lifecycle.admit(EngineKey(str(number), 1))
        self._wake(now_s)

    def end(self, number: int, now_s: float) -> None:
        self.lifecycle.abort(EngineKey(str(number), 1))
        self._wake(now_s)

    def _wake(self, now_s: float) -> None:
        if not self._planned:
            self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        self._planned = self.lifecycle.plan()
        self._tell(now_s)
        spans = [(sequence.computed, count) for sequence, count in self._planned]
        self._ends_s = now_s + self._latency.step_s(spans)

    def _tell(self, now_s: float) -> None:
        for event in self._events:
            match event:
                case FirstToken():
                    self.told.tokens.setdefault(int(event.key.request_id), []).append(now_s)
                case StepTokens():
                    for step in event.steps:
                        number = int(step.key.request_id)
                        self.told.tokens.setdefault(number, []).append(now_s)
                        if step.finish is not None:
                            self.told.ended[number] = now_s
                case Preempted():
                    self.told.preempted.append((int(event.key.request_id), now_s))
        self._events.clear()


def _request(number: int, prompt_tokens: int, answer_tokens: int) -> EngineRequest:
    params = ResolvedParams(max_tokens=answer_tokens, ignore_eos=True, seed=0)
    return EngineRequest(EngineKey(str(number), 1), (1,) * prompt_tokens, 0, params)
