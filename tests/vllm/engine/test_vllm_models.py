"""Models on the vLLM engine: logits that are NaN, and the LongRoPE factors that vLLM picks."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineEvent, EngineKey, EngineRequest, FirstToken, RequestFailed
from kaveri.errors import ConfigError
from kaveri.hosting.trial import Trial
from kaveri.testing.engine_conformance import make_request
from kaveri.testing.engine_recorder import SOON_S, EngineRecorder, wait_until_free
from tests.support.engine_process import EngineProcess
from tests.support.plain_transformers import PlainTransformers
from tests.support.tiny_models import make_tiny_model

# Each process loads vLLM.
pytestmark = pytest.mark.timeout(300)

_PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
_SHAPE = {"max_positions": 256, "hidden_size": 128, "head_dim": 32}


@pytest.fixture
def load() -> Iterator[Callable[..., EngineProcess]]:
    """Loads a model in a process of its own; ended with the test."""
    pytest.importorskip("vllm")
    with ExitStack() as stack:

        def start(folder: Path, max_model_len: int | None = 128) -> EngineProcess:
            loading = {
                "dtype": "float32",
                "max_model_len": max_model_len or 0,
                "block_tokens": 32,
                "kv_cache_memory": 2**24,
                "chunk_tokens": 16,
                "max_batch": 4,
                "engine_args": {"num_gpu_blocks_override": 33},
            }
            process = EngineProcess(
                # Only where vLLM is installed.
                __import__("tests.support.vllm_engines", fromlist=["prepare"]).prepare,
                str(folder),
                loading,
                preload=["tests.support.imported_vllm", "tests.support.vllm_engines"],
                VLLM_CPU_OMP_THREADS_BIND="nobind",
                OMP_NUM_THREADS="1",
                VLLM_LOGGING_LEVEL="ERROR",
                VLLM_ENABLE_V1_MULTIPROCESSING="0",
            )
            stack.callback(process.close)
            return process

        yield start


def test_request_whose_logits_are_not_finite_fails_alone(load: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path, "qwen2", **_SHAPE)
    whole = PlainTransformers(folder).answer(_PROMPT, 12)
    # Nothing is finite behind this token, which the answer draws.
    index = next(index for index, token_id in enumerate(whole) if index > 1 and token_id not in _PROMPT)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][whole[index]] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    engine = load(folder).open(total_blocks=32, max_batch=4)

    def adopt(event: EngineEvent) -> None:
        if isinstance(event, FirstToken) and event.finish is None:
            engine.adopt(event.key)
            engine.admit(event.key)

    recorder = EngineRecorder(on_event=adopt)
    engine.start(recorder)
    drawing = make_request(engine, "drawing", 8, 12)
    reading = make_request(engine, "reading", 8, 12)
    sampled = make_request(engine, "sampled", 8, 12, temperature=1.0)
    drawing = type(drawing)(drawing.key, _PROMPT, 0, drawing.params)
    neighbour = type(drawing)(make_request(engine, "neighbour", 8, 3).key, _PROMPT, 0, drawing.params)
    neighbour = type(drawing)(neighbour.key, _PROMPT, 0, make_request(engine, "n", 8, index + 1).params)
    reading = type(drawing)(reading.key, (*_PROMPT[:-1], whole[index]), 0, reading.params)
    sampled = type(drawing)(sampled.key, (whole[index], *_PROMPT), 0, sampled.params)
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
    # As the fourth, a token that it would draw first; the others are none of its 320.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [320, 2**40, -1, first]}))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    whole = plain.generate(torch.tensor([_PROMPT]), min_new_tokens=8, max_new_tokens=8, do_sample=False)

    engine = load(folder).open(total_blocks=32, max_batch=4)

    def adopt(event: EngineEvent) -> None:
        if isinstance(event, FirstToken) and event.finish is None:
            engine.adopt(event.key)
            engine.admit(event.key)

    recorder = EngineRecorder(on_event=adopt)
    engine.start(recorder)
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


async def test_model_that_vllm_can_run_passes_the_trial_and_nothing_is_left(load: Any, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", **_SHAPE)
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(load(folder).open, total_blocks=32, max_batch=4)
    trial = Trial(engine, decodes=True)
    engine.start(lambda events: loop.call_soon_threadsafe(trial.handle, events))
    await asyncio.wait_for(trial.run(), SOON_S)
    await asyncio.to_thread(wait_until_free, engine)
