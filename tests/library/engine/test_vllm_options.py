"""vLLM's own options, as a user writes them. Needs no vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kaveri.engine.factory import build_engine, build_runner
from kaveri.engine.settings import EngineSettings
from kaveri.engine.vllm.loading import model_fingerprint, vllm_dtype
from kaveri.engine.vllm.options import parse_engine_args
from kaveri.errors import ConfigError
from services.instance.config import DecodeConfig, PrefillConfig
from tests.support.settings import parse_config

WANTED = {"max_num_seqs": 64, "compilation_config": {"mode": 0}}


def test_options_are_taken_from_json_and_from_a_yaml_or_json_file(tmp_path: Path) -> None:
    assert parse_engine_args('{"max_num_seqs": 64, "compilation_config": {"mode": 0}}') == WANTED
    yaml_file, json_file = tmp_path / "vllm.yaml", tmp_path / "vllm.json"
    yaml_file.write_text("max-num-seqs: 64  # as on vLLM's command line\ncompilation_config: {mode: 0}\n")
    json_file.write_text('{"max_num_seqs": 64, "compilation_config": {"mode": 0}}')
    assert parse_engine_args(str(yaml_file)) == WANTED
    assert parse_engine_args(f"@{yaml_file}") == WANTED
    assert parse_engine_args(f" {json_file} ") == WANTED
    assert parse_engine_args("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"max_num_seqs": }', "is no JSON object"),
        ("{" * 100_000, "is no JSON object"),
        ("nowhere.yaml", "nowhere.yaml cannot be read"),
        ("@nowhere.yaml", "nowhere.yaml cannot be read"),
    ],
)
@pytest.mark.parametrize("config_type", [PrefillConfig, DecodeConfig])
def test_options_that_cannot_be_read_are_refused_by_flag(config_type: Any, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        parse_config(config_type, "service", ["--engine-args", text], {})
    assert raised.value.field == "--engine-args"


@pytest.mark.parametrize("text", ["[1, 2]", "just words", "1: 2", "a: [", "\x00"])
def test_a_file_without_a_mapping_of_names_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no mapping|neither YAML nor JSON"):
        parse_engine_args(str(path))


def test_options_reach_the_engines_settings() -> None:
    config = parse_config(DecodeConfig, "decode", ["--engine", "vllm", "--engine-args", '{"max-num-seqs": 64}'], {})
    assert config.engine_args == {"max_num_seqs": 64}
    assert DecodeConfig().engine_args is None


def test_another_engine_refuses_them() -> None:
    settings = EngineSettings(engine="fake", engine_args={"max_num_seqs": 64})
    with pytest.raises(ConfigError, match="are options of vLLM and of plug-ins; the engine is fake") as raised:
        build_engine(settings)
    assert raised.value.field == "engine_args"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install .*\[vllm\]'") as raised:
        build_engine(EngineSettings(engine="vllm"))
    assert raised.value.field == "engine"


def test_vllm_is_not_profiled() -> None:
    with pytest.raises(ConfigError, match="forms its steps by itself"):
        build_runner(EngineSettings(engine="vllm"))


def test_options_that_make_another_model_of_a_checkpoint_change_what_its_kv_is_called() -> None:
    plain = model_fingerprint("checkpoint", {"max_num_seqs": 8, "quantization": None})
    assert plain == "checkpoint"
    named = {
        model_fingerprint(checkpoint, options)
        for checkpoint in ("checkpoint", "another")
        for options in ({}, {"hf_overrides": {"rope_theta": 5.0}}, {"quantization": "fp8"}, {"load_format": "dummy"})
    }
    assert len(named) == 8
    reordered = [{"hf_overrides": {"a": 1, "b": 2}}, {"hf_overrides": {"b": 2, "a": 1}}]
    assert len({model_fingerprint("checkpoint", options) for options in reordered}) == 1


@pytest.mark.parametrize(
    ("asked", "values", "on_cpu", "has_bfloat16", "told"),
    [
        ("auto", {"dtype": "bfloat16"}, True, False, "float32"),
        ("auto", {"dtype": "float32"}, True, False, "float32"),
        ("auto", {}, True, False, "float32"),
        ("auto", {"dtype": "bfloat16"}, True, True, "auto"),
        ("auto", {"dtype": "bfloat16"}, False, False, "auto"),
        ("auto", {"dtype": "bfloat16", "quantization_config": {"quant_method": "awq"}}, True, False, "auto"),
        ("bfloat16", {"dtype": "bfloat16"}, True, False, "bfloat16"),
    ],
)
def test_vllm_computes_in_float32_where_the_cpu_has_no_bfloat16(
    asked: str, values: dict[str, Any], on_cpu: bool, has_bfloat16: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": has_bfloat16, "amx_bf16": False})
    assert vllm_dtype(asked, values, on_cpu) == told
