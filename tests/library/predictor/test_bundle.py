import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kaveri.errors import ConfigError, InvalidArgument
from kaveri.predictor.bundle import LengthPredictor, cut_prompt, max_input_tokens
from kaveri.predictor.manifest import MANIFEST_FILE, Manifest, read_manifest, write_manifest
from kaveri.predictor.train import classifier_from_scratch

MANIFEST = Manifest(
    model="served",
    vocab_size=50,
    granularity=100,
    bucket_count=4,
    longest_answer_tokens=642,
    max_prompt_tokens=8,
    own_tokenizer=False,
)


def save(folder: Path, manifest: Manifest, seed: int = 0, classes: int = 4, vocab_size: int = 50) -> Path:
    torch.manual_seed(seed)
    classifier_from_scratch(vocab_size, 0, classes, 8, 1, 32).model.save_pretrained(folder)
    write_manifest(folder, manifest, [folder / "config.json", folder / "model.safetensors"])
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("made"), MANIFEST)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "predictor"))


def _flip_a_byte(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _change(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / MANIFEST_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _cut_manifest(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    path.write_text(path.read_text()[:-20])


def _drop_a_field(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["granularity"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "holds no length predictor"),
        (shutil.rmtree, "holds no length predictor"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (_flip_a_byte, "model.safetensors is corrupt: its SHA-256"),
        (_cut_manifest, "kaveri_predictor.json is corrupt"),
        (_drop_a_field, "fields missing or unknown: granularity"),
        (_change(surprise=1), "fields missing or unknown: surprise"),
        (_change(format=2), "is not of format 1"),
        (_change(granularity=0), "granularity is 0; it must be at least 1"),
        (_change(granularity="100"), "granularity is '100'; it must be of type int"),
        (_change(granularity=True), "granularity is True; it must be of type int"),
        (_change(granularity=200), "its version does not fit its content"),
    ],
)
def test_a_broken_folder_is_a_config_error(folder: Path, break_it: Callable[[Path], None], reason: str) -> None:
    break_it(folder)
    with pytest.raises(ConfigError) as caught:
        LengthPredictor.load(str(folder))
    assert caught.value.field == "predictor"
    assert reason in caught.value.reason


def test_a_classifier_that_does_not_fit_its_manifest_is_a_config_error(tmp_path: Path) -> None:
    for classes in (3, 5):
        with pytest.raises(ConfigError, match=f"mismatched: {classes} classes for 4 buckets"):
            LengthPredictor.load(str(save(tmp_path / f"{classes} classes", MANIFEST, classes=classes)))
    with pytest.raises(ConfigError, match="mismatched: it reads 40 token ids, its model has 50"):
        LengthPredictor.load(str(save(tmp_path / "vocabulary", MANIFEST, vocab_size=40)))


def test_whole_files_that_are_no_classifier_are_a_config_error(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "nonsense"}')
    write_manifest(folder, MANIFEST, [folder / "config.json", folder / "model.safetensors"])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LengthPredictor.load(str(folder))


def test_the_version_changes_with_weights_and_with_buckets(made: Path, tmp_path: Path) -> None:
    version = LengthPredictor.load(str(made)).version
    assert save(tmp_path / "same", MANIFEST).exists()
    assert read_manifest(tmp_path / "same").version == version
    assert read_manifest(save(tmp_path / "weights", MANIFEST, seed=1)).version != version
    other = Manifest(**{**vars(MANIFEST), "granularity": 101})
    assert read_manifest(save(tmp_path / "buckets", other)).version != version


def test_a_batch_says_the_same_as_each_prompt_alone(made: Path) -> None:
    predictor = LengthPredictor.load(str(made))
    prompts = [[7], [1, 2, 3, 4, 5, 6], [9, 9], [3, 1, 4, 1, 5, 9, 2], list(range(1, 40)), [8, 7, 6]]
    together = predictor.predict(prompts)
    assert len(together) == len(prompts)
    for prompt, row in zip(prompts, together, strict=True):
        assert row == pytest.approx(predictor.predict([prompt])[0], abs=1e-5)
        assert sum(row) == pytest.approx(1)
    assert len({round(row[0], 6) for row in together}) == len(prompts), "they could not be told apart otherwise"
    assert predictor.predict([]) == []


def test_an_encoder_does_not_read_the_padding_of_its_batch(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, num_labels=4, pad_token_id=0, initializer_range=0.5, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    write_manifest(tmp_path, MANIFEST, [tmp_path / "config.json", tmp_path / "model.safetensors"])
    predictor = LengthPredictor.load(str(tmp_path))
    # Between the same powers of two, so one batch.
    prompts = [[1, 2, 3, 4, 5], [3, 1, 4, 1, 5, 9, 2, 6]]
    for prompt, row in zip(prompts, predictor.predict(prompts), strict=True):
        assert row == pytest.approx(predictor.predict([prompt])[0], abs=1e-5)


def test_a_long_prompt_keeps_its_ends(made: Path) -> None:
    assert cut_prompt(range(9), 9) == range(9)
    assert cut_prompt(range(10), 4) == [0, 1, 8, 9]
    assert cut_prompt(range(10), 5) == [0, 1, 7, 8, 9]
    predictor = LengthPredictor.load(str(made))
    prompt = list(range(1, 41))
    assert predictor.predict([prompt]) == predictor.predict([[1, 2, 3, 4, 37, 38, 39, 40]])


@pytest.mark.parametrize(("prompt", "value"), [([], ""), ([1, 50], 50), ([1, -1, 2], -1), ([1] * 20 + [99], 99)])
def test_a_bad_prompt_is_named(made: Path, prompt: list[int], value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        LengthPredictor.load(str(made)).predict([[1, 2], prompt])
    assert (caught.value.field, caught.value.value) == ("prompts[1]", value)


def test_the_tokenizer_limits_where_the_position_table_promises_too_much() -> None:
    class EncoderConfig:
        max_position_embeddings: int | None = 514

    class Tokenizer:
        model_max_length = 512

    config, tokenizer = EncoderConfig(), Tokenizer()
    assert max_input_tokens(config, tokenizer) == 512
    config.max_position_embeddings = None
    assert max_input_tokens(config, tokenizer) == 512
    tokenizer.model_max_length = 10**30
    config.max_position_embeddings = 2048
    assert max_input_tokens(config, tokenizer) == 2048
