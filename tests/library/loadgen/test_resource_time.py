from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kaveri.client.answer import ServerTiming
from kaveri.domain.view import Phase
from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.loadgen.report import columns_of
from kaveri.workload.requests import PlannedRequest, RequestLengths
from kaveri.workload.resource_time import Phases, ResourceTime, covered_s, resource_times


def answered(
    first_s: float,
    last_s: float,
    prefill: tuple[str, float, float],
    decode: tuple[str, float, float],
    error: str | None = None,
) -> RequestRecord:
    """prefill, decode: instance id, seconds in its queue, seconds of computation."""
    server = ServerTiming(
        router_s=0.0,
        prefill_queue_s=prefill[1],
        prefill_s=prefill[2],
        kv_transfer_s=0.0,
        kv_tail_s=0.0,
        decode_queue_s=decode[1],
        decode_s=decode[2],
        kv_bytes=0,
        kv_transport="",
        prefill_instance_id=prefill[0],
        decode_instance_id=decode[0],
        attempts=1,
        ttft_s=0.0,
        e2e_s=0.0,
    )
    planned = PlannedRequest(0, 0.0, RequestLengths(10, 10))
    return RequestRecord(planned, 0.0, 0.0, [first_s, last_s], 10, error=error, server=server)


PREFILL, DECODE = (Phase.PREFILL,), (Phase.DECODE,)
RECORDS = (
    answered(2.0, 5.0, ("p0", 0.5, 0.5), ("d0", 0.0, 2.0)),  # p0 [1, 2]  d0 [3, 5]
    answered(2.5, 6.0, ("p0", 0.5, 0.5), ("d0", 0.5, 1.5)),  # p0 [1.5, 2.5]  d0 [4, 6]
    answered(2.0, 9.0, ("p1", 0.0, 1.0), ("d1", 0.0, 1.0)),  # p1 [1, 2]  d1 [8, 9]
    answered(7.0, 7.0, ("p1", 0.0, 1.0), ("", 0.0, 0.0)),  # p1 [6, 7], and no decode at all
)


def times_of(
    records: tuple[RequestRecord, ...], duration_s: float, phases: Mapping[str, Phases]
) -> dict[Phases, ResourceTime]:
    return resource_times(columns_of(LoadRun(records, duration_s, ())), phases)


def test_overlapping_requests_count_once_and_the_instances_of_a_phase_add_up() -> None:
    times = times_of(RECORDS, 10.0, {})
    assert times == {
        PREFILL: ResourceTime(instances=2, busy_s=1.5 + 2.0, held_s=20.0),
        DECODE: ResourceTime(instances=2, busy_s=3.0 + 1.0, held_s=20.0),
    }


def test_an_instance_that_had_nothing_to_do_is_held_all_the_same() -> None:
    phases = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE, "d2": DECODE}
    times = times_of(RECORDS, 10.0, phases)
    assert times[DECODE] == ResourceTime(instances=3, busy_s=4.0, held_s=30.0)


def test_an_instance_of_both_phases_is_busy_with_either_and_counts_once() -> None:
    both = (answered(2.0, 4.0, ("c0", 0.0, 1.0), ("c0", 0.0, 2.5)),)  # [1, 2] and [1.5, 4]
    for phases in ({}, {"c0": tuple(Phase)}):
        times = times_of(both, 5.0, phases)
        assert times == {tuple(Phase): ResourceTime(instances=1, busy_s=3.0, held_s=5.0)}


def test_failed_requests_are_left_out() -> None:
    lost = (answered(2.0, 4.0, ("p0", 0.0, 1.0), ("d0", 0.0, 2.0), error="Unavailable"),)
    assert times_of(lost, 5.0, {"d0": DECODE}) == {DECODE: ResourceTime(1, 0.0, 5.0)}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair)))))
def test_the_covered_time_is_that_of_all_seconds_within_any_span(spans: list[tuple[int, int]]) -> None:
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert covered_s(np.array(spans, dtype=np.float64).reshape(-1, 2)) == len(seconds)
