"""On a CUDA device vLLM draws what it draws on the CPU, and instances answer what one plain engine answers."""

import asyncio
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="pip install 'kaveri[vllm]' installs it")

import torch

from kaveri import AsyncClient
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.vllm.draws import Draw, keep_drawn
from tests.support.bare_vllm import bare_vllm_answers
from tests.support.local_cluster import run_cluster
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

VOCAB_SIZE = 320
CHUNK_TOKENS = 256
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256, 257, 400, 511, 512, 513, 777, 900, 1000)


def random_params(rng: random.Random, max_tokens: int) -> ResolvedParams:
    return ResolvedParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_k=rng.choice([0, 40]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(2**64),
        ignore_eos=True,
    )


def test_the_device_draws_the_tokens_that_the_host_draws() -> None:
    rng = random.Random(1)
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(1)) * 2
    placed = [(row, Draw(random_params(rng, 9), 0, 0), rng.randrange(100)) for row in range(len(logits))]
    here, there = logits.clone(), logits.cuda()
    keep_drawn(here, placed)
    keep_drawn(there, placed)
    assert there.argmax(-1).tolist() == here.argmax(-1).tolist()


class Case(NamedTuple):
    model: Path
    dtype: str
    prompts: list[tuple[int, ...]]
    params: list[ResolvedParams]
    expected: list[tuple[int, ...]]
    chunk_tokens: int = CHUNK_TOKENS
    graphs: bool = False

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings of a cluster whose instances with an engine have this role."""
        flags = ("--chunk-tokens", str(self.chunk_tokens), "--block-tokens", "32")
        return {
            "model": str(self.model),
            "engine": "vllm",
            "dtype": self.dtype,
            "kv_cache_memory": "64MiB",
            "start_timeout_s": 600.0,
            **({"engine_args": '{"enforce_eager": false}'} if self.graphs else {}),
            **{f"{each}_flags": flags for each in role.split()},
        }

    async def require_exact(self, client: AsyncClient) -> None:
        answers = await asyncio.gather(
            *(
                client.generate(prompt_token_ids=prompt, params=each, timeout_s=200)
                for prompt, each in zip(self.prompts, self.params, strict=True)
            )
        )
        assert [answer.token_ids for answer in answers] == self.expected


def make_case(
    folder: Path,
    architecture: str,
    dtype: str = "float32",
    chunk_tokens: int = CHUNK_TOKENS,
    graphs: bool = False,
    **sizes: int,
) -> Case:
    """Make a model and requests with prompts of LENGTHS. graphs: torch.compile and CUDA graphs on both sides."""
    sizes = {"hidden_size": 256} | ({"word_embed_proj_dim": 256} if architecture == "opt" else {}) | sizes
    model = make_tiny_model(folder, architecture, vocab_size=VOCAB_SIZE, tokenizer=True, **sizes)
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in LENGTHS]
    params = [random_params(rng, 24) for _ in prompts]
    plain = {"max_num_batched_tokens": chunk_tokens, "gpu_memory_utilization": 0.1, "enforce_eager": not graphs}
    expected = bare_vllm_answers(model, prompts, params, dtype=dtype, **plain)
    return Case(model, dtype, prompts, params, expected, chunk_tokens, graphs)


@pytest.fixture
def exact_sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make sums independent of the batch, for the dtype of the parameter, in Kaveri's and the plain engine's processes.

    Without TRITON_F32_DEFAULT vLLM's attention in float32, a kernel in Triton, multiplies in TF32: docs/vllm.md.
    """
    dtype: str = request.param
    name, value = {"float32": ("TRITON_F32_DEFAULT", "ieee"), "bfloat16": ("VLLM_BATCH_INVARIANT", "1")}[dtype]
    monkeypatch.setenv(name, value)
    return dtype


SPLIT = {"prefill_count": 1, "decode_count": 2}
COLOCATED = {"prefill_count": 0, "decode_count": 0, "colocated_count": 1}
# Room for all prompts in one step: with smaller chunks plain engines differ from one another in bfloat16, too.
BFLOAT16 = {"chunk_tokens": 2 * sum(LENGTHS), "num_attention_heads": 4}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("exact_sums", "architecture", "options", "layout"),
    [
        ("float32", "llama", {}, SPLIT),
        ("float32", "qwen2", {}, SPLIT),
        ("float32", "opt", {}, SPLIT),
        ("float32", "llama", {}, COLOCATED),
        ("float32", "llama", {"graphs": True}, SPLIT),
        ("float32", "llama", {"graphs": True}, COLOCATED),
        ("bfloat16", "llama", BFLOAT16, SPLIT),
        ("bfloat16", "llama", BFLOAT16, COLOCATED),
    ],
    indirect=["exact_sums"],
)
async def test_answers_equal_one_plain_engine_on_the_same_device(
    tmp_path: Path, exact_sums: str, architecture: str, options: dict[str, Any], layout: dict[str, int]
) -> None:
    case = make_case(tmp_path, architecture, exact_sums, **options)
    async with (
        run_cluster(**layout, **case.settings("prefill decode colocated")) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        await case.require_exact(client)
        if not options:
            await case.require_exact(client)
