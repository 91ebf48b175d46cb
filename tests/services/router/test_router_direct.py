import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog
from grpc import aio
from prometheus_client import REGISTRY

from kaveri.text.tokenizer import ModelTokenizer
from services.router import request_table
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import (
    PROMPT,
    SECRET,
    answer,
    ask,
    ask_again,
    eventually,
    read_tokens,
    rest_of,
    tokens_of,
)

WITHIN_S = 60.0


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    """One prefill and two decode instances, never suspected on a busy machine."""
    async with scripted_cluster(tokenizer, decodes=2, lease_ttl_s=WITHIN_S, place_on="decode-0") as cluster:
        yield cluster


@pytest.mark.parametrize(("logprobs", "offers"), [(None, 1), (0, 0)])
async def test_answers_with_log_probabilities_are_read_at_the_router(
    cluster: ScriptedCluster, logprobs: int | None, offers: int
) -> None:
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 5
    async with cluster.router() as router:
        call = router.stub.Generate(ask(direct=True, secret=SECRET, logprobs=logprobs), timeout=WITHIN_S)
        responses = await read_tokens(call, 5)
        decode.may_step.set()
        responses += await rest_of(call)
    assert sum(response.HasField("tokens_at") for response in responses) == offers
    assert sum(len(response.token_ids) for response in responses) == 20


async def test_a_client_that_reads_at_decode_hears_of_a_copy_at_once(cluster: ScriptedCluster) -> None:
    owner, holder = cluster.decodes["decode-0"], cluster.decodes["decode-1"]
    owner.read_here, owner.pause_at = True, 5
    async with cluster.router() as router:
        call = router.stub.Generate(ask(request_id="one", direct=True, secret=SECRET), timeout=WITHIN_S)
        await eventually(lambda: owner.is_paused and _is_read(router, "one"))
        owner.holder, owner.pause_at = holder, 10
        owner.may_step.set()
        async with asyncio.timeout(20.0):
            while (await call.read()).owner.holder_instance_id != "decode-1":
                pass
        await eventually(lambda: owner.is_paused)
        owner.may_step.set()
        await rest_of(call)


async def test_a_request_whose_reader_was_interrupted_counts_as_a_lost_attempt(cluster: ScriptedCluster) -> None:
    lost, ended = _counts()
    with structlog.testing.capture_logs() as logs:
        async with cluster.router() as router:
            await _interrupt(cluster, router)
    assert _counts() == (lost + 1, ended + 1)
    (line,) = [line for line in logs if line["event"] == "request_interrupted"]
    assert (line["request_id"], line["stage"]) == ("one", "relay")
    assert "decode-0: broken" in line["error"]


async def test_an_interrupted_request_keeps_its_slot_and_accounts_for_the_time_without_a_token(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "SENT_AWAY_GRACE_S", WITHIN_S)
    with structlog.testing.capture_logs() as logs:
        async with cluster.router(max_requests=1, max_reattaches_per_s=1e6) as router:
            received = await _interrupt(cluster, router)
            for other in (ask(request_id="two"), ask_again(received, secret=b"t" * 16)):
                with pytest.raises(aio.AioRpcError, match="1 requests are in flight"):
                    await rest_of(router.stub.Generate(other, timeout=WITHIN_S))
            rest = await rest_of(router.stub.Generate(ask_again(received), timeout=WITHIN_S))
            await rest_of(router.stub.Generate(ask(request_id="two"), timeout=WITHIN_S))
    assert [line["stage"] for line in logs if line["event"] == "request_failed"] == ["reserve", "reserve"]
    assert received + tokens_of(rest) == answer(PROMPT, 20)
    timing = rest[-1].timing
    assert timing.stall_s > 0
    (change,) = [line for line in logs if line["event"] == "owner_changed"]
    assert (change["session"], change["outcome"], change["former_instance_id"]) == (1, "recomputed", "decode-0")
    assert change["stall_s"] == pytest.approx(timing.stall_s, abs=1e-3)


async def test_an_interrupted_request_whose_client_stays_away_gives_its_slot_up(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "SENT_AWAY_GRACE_S", 0.0)
    async with cluster.router(max_requests=1) as router:
        await _interrupt(cluster, router)
        rest = await rest_of(router.stub.Generate(ask(request_id="two"), timeout=WITHIN_S))
    assert tokens_of(rest) == answer(PROMPT, 20)


async def _interrupt(cluster: ScriptedCluster, router: RouterUnderTest) -> list[int]:
    """Lose request "one"'s decode instance while its client may read there. Returns the client's tokens."""
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 5
    call = router.stub.Generate(ask(request_id="one", direct=True, secret=SECRET), timeout=WITHIN_S)
    responses = []
    async with asyncio.timeout(20.0):
        while not (responses and responses[-1].HasField("tokens_at")):
            responses.append(await call.read())
    await eventually(lambda: decode.is_paused)
    decode.fail_next = "broken"
    decode.may_step.set()
    with pytest.raises(aio.AioRpcError, match="lost while its tokens were read"):
        await rest_of(call, responses)
    await eventually(lambda: not len(router.router.table))
    return tokens_of(responses)


def _counts() -> tuple[float, float]:
    lost = REGISTRY.get_sample_value("kaveri_router_lost_attempts_total")
    ended = REGISTRY.get_sample_value("kaveri_router_requests_total", {"outcome": "interrupted"})
    return lost or 0.0, ended or 0.0


def _is_read(router: RouterUnderTest, request_id: str) -> bool:
    entry = router.router.table.get(request_id)
    return entry is not None and entry.direct is not None and entry.direct.read == entry.attempt_number
