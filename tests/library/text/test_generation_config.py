import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kaveri.domain.sampling import SamplingParams
from kaveri.errors import ConfigError
from kaveri.models import resolve_model
from kaveri.text.generation_config import (
    FoundGenerationConfig,
    SamplingDefaults,
    end_token_ids,
    read_generation_config,
    read_sampling_defaults,
    unused_values,
)
from kaveri.text.model_files import read_model_files

VOCAB_SIZE = 1536


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("kaveri-tiny"), tmp_path / "model"))


def ends(folder: Path, **changes: Any) -> frozenset[int]:
    """Return the end-of-sequence ids that an engine reads from a generation_config with these values."""
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


def read_defaults(folder: Path, given: str = "auto", **values: Any) -> SamplingDefaults:
    """Return the sampling defaults that a router reads from a generation_config with these values."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_sampling_defaults(given, str(folder))


def lines_of(capsys: pytest.CaptureFixture[str], event: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if event in line]


def test_the_sampling_values_of_the_file_are_used_and_named_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 2048}
    defaults = read_defaults(folder, **values, eos_token_id=2, pad_token_id=0)
    assert defaults == SamplingDefaults(SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=2048))
    (line,) = lines_of(capsys, "generation_config")
    for said in ("generation_config_used", "generation_config.json", "0.6", "0.95", "20", "2048"):
        assert said in line


def test_values_that_change_nothing_are_used_as_the_file_has_them(folder: Path) -> None:
    assert read_defaults(folder, temperature=1.0, top_p=1.0, top_k=50).params.chosen == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
    }
    assert read_defaults(folder, temperature=0, top_k=0).params.chosen == {"temperature": 0.0, "top_k": 0}


def test_all_of_the_vocabulary_is_spelled_as_vllm_spells_it(folder: Path) -> None:
    assert read_defaults(folder, top_k=-1).params.chosen == {"top_k": 0}


@pytest.mark.parametrize("values", [{}, {"temperature": None, "top_k": None}, {"eos_token_id": 2, "do_sample": True}])
def test_a_file_without_sampling_values_changes_nothing_and_is_not_mentioned(
    folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    assert read_defaults(folder, **values) == SamplingDefaults()
    assert not lines_of(capsys, "generation_config")


def test_a_model_without_the_file_has_no_sampling_defaults(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert read_sampling_defaults("auto", str(folder)) == SamplingDefaults()


def test_values_that_cannot_be_used_are_named_in_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read_defaults(folder, temperature=0.6, presence_penalty=1.1, typical_p=1.0, no_repeat_ngram_size=3, foo=1)
    used, unused = lines_of(capsys, "generation_config")
    assert "generation_config_unused" in unused
    assert "warning" in unused
    assert "generation_config_used" in used
    for said in ("generation_config.json", "'presence_penalty': 1.1", "'no_repeat_ngram_size': 3"):
        assert said in unused
    for not_said in ("temperature", "typical_p", "foo"):
        assert not_said not in unused


def test_none_ignores_the_file_bad_values_included(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_defaults(folder, "none", temperature="hot", repetition_penalty=1.1) == SamplingDefaults()
    assert not lines_of(capsys, "generation_config")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_path_names_another_file_or_its_folder_and_limits_every_answer(
    folder: Path, tmp_path: Path, is_folder: bool
) -> None:
    other = tmp_path / ("generation_config.json" if is_folder else "mine.json")
    other.write_text(json.dumps({"temperature": 0.2, "max_new_tokens": 9}))
    defaults = read_defaults(folder, str(tmp_path if is_folder else other), temperature=0.6, top_k=20)
    assert defaults == SamplingDefaults(SamplingParams(temperature=0.2, max_tokens=9), most_tokens=9)


@pytest.mark.parametrize("given", ["missing", "missing/generation_config.json", "empty", "fifo"])
def test_a_path_without_a_file_is_refused_by_the_flag(folder: Path, tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError) as refused:
        read_defaults(folder, str(tmp_path / given))
    assert refused.value.field == "--generation-config"
    assert given in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", [0.6]),
        ("temperature", True),
        ("top_p", 2),
        ("top_p", 0),
        ("top_k", -5),
        ("top_k", 1.5),
        ("top_k", "40"),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**40),
    ],
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_value_that_no_request_may_have_is_refused_with_flag_file_key_and_value(
    folder: Path, tmp_path: Path, key: str, value: Any, is_elsewhere: bool
) -> None:
    other = tmp_path / "mine.json"
    other.write_text(json.dumps({key: value}))
    given, flag = (str(other), "--generation-config") if is_elsewhere else ("auto", "--model")
    with pytest.raises(ConfigError) as refused:
        read_defaults(folder, given, **({} if is_elsewhere else {key: value}))
    assert refused.value.field == flag
    for said in ("mine.json" if is_elsewhere else "generation_config.json", f"the {key} ", repr(value), "it must be"):
        assert said in str(refused.value)


def test_values_of_every_type_are_compared_without_an_error() -> None:
    values = {"typical_p": "hot", "bad_words_ids": [[3]], "suppress_tokens": [], "sequence_bias": {}, "foo": 3}
    assert unused_values(FoundGenerationConfig("file", values)) == {"typical_p": "hot", "bad_words_ids": [[3]]}
