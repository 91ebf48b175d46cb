"""A model runner whose own clock advances by a latency model, and profiles made without measuring."""

from collections.abc import Sequence

from kaveri.engine.stepwise.fake import FakeModel, FakeRunner
from kaveri.engine.stepwise.runner import Drawn, LayerListener, SequenceSlice
from kaveri.latency.machine import Machine
from kaveri.latency.model import DecodeLatency, LatencyModel, PrefillLatency, load_latency_model
from kaveri.latency.profile import (
    DecodePoint,
    FitError,
    PrefillPoint,
    Profile,
    ProfiledEngine,
    Saturation,
    StepTimes,
)

OPT_13B = load_latency_model("opt-13b-a100-tp1")


class ClockedRunner(FakeRunner):
    """Fake runner whose steps advance its own clock by a latency model's time."""

    def __init__(self, latency: LatencyModel, model: FakeModel | None = None) -> None:
        super().__init__(model)
        self._latency = latency
        self.now_s = 0.0
        self.steps: list[list[tuple[int, int]]] = []

    def clock(self) -> float:
        return self.now_s

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        self.now_s += self._latency.step_s([(part.start, len(part.token_ids)) for part in batch])
        self.steps.append([(part.start, part.start + len(part.token_ids)) for part in batch])
        blocks = [block for part in batch for block in part.block_ids]
        assert len(blocks) == len(set(blocks)), "two requests of a step share a block"
        return super().run(batch, on_layer)


def times(seconds: float) -> StepTimes:
    return StepTimes(median_s=seconds, min_s=seconds, max_s=seconds, repeats=1)


def prefill_point(seconds: float, *prompts: tuple[int, int]) -> PrefillPoint:
    return PrefillPoint(prompts=prompts, times=times(seconds))


FAKE_FINGERPRINT = FakeModel(vocab_size=1536).layout.model_fingerprint
"""Of the default fake engine, whose vocabulary is as large as kaveri-tiny's."""


def make_profile(
    chunk_tokens: int = 96,
    engine: str = "fake",
    model_fingerprint: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    latency_model: LatencyModel | None = None,
) -> Profile:
    measured = ProfiledEngine(
        engine=engine,
        model="kaveri-tiny",
        model_fingerprint=model_fingerprint or FAKE_FINGERPRINT,
        dtype=dtype,
        device=device,
    )
    return Profile(
        created="2024-01-18T00:00:00+00:00",
        kaveri="0.1.0",
        engine=measured,
        machine=Machine(cpu="abacus", threads=1, accelerator=""),
        saturation=Saturation(chunk_tokens=chunk_tokens, share=0.95, best_tokens_per_s=1000.0, reached=True),
        latency_model=latency_model
        or LatencyModel(
            name="made-up",
            source="a test",
            prefill=PrefillLatency(step_s=0.01, token_s=0.001, token_squared_s=0.0),
            decode=(DecodeLatency(min_batch=1, step_s=0.01, context_token_s=0.0001, request_s=0.001),),
        ),
        prefill_error=FitError(mean=0.01, largest=0.02),
        decode_error=FitError(mean=0.01, largest=0.02),
        prefill=tuple(prefill_point(0.01 + tokens * 0.001, (0, tokens)) for tokens in (1, 32, 64, 96, 128)),
        decode=(DecodePoint(batch=4, context_tokens=16, times=times(0.0204)),),
    )
