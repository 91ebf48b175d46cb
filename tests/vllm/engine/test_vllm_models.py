"""Models on the vLLM engine: logits that are NaN, and the LongRoPE factors that vLLM picks."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest, RequestFailed
from kaveri.errors import ConfigError
from kaveri.hosting.trial import Trial
from kaveri.testing.engine_conformance import make_request
from kaveri.testing.engine_recorder import SOON_S, wait_until_free
from tests.support.engine_process import EngineProcess, vllm_process
from tests.support.engine_suite import start_adopting
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

# Each process loads vLLM.
pytestmark = pytest.mark.timeout(300)

_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_SHAPE = {"max_positions": 256, "hidden_size": 128, "head_dim": 32}


@pytest.fixture
def load() -> Iterator[Callable[..., EngineProcess]]:
    """Return a function that loads a model in a process of its own, which ends with the test."""
    pytest.importorskip("vllm")
    with ExitStack() as stack:

        def start(folder: Path, max_model_len: int | None = 128) -> EngineProcess:
            process = vllm_process(
                folder,
                max_model_len=max_model_len or 0,
                kv_cache_memory=2**24,
                max_batch=4,
                engine_args={"num_gpu_blocks_override": 33},
            )
            stack.callback(process.close)
            return process

        yield start


def test_request_whose_logits_are_not_finite_fails_alone(load: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path, "qwen2", **_SHAPE)
    whole = PlainTransformers(folder).answer(_PROMPT, 12)
    # Nothing is finite after this token of the answer.
    index = next(index for index, token_id in enumerate(whole) if index > 1 and token_id not in _PROMPT)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][whole[index]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    engine = load(folder).open(total_blocks=32, max_batch=4)
    recorder = start_adopting(engine)

    def request_of(name: str, prompt: tuple[int, ...], max_tokens: int = 12, **params: float) -> EngineRequest:
        return replace(make_request(engine, name, 8, max_tokens, **params), token_ids=prompt)

    drawing, neighbour = request_of("drawing", _PROMPT), request_of("neighbour", _PROMPT, index + 1)
    reading = request_of("reading", (*_PROMPT[:-1], whole[index]))
    sampled = request_of("sampled", (whole[index], *_PROMPT), temperature=1.0)
    for request in (drawing, reading, neighbour, sampled):
        engine.prefill(request)
    for request in (drawing, reading, sampled):
        assert "NaN" in recorder.wait_for(RequestFailed, request.key).reason
    assert recorder.token_ids[drawing.key] == whole[: index + 1]
    assert reading.key not in recorder.token_ids
    assert sampled.key not in recorder.token_ids
    recorder.wait_for_finish(neighbour.key)
    assert recorder.token_ids[neighbour.key] == whole[: index + 1]
    wait_until_free(engine)
    engine.close()


def test_ends_that_no_token_has_change_nothing_as_in_generate(load: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, "qwen2", **_SHAPE)
    first = PlainTransformers(folder).answer(_PROMPT, 1)[0]
    # The fourth id is the first that it would draw; the others are outside its vocabulary of 320.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [320, 2**40, -1, first]}))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    whole = plain.generate(torch.tensor([_PROMPT]), min_new_tokens=8, max_new_tokens=8, do_sample=False)

    engine = load(folder).open(total_blocks=32, max_batch=4)
    recorder = start_adopting(engine)
    params = ResolvedParams(max_tokens=8, min_tokens=8, temperature=0, seed=0)
    request = EngineRequest(EngineKey("one", 0), _PROMPT, 0, params)
    engine.prefill(request)
    recorder.wait_for_finish(request.key)
    assert recorder.token_ids[request.key] == whole[0, len(_PROMPT) :].tolist()
    wait_until_free(engine)
    engine.close()


def test_kv_of_longropes_two_sets_of_factors_is_never_exchanged(load: Any, tmp_path: Path) -> None:
    half = 16
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 64,
    }
    folder = make_tiny_model(
        tmp_path,
        "phi3",
        **{name: value for name, value in _SHAPE.items() if name != "head_dim"},
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=rope | {"partial_rotary_factor": 1.0},
        original_max_position_embeddings=64,
        pad_token_id=0,
    )
    fingerprints = {
        length: load(folder, length).open(total_blocks=32, max_batch=1).info.layout.model_fingerprint
        for length in (40, 64, 100, None)
    }
    assert fingerprints[40] == fingerprints[64] == fingerprints[None]
    assert fingerprints[100] != fingerprints[64]


async def test_model_that_vllm_cannot_run_is_found_out_by_the_trial(load: Any, tmp_path: Path) -> None:
    # vLLM's attention on CPUs has no kernel for heads of 24, which it notices in its first step.
    folder = make_tiny_model(tmp_path, "qwen3", max_positions=256, hidden_size=96, head_dim=24)
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(load(folder).open, total_blocks=32, max_batch=4)
    trial = Trial(engine, decodes=True)
    engine.start(lambda events: loop.call_soon_threadsafe(trial.handle, events))
    with pytest.raises(ConfigError, match="cannot run this model"):
        await asyncio.wait_for(trial.run(), SOON_S)
