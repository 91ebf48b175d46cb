"""Requests that no pool can hold are refused at once; a stalled push does not block others for long."""

import asyncio
from typing import Any

import grpc
import pytest

from kaveri.domain.sampling import SamplingParams
from kaveri.policy.admission import AdmissionPolicy
from kaveri.policy.decode_room import MAX_OVERTAKES
from kaveri.v1 import predictor_pb2
from kaveri.wire.messages import params_to_proto
from tests.services.conftest import TIGHT, eventually
from tests.services.refusals import refuses

pytestmark = pytest.mark.usefixtures("fake_blocks")


def answer_of(length: int) -> dict[str, Any]:
    return {
        "params": params_to_proto(SamplingParams(max_tokens=length, seed=0)),
        "predicted_length": predictor_pb2.PredictedLength(low=length, high=length + 1),
    }


async def test_a_request_that_no_decode_pool_can_hold_is_refused_with_the_limit(cluster: Any) -> None:
    prefill = await cluster.prefill()
    for number in range(2):
        await cluster.decode(f"decode-{number}", **TIGHT)
    router = await cluster.router()
    # 200 tokens are more than the pool has, 160 more than prompt and answer may have.
    for token_count, fits in ((159, True), (160, False), (200, False)):
        token_ids = [7] * token_count
        call = router.prefill(prefill, f"r{token_count}", token_ids, max_tokens=200, timeout_s=60.0)
        if fits:
            await call.ended()
            assert call.seen("handed_over")
            continue
        with refuses(grpc.StatusCode.INVALID_ARGUMENT, f"{token_count} tokens", "159 tokens"):
            await call.ended()
    await cluster.all_free()


async def test_a_reservation_that_can_never_fit_gets_no_place_in_line(cluster: Any) -> None:
    decode = await cluster.decode(**TIGHT)
    await cluster.router()
    await decode.reserve("taken", 79)
    waits = asyncio.create_task(decode.reserve("large", 127, wait=True))
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 1, "it waits")
    # Freed blocks are kept for a request that has waited.
    for number in range(MAX_OVERTAKES):
        await decode.reserve(f"overtakes {number}", 1)
        await decode.abort(f"overtakes {number}")
        await eventually(lambda: decode.held_blocks == 5, "its block is free")
    with refuses(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await decode.reserve("fits", 1)
    with refuses(grpc.StatusCode.INVALID_ARGUMENT, "159"):
        await decode.reserve("hopeless", 160, wait=True)
    assert decode.metric("kaveri_decode_line_requests") == 1
    waits.cancel()
    await eventually(lambda: decode.metric("kaveri_decode_line_requests") == 0, "it waits no more")
    await decode.abort("taken")
    await cluster.all_free()


async def test_a_reservation_whose_push_stands_still_keeps_blocks_from_others_for_a_short_time_only(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.policy.admission.UNLANDED_KEEPS_S", 1.0)
    decode = await cluster.decode(decode_policy=AdmissionPolicy.RESERVE_STATIC, **TIGHT)
    await cluster.router()
    # It holds 2 of 12 blocks, and is expected to end with 9.
    await decode.reserve("frozen", 30, **answer_of(100))
    assert decode.held_blocks == 2
    assert decode.load().free_blocks == 12 - 9
    with refuses(grpc.StatusCode.RESOURCE_EXHAUSTED):
        await decode.reserve("other", 60, **answer_of(1))
    await eventually(lambda: decode.load().free_blocks == 10, "nothing is kept for it any more", 5.0)
    await decode.reserve("other", 60, **answer_of(1))
    for request_id in ("frozen", "other"):
        await decode.abort(request_id)
    await cluster.all_free()
