"""`kaveri plan --recorded`: requests come in the trace's order and with its gaps, scaled to the rate."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kaveri.cli.main import main
from kaveri.planner.expected_load import ExpectedLoad, recorded_rate_per_s
from kaveri.planner.parallelism import Parallelism
from kaveri.planner.placement_search import search_prefill
from kaveri.planner.profiles import read_step_latencies
from kaveri.workload.requests import RequestLengths
from tests.library.planner.test_plan import A100, OPT_13B, question_of

TIMES_S = (0.0, 0.1, 0.2, 4.0, 4.0, 9.9)
LOAD = ExpectedLoad(
    lengths=[RequestLengths(10 + number, 5) for number in range(len(TIMES_S))], rate_per_s=1.0, recorded_s=TIMES_S
)


@pytest.mark.parametrize("seed", range(8))
def test_requests_come_in_the_recorded_order_with_the_recorded_gaps(seed: int) -> None:
    drawn = LOAD.draw(60, 1.0, seed)
    first = drawn[0].lengths.prompt_tokens - 10
    assert [one.lengths.prompt_tokens - 10 for one in drawn] == [(first + number) % 6 for number in range(60)]
    scale = recorded_rate_per_s(TIMES_S)
    for earlier, later in itertools.pairwise(drawn):
        number = earlier.lengths.prompt_tokens - 10
        gap_s = TIMES_S[number + 1] - TIMES_S[number] if number < 5 else 9.9 / 5
        assert later.arrival_s - earlier.arrival_s == pytest.approx(gap_s * scale)


def test_seeds_begin_at_other_requests() -> None:
    assert len({LOAD.draw(60, 1.0, seed)[0].lengths for seed in range(40)}) == len(TIMES_S)


def test_the_rate_scales_all_gaps_and_changes_nothing_else() -> None:
    slow, fast = LOAD.draw(60, 1.0, 3), LOAD.draw(60, 4.0, 3)
    assert len(fast) == 240
    assert [one.lengths for one in slow] == [one.lengths for one in fast[:60]]
    assert [one.arrival_s / 4 for one in slow] == pytest.approx([one.arrival_s for one in fast[:60]])
    whole_rounds = LOAD.draw(601, 4.0, 3)
    assert 600 / whole_rounds[-1].arrival_s == pytest.approx(4.0)


def test_an_instance_carries_less_of_what_comes_in_bursts() -> None:
    step = read_step_latencies(["opt-13b-a100"], OPT_13B, A100, [1])[1]

    def goodput_per_s(recorded_s: Sequence[float]) -> float:
        load = ExpectedLoad(lengths=[RequestLengths(900, 8)] * 200, rate_per_s=1.0, recorded_s=recorded_s)
        question = question_of(demand=load, ttft_s=0.6, request_count=60, max_batch=64, chunk_tokens=512)
        return search_prefill(question, Parallelism(1, 1), step).goodput_per_s

    in_bursts = goodput_per_s([number // 20 * 20 + number % 20 * 0.02 for number in range(200)])
    assert 0 < in_bursts < goodput_per_s(range(200)) / 2


def test_a_plan_has_the_rate_of_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "own.jsonl"
    lengths = [300] * 40 + [5_000]
    rows = [
        {"timestamp": number * 2_000, "input_length": tokens, "output_length": 300}
        for number, tokens in enumerate(lengths)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--profile", "opt-13b-a100", "--gpus", "2", "--slo-ttft-s", "0.6", "--slo-tpot-s", "0.1"]
    flags += ["--prefill-tp-pp", "1,1", "--decode-tp-pp", "1,1", "--requests", "10", "--json"]
    monkeypatch.setattr(sys, "argv", ["kaveri", "plan", *flags, "--trace", str(trace), "--recorded"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["arrivals"], found["rate_per_s"], found["too_long"]) == ("recorded", 0.5, 1)
