from typing import Any

import numpy as np
import pytest

from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.loadgen.report import Slo, columns_of, rows, summarize
from kaveri.workload.requests import PlannedRequest, RequestLengths
from kaveri.workload.summary import over_runs, spread


def record(
    number: int,
    due_s: float,
    first_s: float,
    last_s: float,
    tokens: int,
    sent_late_s: float = 0.0,
    error: str | None = None,
) -> RequestRecord:
    planned = PlannedRequest(number, due_s, RequestLengths(10, max(1, tokens)))
    arrivals_s = np.linspace(first_s, last_s, tokens).tolist()
    return RequestRecord(planned, due_s, due_s + sent_late_s, arrivals_s, tokens, error)


RECORDS = (
    record(0, 0.0, 0.2, 1.2, 11),  # TTFT 0.2, TPOT 0.1
    record(1, 1.0, 2.0, 3.0, 11),  # TTFT 1.0, TPOT 0.1
    record(2, 1.0, 1.2, 3.2, 11),  # TTFT 0.2, TPOT 0.2
    record(3, 2.0, 2.1, 2.1, 1),  # TTFT 0.1, no TPOT
    record(4, 2.0, 0.0, 0.0, 0, error="NoCapacity"),
)


def test_latencies_are_of_the_answered_and_count_from_the_moment_a_request_was_due() -> None:
    report = summarize(LoadRun(RECORDS, 4.0, (0.001,)), Slo())
    assert (report["requests"], report["answered"], report["errors"]) == (5, 4, {"NoCapacity": 1})
    assert report["ttft_s"]["mean"] == pytest.approx((0.2 + 1.0 + 0.2 + 0.1) / 4)
    assert report["tpot_s"]["max"] == pytest.approx(0.2)
    assert report["jct_s"]["p50"] == pytest.approx(1.2)
    assert (report["itl_s"]["p50"], report["itl_s"]["max"]) == pytest.approx((0.1, 0.2))
    assert report["output_tokens_per_s"] == pytest.approx(34 / 4.0)
    assert report["requests_per_s"] == 1.0
    assert report["slo_attainment"] is None


def test_the_rate_is_that_at_which_requests_were_really_sent() -> None:
    late = (record(0, 0.0, 0.2, 0.2, 1), record(1, 1.0, 5.0, 5.0, 1), record(2, 2.0, 5.0, 5.0, 1, sent_late_s=2.0))
    assert summarize(LoadRun(late, 6.0, ()), Slo())["offered_per_s"] == pytest.approx(2 / 4.0)
    assert summarize(LoadRun(late[:1], 6.0, ()), Slo())["offered_per_s"] is None


def test_slos_are_met_together_and_a_failed_request_misses_them() -> None:
    report = summarize(LoadRun(RECORDS, 4.0, ()), Slo(ttft_s=0.5, tpot_s=0.15))
    assert report["slo_attainment"] == pytest.approx(2 / 5), "the first, and the one without a TPOT"
    assert report["goodput_requests_per_s"] == pytest.approx(0.5)
    assert summarize(LoadRun(RECORDS, 4.0, ()), Slo(ttft_s=0.5))["slo_attainment"] == pytest.approx(3 / 5)
    assert summarize(LoadRun(RECORDS, 4.0, ()), Slo(tpot_s=0.15))["slo_attainment"] == pytest.approx(3 / 5)


def test_a_client_that_sends_late_or_whose_loop_is_late_says_so() -> None:
    on_time = (record(0, 0.0, 0.2, 0.2, 1),)
    late = (record(0, 0.0, 0.2, 0.2, 1, sent_late_s=0.05),)
    assert summarize(LoadRun(on_time, 1.0, (0.001,)), Slo())["client"]["kept_schedule"]
    assert not summarize(LoadRun(late, 1.0, (0.001,)), Slo())["client"]["kept_schedule"]
    assert not summarize(LoadRun(on_time, 1.0, (0.05,)), Slo())["client"]["kept_schedule"]


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 201)]
    assert spread(values[::-1]) == {"mean": 100.5, "p50": 100.0, "p90": 180.0, "p99": 198.0, "max": 200.0}
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert spread([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert spread([]) is None


def test_figures_of_several_runs_have_a_median_a_least_and_a_greatest_value() -> None:
    runs: list[dict[str, Any]] = [
        {"answered": 5, "kept": True, "ttft_s": {"p50": 1.0}, "tpot_s": None, "model": "m"},
        {"answered": 9, "kept": True, "ttft_s": {"p50": 4.0}, "tpot_s": {"p50": 0.5}, "model": "m"},
        {"answered": 6, "kept": False, "ttft_s": None, "tpot_s": {"p50": 0.7}, "model": "m"},
    ]
    assert over_runs(runs) == {
        "answered": {"median": 6, "min": 5, "max": 9},
        "ttft_s": {"p50": {"median": 2.5, "min": 1.0, "max": 4.0}},
        "tpot_s": {"p50": {"median": 0.6, "min": 0.5, "max": 0.7}},
    }


def test_a_client_that_sends_late_hides_nothing_of_the_wait() -> None:
    late = record(0, 1.0, 4.0, 6.0, 11, sent_late_s=2.0)
    run = LoadRun((late,), 6.0, ())
    assert Slo(ttft_s=3.0).met(columns_of(run)).all()
    assert not Slo(ttft_s=2.9).met(columns_of(run)).any()
    (row,) = rows(run)
    assert (row["due_s"], row["sent_s"]) == (1.0, 3.0)
    assert [row[name] for name in ("ttft_s", "jct_s", "tpot_s")] == pytest.approx([3.0, 5.0, 0.2])
