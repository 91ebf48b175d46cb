"""A profile comes back as it was written, or is refused with the field and the reason."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kaveri.errors import ConfigError
from kaveri.latency.model import load_latency_model
from kaveri.latency.profile import PrefillPoint, ProfiledEngine, StepTimes, read_profile, write_profile
from tests.library.profiling.profile_double import FAKE_FINGERPRINT, make_profile

FAKE = make_profile().engine


def written(folder: Path) -> Path:
    path = folder / "profile.json"
    write_profile(make_profile(), path)
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_profile(written(tmp_path)) == make_profile()


def test_the_timed_engine_takes_its_latency_model(tmp_path: Path) -> None:
    assert load_latency_model(str(written(tmp_path))) == make_profile().latency_model


def _set(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        entry: Any = document
        for name in path[:-1]:
            entry = entry[name]
        entry[path[-1]] = value

    return change


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        del document[name]

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("format", value="kaveri-recipe"), "no file of `kaveri profile`"),
        (_drop("format"), "no file of `kaveri profile`"),
        (_set("version", value=2), "version 2"),
        (_drop("machine"), "machine"),
        (_set("colour", value="blue"), "colour"),
        (_set("machine", "threads", value="two"), "machine.threads"),
        (_set("saturation", "chunk_tokens", value=0), "saturation.chunk_tokens"),
        (_set("saturation", "chunk_tokens", value=512.5), "saturation.chunk_tokens"),
        (_set("saturation", "chunk_tokens", value=True), "saturation.chunk_tokens"),
        (_set("saturation", "reached", value=1), "saturation.reached"),
        (_set("saturation", "share", value=float("nan")), "saturation.share"),
        (_set("prefill_error", "mean", value=-0.5), "prefill_error.mean"),
        (_set("prefill", 1, "prompts", value=[[1, 2, 3]]), r"prefill\[1\].prompts\[0\]"),
        (_set("prefill", value={}), "prefill is no list"),
        (_set("decode", 0, "times", value=None), r"decode\[0\].times"),
        (_set("latency_model", "prefill", "token_s", value=float("inf")), "prefill.token_s"),
    ],
)
def test_a_changed_file_is_refused_with_the_field(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    path = written(tmp_path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=complaint) as refused:
        read_profile(path)
    assert refused.value.field == "profile"
    assert str(path) in refused.value.reason


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"format": "kaveri-profile"', b"\xff\xfe\x00", b"12", pytest.param(b"[" * 100_000, id="nested")],
)
def test_what_is_no_profile_at_all_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="profile"):
        read_profile(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_profile(path)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"engine": "transformers"}, "engine fake; here it is transformers"),
        ({"model_fingerprint": "f00", "model": "other"}, r"model kaveri-tiny \(fake-1536-0-0\); here it is other"),
        ({"dtype": "bfloat16"}, "dtype float32; here it is bfloat16"),
        ({"device": "cuda"}, "device cpu; here it is cuda"),
    ],
)
def test_another_engine_is_refused_with_what_differs(changed: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_profile().require_for(replace(FAKE, **changed))


def test_the_same_weights_under_another_name_are_the_same_model() -> None:
    make_profile().require_for(replace(FAKE, model="/elsewhere/tiny"))


def test_a_timed_engine_may_have_the_profile_whose_time_it_takes() -> None:
    profile = make_profile(engine="transformers")
    timed = ProfiledEngine(
        engine="timed", model="made-up", model_fingerprint=FAKE_FINGERPRINT + "-made-up", dtype="float32", device="cpu"
    )
    profile.require_for(timed, profile.latency_model)
    with pytest.raises(ConfigError, match="engine transformers"):
        profile.require_for(timed, load_latency_model("opt-13b-a100-tp1"))


def test_a_late_chunk_counts_for_all_that_it_attends_to() -> None:
    times = StepTimes(median_s=1.0, min_s=1.0, max_s=1.0, repeats=1)
    point = PrefillPoint(prompts=((0, 10), (100, 130)), times=times)
    assert point.tokens == 40
    assert point.squared_tokens == 10**2 + 130**2 - 100**2
