"""Ids of requests, attempts and incarnations between prefill, decode and routers."""

from typing import Any

import grpc
import pytest

from kaveri.v1 import decode_pb2, prefill_pb2, sampling_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from tests.services.prompts import prompt
from tests.services.refusals import refuses


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        pytest.param("request_id", "é" * 65, id="request_id-long"),
        ("router_id", ""),
        pytest.param("router_id", "r" * 513, id="router_id-long"),
        ("attempt", 0),
        ("attempt", 2**31),
    ],
)
async def test_names_beyond_their_limits_are_refused_at_both_roles(cluster: Any, field: str, value: object) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    names: dict[str, Any] = {"request_id": "a", "router_id": "router-0", "attempt": 1, field: value}
    names["term"] = term_pb2.Term(attempt=names.pop("attempt"))
    calls = [
        DecodeServiceStub(decode.channel).Reserve(
            decode_pb2.ReserveRequest(token_ids=[1], timeout_s=1.0, **names), timeout=5.0
        ),
        PrefillServiceStub(prefill.channel).Submit(
            prefill_pb2.SubmitRequest(token_ids=[1], timeout_s=1.0, **names), timeout=5
        ),
    ]
    for call in calls:
        with refuses(grpc.StatusCode.INVALID_ARGUMENT, field):
            await call


async def test_a_placement_names_the_life_that_reserved_room(cluster: Any) -> None:
    prefill, decode = await cluster.prefill(), await cluster.decode()
    router = await cluster.router()
    granted = await decode.reserve("by hand", 10)
    await decode.abort("by hand")
    call = router.prefill(prefill, "a", prompt(1, 20), max_tokens=5)
    assert len(await router.answer(call, "a")) == 5
    assert call.get("placed").decode_incarnation == granted.incarnation == router.incarnations["decode-0"] != 0


async def test_a_prompt_that_was_sent_for_an_instance_before_its_restart_is_refused(cluster: Any) -> None:
    prefill = await cluster.prefill()
    message = prefill_pb2.SubmitRequest(
        request_id="a",
        router_id="router-0",
        term=term_pb2.Term(attempt=1),
        token_ids=[1],
        params=sampling_pb2.SamplingParams(max_tokens=1, seed=0, temperature=0.0, top_p=1.0, top_k=0),
        timeout_s=1.0,
        incarnation=1,
    )
    with refuses(grpc.StatusCode.UNAVAILABLE, "restarted"):
        await PrefillServiceStub(prefill.channel).Submit(message, timeout=5)
    message.incarnation = 0
    await PrefillServiceStub(prefill.channel).Submit(message, timeout=5)
