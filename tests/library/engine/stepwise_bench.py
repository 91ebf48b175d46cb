"""Engines for tests of the stepwise engine: a runner that pauses within a step, and a maker that closes them."""

import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, SequenceSlice
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder

MODEL = FakeModel(max_model_len=128, block_tokens=4)


class HeldRunner(FakeRunner):
    """FakeRunner that pauses after layer 0 of every step while it is held."""

    def __init__(self, model: FakeModel = MODEL) -> None:
        super().__init__(model)
        self.arrived = threading.Semaphore(0)
        self.told_landed: list[int] = []
        self._go_on = threading.Event()
        self._go_on.set()

    def attach(self, pool: KvPool) -> None:
        super().attach(pool)
        self.pool = pool

    def landed(self, block_ids: Sequence[int]) -> None:
        self.told_landed += block_ids

    def hold(self) -> None:
        self._go_on.clear()

    def let_go(self) -> None:
        self._go_on.set()

    def wait_until_held(self) -> None:
        assert self.arrived.acquire(timeout=SOON_S)

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        def told(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer)
            if layer == 0 and not self._go_on.is_set():
                self.arrived.release()
                assert self._go_on.wait(SOON_S)

        return super().run(batch, told)


class StepwiseBench:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._count = 0

    def engine(
        self,
        runner: FakeRunner | None = None,
        total_blocks: int = 200,
        *,
        receives: bool = True,
        chunk_tokens: int = 16,
        max_batch: int = 8,
    ) -> StepwiseEngine:
        self._count += 1
        engine = StepwiseEngine(
            runner or FakeRunner(MODEL),
            total_blocks,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
            listen=[KvEndpoint("unix", str(self._folder / f"{self._count}.sock"))] if receives else [],
        )
        self._stack.callback(engine.close)
        return engine

    def pair(
        self,
        source: FakeRunner | None = None,
        target: FakeRunner | None = None,
        prefill_blocks: int = 200,
        decode_blocks: int = 200,
        *,
        admit: bool = True,
    ) -> "StepwisePair":
        prefill = self.engine(source, prefill_blocks, receives=False)
        decode = self.engine(target, decode_blocks)
        return StepwisePair(prefill, decode, start_recording(prefill), start_recording(decode, admit=admit))


@dataclass(frozen=True)
class StepwisePair:
    """A started prefill and a started decode engine with recorders; decode admits every landed request."""

    prefill: StepwiseEngine
    decode: StepwiseEngine
    prefilled: EngineRecorder
    decoded: EngineRecorder

    def hand_over(self, request: EngineRequest) -> Ticket:
        """Prefill a request, and push it to the decode engine."""
        ticket = self.decode.reserve(request, 60.0).result()
        self.prefill.prefill(request)
        self.prefill.push_to(request.key, ticket)
        return ticket


def make_stepwise_request(name: str, prompt_tokens: int, max_tokens: int, **params: object) -> EngineRequest:
    token_ids = tuple(random.Random(name).randrange(1, 1000) for _ in range(prompt_tokens))
    wanted = ResolvedParams(**{"max_tokens": max_tokens, "seed": 1} | params)
    return EngineRequest(EngineKey(name, 1), token_ids, 0, wanted)


def start_recording(engine: StepwiseEngine, *, admit: bool = False) -> EngineRecorder:
    recorder = EngineRecorder(admit_to=engine if admit else None)
    engine.start(recorder)
    return recorder
