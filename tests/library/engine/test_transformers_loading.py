"""The loader of transformers models: what it reads, and its one-line errors for models that it cannot serve exactly."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.checkpoint import fingerprint
from kaveri.engine.contract import EngineKey, EngineRequest
from kaveri.engine.stepwise.engine import StepwiseEngine
from kaveri.engine.transformers.loading import load_runner
from kaveri.engine.transformers.runner import TransformersRunner
from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from tests.support.broken_checkpoints import BROKEN, QUANTIZED, broken_copy, edit
from tests.support.engine_suite import start_adopting
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", eos_token_id=7)


def load(folder: Path | str, **changes: Any) -> TransformersRunner:
    return load_runner(
        **{"model": str(folder), "dtype": "auto", "device": "cpu", "max_model_len": None, "block_tokens": 16, **changes}
    )


def refusal(folder: Path | str, **changes: Any) -> str:
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        load(folder, **changes)
    assert time.monotonic() - started < 20
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def test_layout_is_the_models_own(llama: Path) -> None:
    runner = load(llama)
    layout = runner.layout
    assert (layout.layer_count, layout.kv_head_count, layout.head_dim, layout.block_tokens) == (3, 2, 16, 16)
    assert layout.dtype == "float32"
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (320, 1024, {7})
    assert load(llama, dtype="bfloat16", max_model_len=100).layout.dtype == "bfloat16"


def test_generation_config_says_where_answers_end(copied: Path) -> None:
    edit(copied, "generation_config.json", eos_token_id=[3, 9])
    assert load(copied).eos_token_ids == {3, 9}
    edit(copied, "generation_config.json", eos_token_id=5)
    assert load(copied).eos_token_ids == {5}


def test_ends_that_no_token_has_change_nothing_as_in_generate(copied: Path) -> None:
    prompt = (5, 6, 8, 9)
    for ends in ([320, 32, 2**40, -1], [-1], -1):
        edit(copied, "generation_config.json", eos_token_id=ends)
        plain = AutoModelForCausalLM.from_pretrained(copied)
        whole = plain.generate(torch.tensor([prompt]), min_new_tokens=12, max_new_tokens=12, do_sample=False)
        engine = StepwiseEngine(load(copied), 64, chunk_tokens=16)
        recorder = start_adopting(engine)
        params = ResolvedParams(max_tokens=12, min_tokens=12, temperature=0, seed=0)
        engine.prefill(request := EngineRequest(EngineKey("one", 0), prompt, 0, params))
        recorder.wait_for_finish(request.key)
        engine.close()
        assert recorder.token_ids[request.key] == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("value", ["2", [[2]], True])
def test_ends_that_are_no_ids_are_refused_with_file_key_and_value(copied: Path, value: Any) -> None:
    edit(copied, "generation_config.json", eos_token_id=value)
    said = refusal(copied)
    assert "generation_config.json" in said
    assert f"eos_token_id {value!r}" in said


def test_fingerprint_tells_weights_apart_and_not_folders(llama: Path, copied: Path, tmp_path: Path) -> None:
    ours = load(llama).layout
    assert load(copied).layout == ours
    other = make_tiny_model(tmp_path / "other", "llama", eos_token_id=7, seed=1)
    assert load(other).layout.model_fingerprint != ours.model_fingerprint
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert load(copied).layout.model_fingerprint != ours.model_fingerprint


def test_fingerprint_of_a_large_file_reads_its_header_and_samples(
    llama: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.engine.checkpoint._WHOLE_FILE_BYTES", 5000)
    ours = fingerprint(llama)
    assert fingerprint(copied) == ours
    weights = copied / "model.safetensors"
    whole = weights.read_bytes()
    for position in (9, len(whole) // 3, len(whole) - 1):
        changed = bytearray(whole)
        changed[position] ^= 1
        weights.write_bytes(changed)
        assert fingerprint(copied) != ours, f"byte {position} of {len(whole)}"


@pytest.mark.parametrize(("has_bfloat16", "computed"), [(True, "bfloat16"), (False, "float32")])
def test_auto_computes_in_float32_where_the_cpu_has_no_bfloat16(
    has_bfloat16: bool, computed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": has_bfloat16, "amx_bf16": False})
    runner = load("kaveri-tiny")
    assert runner.max_model_len >= 2048
    assert runner.layout.dtype == computed
    assert {weight.dtype for weight in runner._model.parameters()} == {getattr(torch, computed)}
    said = capsys.readouterr().out
    assert said.count("dtype_widened") == (not has_bfloat16)
    assert ("--dtype bfloat16" in said) == (not has_bfloat16)
    assert load("kaveri-tiny", dtype="bfloat16").layout.dtype == "bfloat16"
    assert "dtype_widened" not in capsys.readouterr().out


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_checkpoint_is_refused_with_its_method_and_what_to_use(
    method: str, llama: Path, tmp_path: Path
) -> None:
    said = refusal(broken_copy(llama, tmp_path / "copy", method))
    assert f"is quantized with {method}" in said
    assert "use the checkpoint that is not quantized" in said


_SAID_OF = {
    "encoder and decoder": "encoder-decoder",
    "images": "cannot be loaded",
    "unknown model type": "cannot be loaded",
    "config.json is cut off": "config.json cannot be read",
    "weights cut off": "cannot be loaded",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_folder_that_is_no_whole_model_is_refused_in_one_line(fault: str, llama: Path, tmp_path: Path) -> None:
    said = refusal(broken_copy(llama, tmp_path / "copy", fault))
    assert str(tmp_path / "copy") in said
    if "generation_config" in fault:
        assert "generation_config.json" in said
    assert _SAID_OF.get(fault, "") in said


def test_what_is_no_model_is_refused(llama: Path, copied: Path, tmp_path: Path) -> None:
    assert "is no folder" in refusal(tmp_path / "missing")
    assert "no config.json" in refusal(tmp_path)
    assert "is no folder" in refusal(llama / "config.json")
    assert "neither a folder nor a hub id" in refusal("two words/and more")
    (copied / "model.safetensors").rename(copied / "model.bin")
    assert "only safetensors" in refusal(copied)


def test_hub_id_that_cannot_be_had_is_refused_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # A port without a listener replaces the hub, so no test leaves the machine.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be had from the hub" in refusal("kaveri-tests/no-such-model")


def test_checkpoint_with_missing_weights_is_refused(copied: Path) -> None:
    edit(copied, "config.json", num_hidden_layers=4)
    assert "lacks" in refusal(copied)


def test_checkpoint_whose_weights_have_another_shape_is_refused_with_both_shapes(copied: Path) -> None:
    edit(copied, "config.json", intermediate_size=128)
    said = refusal(copied)
    assert re.search(r"model\.layers\.0\.mlp\.\w+\.weight in the shape \[\d+, \d+\]; config.json makes it \[", said)
    assert "report" not in said


def test_model_that_counts_positions_from_elsewhere_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for architecture, served in (("roberta", False), ("bert", True)):
        config = AutoConfig.for_model(architecture, **shape, intermediate_size=64, is_decoder=True, pad_token_id=1)
        folder = tmp_path / architecture
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        if served:
            assert load(folder).vocab_size == 64
        else:
            assert "does not count positions from 0" in refusal(folder)


def test_unknown_choices_are_refused(llama: Path) -> None:
    assert "dtype" in refusal(llama, dtype="int8")
    assert "device" in refusal(llama, device="abacus")
    assert "max_model_len" in refusal(llama, max_model_len=5000)
    assert "max_model_len" in refusal(llama, max_model_len=0)
    assert "max_model_len" in refusal(llama, max_model_len=1)
    assert load(llama, max_model_len=2).max_model_len == 2
    assert "block_tokens" in refusal(llama, block_tokens=0)


def test_window_that_the_attention_never_hears_of_limits_the_length(copied: Path) -> None:
    edit(copied, "config.json", sliding_window=64)
    assert "sliding window" in refusal(copied)
    assert load(copied, max_model_len=64).max_model_len == 64


def test_rotary_embeddings_that_depend_on_the_batch_limit_the_length(copied: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    edit(copied, "config.json", rope_parameters=rope)
    assert "rotary" in refusal(copied)
    assert load(copied, max_model_len=256).max_model_len == 256


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 64}),
        (
            "gpt_oss",  # attention sinks
            {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "vocab_size": 64,
            },
        ),
    ],
)
def test_architectures_whose_attention_cannot_be_carried_are_refused(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config)).save_pretrained(tmp_path)
    assert "attention" in refusal(tmp_path, max_model_len=64)


def test_a_gpu_beyond_the_last_one_is_refused_by_name(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "the last GPU here is cuda:1" in refusal(llama, device="cuda:2")


def test_a_device_without_room_for_the_model_or_its_pool_is_refused_by_name(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    runner = load(llama)
    monkeypatch.setattr("kaveri.engine.transformers.runner.PagedMemory", no_room)
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        runner.attach(KvPool(runner.layout, 4))
    monkeypatch.setattr("transformers.LlamaForCausalLM.to", no_room)
    assert "does not fit" in refusal(llama)
