import pytest

from kaveri.cli.trace import render, time_line
from kaveri.v1 import cluster_pb2, inference_pb2

_STEP = cluster_pb2.RequestStep
ACCOUNT = cluster_pb2.GetRequestAccountResponse(
    router_instance_id="router-0",
    outcome="length",
    ago_s=3.0,
    prompt_tokens=100,
    completion_tokens=20,
    timing=inference_pb2.Timing(
        router_s=0.002,
        prefill_queue_s=0.010,
        prefill_s=0.100,
        kv_transfer_s=0.090,
        kv_tail_s=0.005,
        kv_transport="unix",
        decode_queue_s=0.020,
        decode_s=0.400,
        prefill_instance_id="prefill-0",
        decode_instance_id="decode-1",
        attempts=1,
        ttft_s=0.112,
        e2e_s=0.537,
    ),
    steps=[_STEP(at_s=0.002, event="attempt 1 to prefill-0")],
)


def test_the_parts_follow_one_another_and_the_push_overlaps_the_prompt() -> None:
    parts = {(part.where, part.what): (part.begin_s, part.end_s) for part in time_line(ACCOUNT)}
    assert parts == {
        ("router-0", "until it was sent"): pytest.approx((0.0, 0.002)),
        ("prefill-0", "queue"): pytest.approx((0.002, 0.012)),
        ("prefill-0", "push by unix"): pytest.approx((0.027, 0.117)),
        ("prefill-0", "prompt"): pytest.approx((0.012, 0.112)),
        ("decode-1", "waits for the batch"): pytest.approx((0.117, 0.137)),
        ("decode-1", "decode"): pytest.approx((0.137, 0.537)),
    }


def test_a_later_attempt_is_shown_from_where_it_was_sent() -> None:
    account = cluster_pb2.GetRequestAccountResponse()
    account.CopyFrom(ACCOUNT)
    account.steps.add(at_s=0.050, event="lost prefill-1: it sent nothing for 0.5 s")
    account.steps.add(at_s=0.060, event="attempt 2 to prefill-0")
    begins = {part.what: part.begin_s for part in time_line(account)}
    assert begins["queue"] == pytest.approx(0.060)
    assert begins["prompt"] == pytest.approx(0.070)


def test_an_error_with_the_word_to_in_it_is_not_taken_for_an_attempt() -> None:
    account = cluster_pb2.GetRequestAccountResponse()
    account.CopyFrom(ACCOUNT)
    account.steps.add(at_s=0.300, event="lost decode-0: failed to connect to all addresses")
    account.steps.add(at_s=0.310, event="attempt 2 resumed at decode-1")
    assert {part.what: part.begin_s for part in time_line(account)}["queue"] == pytest.approx(0.002)


def test_what_began_before_the_last_session_came_begins_before_it() -> None:
    account = cluster_pb2.GetRequestAccountResponse(
        router_instance_id="router-1",
        session=1,
        outcome="length",
        timing=inference_pb2.Timing(decode_queue_s=0.1, decode_s=2.0, decode_instance_id="decode-0", e2e_s=0.5),
    )
    parts = {part.what: (part.begin_s, part.end_s) for part in time_line(account)}
    assert parts["decode"] == pytest.approx((-1.5, 0.5))
    assert parts["waits for the batch"] == pytest.approx((-1.6, -1.5))
    assert max(map(len, render("a-request", account).splitlines())) < 100


def test_the_text_has_each_step_and_each_part() -> None:
    text = render("a-request", ACCOUNT)
    assert text.splitlines()[0] == "a-request: length, 3.0 s ago; 100 prompt tokens, 20 generated"
    for shown in ("first token after 112.0 ms", "attempt 1 to prefill-0", "push by unix", "400.0 ms  decode"):
        assert shown in text
    assert max(map(len, text.splitlines())) < 100


def test_a_request_without_a_token_has_a_time_line_too() -> None:
    text = render("early", cluster_pb2.GetRequestAccountResponse(router_instance_id="router-0", ago_s=0.5))
    assert text.startswith("early: in flight for 0.5 s; 0 prompt tokens, 0 generated")
