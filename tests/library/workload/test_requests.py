import itertools
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaveri.errors import ConfigError
from kaveri.workload.prompts import RequestPrompt
from kaveri.workload.requests import (
    HEAVY_OUTPUT_TOKENS,
    HEAVY_PROMPT_TOKENS,
    RequestLengths,
    Workload,
    WorkloadClass,
    draw_lengths,
    gamma_arrivals,
    plan_requests,
)
from kaveri.workload.traces import read_trace


def _class_of(lengths: RequestLengths) -> WorkloadClass:
    prefill = "HP" if lengths.prompt_tokens > HEAVY_PROMPT_TOKENS else "LP"
    decode = "HD" if lengths.output_tokens > HEAVY_OUTPUT_TOKENS else "LD"
    return WorkloadClass(prefill + decode)


FOUR = [workload for workload in WorkloadClass if workload is not WorkloadClass.MIXED]


@given(st.sampled_from(FOUR), st.integers(513, 5000), st.integers(129, 2000), st.integers(0, 2**32))
def test_a_class_draws_requests_of_that_class_within_the_limits(
    workload: WorkloadClass, most_prompt: int, most_output: int, seed: int
) -> None:
    for lengths in draw_lengths(workload, 5, random.Random(seed), most_prompt, most_output):
        assert _class_of(lengths) is workload
        assert 16 <= lengths.prompt_tokens <= most_prompt
        assert 8 <= lengths.output_tokens <= most_output


def test_mixed_draws_every_class_about_as_often() -> None:
    drawn = Counter(
        _class_of(lengths) for lengths in draw_lengths(WorkloadClass.MIXED, 400, random.Random(3), 1024, 512)
    )
    assert set(drawn) == set(FOUR)
    assert min(drawn.values()) > 70


@pytest.mark.parametrize(
    ("workload", "most_prompt", "most_output", "flag"),
    [
        (WorkloadClass.HPLD, 512, 512, "--max-prompt"),
        (WorkloadClass.LPHD, 1024, 128, "--max-output"),
        (WorkloadClass.LPLD, 15, 512, "--max-prompt"),
        (WorkloadClass.LPLD, 1024, 7, "--max-output"),
    ],
)
def test_limits_that_leave_no_such_request_are_refused(
    workload: WorkloadClass, most_prompt: int, most_output: int, flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        draw_lengths(workload, 1, random.Random(0), most_prompt, most_output)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times_s = gamma_arrivals(20_000, 50.0, burstiness, random.Random(1))
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert times_s == sorted(times_s)
    mean_s = statistics.fmean(gaps_s)
    assert mean_s == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pvariance(gaps_s) / mean_s**2 == pytest.approx(burstiness, rel=0.15)


def test_a_plan_numbers_requests_in_the_order_of_arrival() -> None:
    planned = plan_requests([RequestLengths(5, 6), RequestLengths(7, 8)], [0.0, 1.5])
    assert [(entry.number, entry.arrival_s, entry.lengths.prompt_tokens) for entry in planned] == [
        (0, 0, 5),
        (1, 1.5, 7),
    ]


def test_an_azure_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.6805900,396,109\r\n"
        "2023-11-16 18:16:50.6805900,1,1\r\n"
    )
    trace = read_trace(path, 2)
    assert trace.lengths == [RequestLengths(374, 44), RequestLengths(396, 109)]
    assert trace.times_s == pytest.approx([0.0, 4.0])


def test_a_mooncake_trace_gives_times_and_lengths_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 3000, "input_length": 7, "output_length": 8, "hash_ids": [1]}\n'
        "\n"
        '{"timestamp": 1000, "input_length": 5, "output_length": 6, "hash_ids": []}\n'
    )
    trace = read_trace(path, 10)
    assert (trace.times_s, trace.lengths) == ([0.0, 2.0], [RequestLengths(5, 6), RequestLengths(7, 8)])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1"),
        ("a,b\n1,2\n", "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,6\nyesterday,5,6\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,6\n", "line 2"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 6}\n{"timestamp": 0}\n',
            "line 2: has no 'input_length'",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 6}\nnonsense\n', "line 2"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 6}\n', "line 1: timestamp is nan"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 6}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 1e999, "output_length": 6}\n', "line 1"),
        ('{"timestamp": null, "input_length": 5, "output_length": 6}\n', "line 1"),
    ],
)
def test_a_malformed_trace_is_refused_with_the_line_and_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_trace(path, 10)
    assert complaint in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing", 1)


def test_what_fits_counts_prompt_and_answer_and_keeps_times_and_prompts_together() -> None:
    lengths = [RequestLengths(60, 40), RequestLengths(60, 41), RequestLengths(99, 1), RequestLengths(100, 1)]
    prompts = [RequestPrompt("prompt", str(number)) for number in range(4)]
    fitting = Workload(lengths=lengths, times_s=[0.0, 1.0, 2.0, 3.0], prompts=prompts).fitting(100)
    assert list(fitting.lengths) == [lengths[0], lengths[2]]
    assert list(fitting.times_s) == [0.0, 2.0]
    assert list(fitting.prompts) == [prompts[0], prompts[2]]
    without = Workload(lengths=lengths).fitting(100)
    assert (list(without.times_s), list(without.prompts)) == ([], [])
