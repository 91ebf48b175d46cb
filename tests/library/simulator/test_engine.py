"""A simulated engine tells what the stepwise engine's own lifecycle tells, to a microsecond."""

import random
from collections.abc import Callable, Sequence

import pytest

from kaveri.engine.stepwise.sequence import SequencePhase
from kaveri.kv.layout.layout import KvLayout
from kaveri.latency.model import load_latency_model
from kaveri.simulator.engine import CountedEngine, EngineListener
from kaveri.simulator.sequence import CountedSequence
from kaveri.simulator.spec import Overheads, PoolSpec
from kaveri.simulator.timeline import Timeline
from tests.library.simulator.reference_engine import ReferenceEngine, ReferenceNews

_CLOSE_S = 1e-6


class _Events(EngineListener):
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.told = ReferenceNews()
        self.drawn = 0
        self.on_first: Callable[[CountedSequence], None] = lambda sequence: None

    def first_token(self, sequence: CountedSequence) -> None:
        self.told.tokens[sequence.number] = [self.timeline.now_s]
        self.on_first(sequence)

    def drew(self, steps: int, gap_count: int, step_s: float, resting: list[CountedSequence]) -> None:
        self.drawn += gap_count

    def drew_some(self, sequences: list[CountedSequence], gap_count: int, step_s: float) -> None:
        self.drawn += gap_count

    def drew_first(self, sequence: CountedSequence, time_s: float) -> None:
        self.told.tokens.setdefault(sequence.number, []).append(time_s)

    def ended(self, sequence: CountedSequence) -> None:
        self.told.ended[sequence.number] = self.timeline.now_s

    def preempted(self, sequence: CountedSequence) -> None:
        self.told.preempted.append((sequence.number, self.timeline.now_s))


class _Both:
    def __init__(self, rng: random.Random, kinds: Sequence[str], is_tight: bool) -> None:
        """kinds: of requests. decode: lands with its KV. prefill: stays once computed. both: decodes once computed."""
        self.rng = rng
        block_tokens = rng.choice((1, 4, 16))
        layout = KvLayout("test", 1, block_tokens, 1, 4, "float32")
        latency = load_latency_model(rng.choice(("opt-13b-a100-tp1", "opt-66b-a100-tp4")))
        total = -(-200 // block_tokens) + rng.randrange(1, 20) if is_tight else 100_000
        chunk_tokens, max_batch = rng.choice((7, 64, 512)), rng.choice((1, 3, 64))
        self.timeline = Timeline()
        self.listener = _Events(self.timeline)
        pool = PoolSpec(
            latency=latency,
            total_blocks=total,
            block_tokens=block_tokens,
            chunk_tokens=chunk_tokens,
            max_batch=max_batch,
        )
        self.engine = CountedEngine(self.timeline, pool, layout, Overheads(), self.listener)
        self.reference = ReferenceEngine(latency, layout, total, chunk_tokens, max_batch)
        self.sequences: dict[int, CountedSequence] = {}
        self.landed: list[int] = []
        self.kinds = kinds
        self.number = 0
        self.listener.on_first = self.adopt

    def go_to(self, time_s: float) -> None:
        self.timeline.run_until(time_s)
        self.timeline.now_s = time_s
        self.reference.advance(time_s)
        self.engine.sync(time_s)
        assert self.engine.free_blocks == self.reference.lifecycle.stats().free_blocks, time_s

    def ask(self) -> None:
        rng, now_s = self.rng, self.timeline.now_s
        if rng.random() < 0.1 and self.sequences:
            number = rng.choice(list(self.sequences))
            if number in self.landed:
                self.landed.remove(number)
            self.engine.end(self.sequences.pop(number))
            self.reference.end(number, now_s)
            return
        self.number += 1
        prompt_tokens, answer_tokens = rng.randrange(1, 100), rng.randrange(2, 90)
        kind = rng.choice(self.kinds)
        if kind == "decode":
            sequence = CountedSequence(self.number, None, prompt_tokens, answer_tokens - 1, SequencePhase.RESERVED)
            fits = self.engine.open(sequence, prompt_tokens + 1)
            assert fits == self.reference.decode(self.number, prompt_tokens, answer_tokens, now_s)
            if fits:
                self.sequences[self.number] = sequence
                self.engine.land(sequence)
                self.landed.append(self.number)
                if rng.random() < 0.7:
                    self.admit_landed()
        else:
            sequence = CountedSequence(self.number, None, prompt_tokens, answer_tokens, SequencePhase.PREFILLING)
            fits = self.engine.open(sequence, prompt_tokens)
            assert fits == self.reference.prefill(self.number, prompt_tokens, answer_tokens, now_s)
            if fits:
                self.sequences[self.number] = sequence
                if kind == "both":
                    sequence.owner = kind
                    self.reference.adopts.add(self.number)
                self.engine.prefill(sequence)

    def adopt(self, sequence: CountedSequence) -> None:
        if sequence.owner == "both":
            self.landed.append(sequence.number)
            if not self.engine.adopt(sequence):
                self.listener.preempted(sequence)

    def admit_landed(self) -> None:
        for number in self.landed:
            self.engine.admit(self.sequences[number])
            self.reference.admit(number, self.timeline.now_s)
        self.landed.clear()

    def compare(self) -> None:
        ours, theirs = self.listener.told, self.reference.told
        assert ours.tokens.keys() == theirs.tokens.keys()
        for number, times in ours.tokens.items():
            assert times[0] == pytest.approx(theirs.tokens[number][0], abs=_CLOSE_S), number
        assert ours.ended == pytest.approx(theirs.ended, abs=_CLOSE_S)
        assert [number for number, _ in ours.preempted] == [number for number, _ in theirs.preempted]
        for (_, our_s), (_, their_s) in zip(ours.preempted, theirs.preempted, strict=True):
            assert our_s == pytest.approx(their_s, abs=_CLOSE_S)


@pytest.mark.parametrize("is_tight", [False, True], ids=["ample", "tight"])
@pytest.mark.parametrize(
    "kinds", [("decode",), ("prefill",), ("decode", "prefill"), ("both",), ("decode", "prefill", "both")], ids="+".join
)
def test_every_token_comes_when_the_stepwise_engine_draws_it(kinds: Sequence[str], is_tight: bool) -> None:
    preemptions = 0
    for seed in range(25):
        both = _Both(random.Random(seed), kinds, is_tight)
        now_s = 0.0
        for _ in range(40):
            now_s += both.rng.expovariate(1 / both.rng.choice((0.001, 0.05, 0.4)))
            both.go_to(now_s)
            both.ask()
        both.admit_landed()
        both.go_to(now_s + 1000.0)
        both.compare()
        preemptions += len(both.listener.told.preempted)
    if "decode" in kinds and is_tight:
        assert preemptions > 20, "the schedules are not tight"
