"""What a model's generation_config says, and that ids which no token has do no harm."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kaveri.errors import ConfigError
from kaveri.models import resolve_model
from kaveri.text.generation_config import (
    FoundGenerationConfig,
    end_token_ids,
    read_generation_config,
    say_unused_values,
    unused_values,
)
from kaveri.text.model_files import read_model_files

VOCAB_SIZE = 1536


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("kaveri-tiny"), tmp_path / "model"))


def ends(folder: Path, **changes: Any) -> frozenset[int]:
    """Of a generation_config with these values, read as an engine reads it."""
    (folder / "generation_config.json").write_text(json.dumps(changes))
    config = AutoConfig.from_pretrained(folder)
    return end_token_ids(read_generation_config(folder, config), config, VOCAB_SIZE)


def test_ids_that_no_token_has_are_dropped_with_one_line_that_names_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(folder, eos_token_id=[2, VOCAB_SIZE - 1]) == {2, VOCAB_SIZE - 1}
    assert "token_ids_dropped" not in capsys.readouterr().out
    assert ends(folder, eos_token_id=[2, VOCAB_SIZE, 2**40, -1]) == {2}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "token_ids_dropped" in line]
    for said in ("generation_config.json", "eos_token_id", str(VOCAB_SIZE), str(2**40), "-1"):
        assert said in line
    assert ends(folder, eos_token_id=-1) == set()


@pytest.mark.parametrize("value", ["2", True, 2.5, [[2]], {"a": 2}, [2, None]])
def test_a_value_that_holds_no_ids_is_refused_with_file_key_and_value(folder: Path, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ends(folder, eos_token_id=value)
    assert refused.value.field == "--model"
    for said in ("generation_config.json", "eos_token_id", repr(value)):
        assert said in str(refused.value)


def test_without_ids_of_its_own_those_of_the_configuration_end_answers(folder: Path) -> None:
    assert ends(folder) == {2}
    assert ends(folder, eos_token_id=None) == {2}
    (folder / "generation_config.json").unlink()
    config = AutoConfig.from_pretrained(folder)
    assert end_token_ids(read_generation_config(folder, config), config, VOCAB_SIZE) == {2}


@pytest.mark.parametrize("content", ["[1, 2]", '"x"', "{", "null", "\x00"])
def test_a_file_that_is_no_object_is_refused_by_name(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_config(folder, AutoConfig.from_pretrained(folder))


def test_facts_for_other_gateways_hold_ids_of_tokens_only(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE, 3, -1]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": -1, "bos_token_id": VOCAB_SIZE}))
    facts = read_model_files(str(folder)).facts
    assert (facts["eos_token_ids"], facts["pad_token_id"], facts["bos_token_id"]) == ([3], 0, 0)


def test_values_that_would_change_answers_are_named_once_with_their_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.1, "min_p": 0}
    (folder / "generation_config.json").write_text(json.dumps(values | {"eos_token_id": 2, "pad_token_id": 0}))
    say_unused_values(str(folder))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "generation_config_unused" in line]
    for said in ("generation_config.json", "'temperature': 0.6", "'top_k': 20", "'repetition_penalty': 1.1"):
        assert said in line
    for not_said in ("top_p':", "min_p", "do_sample", "eos_token_id"):
        assert not_said not in line
    say_unused_values("kaveri-tiny")
    assert "generation_config_unused" not in capsys.readouterr().out


def test_values_of_every_type_are_compared_without_an_error() -> None:
    values = {"temperature": "hot", "bad_words_ids": [[3]], "suppress_tokens": [], "sequence_bias": {}, "foo": 3}
    assert unused_values(FoundGenerationConfig("file", values)) == {"temperature": "hot", "bad_words_ids": [[3]]}
