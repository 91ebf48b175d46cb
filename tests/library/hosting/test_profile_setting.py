"""The chunk size of an instance: given, from a profile, or the default; and its log line."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kaveri.engine.factory import DEFAULT_CHUNK_TOKENS, build_engine
from kaveri.errors import ConfigError
from kaveri.latency.profile import Profile, write_profile
from services.instance.config import DecodeConfig, PrefillConfig
from tests.library.profiling.profile_double import make_profile
from tests.support.settings import parse_config

FAKE = ("--engine", "fake", "--kv-cache-memory", "1MiB")


def prefill_config(*flags: str, **environment: str) -> PrefillConfig:
    return parse_config(PrefillConfig, "prefill", [*FAKE, *flags], environment)


def written(folder: Path, profile: Profile | None = None) -> str:
    path = folder / "profile.json"
    write_profile(profile or make_profile(chunk_tokens=96), path)
    return str(path)


def logs_of_building(config: PrefillConfig) -> list[str]:
    with capture_logs() as logs:
        build_engine(config).close()
    return [str(entry["event"]) for entry in logs]


def test_the_profile_says_how_long_chunks_are(tmp_path: Path) -> None:
    config = prefill_config("--profile", written(tmp_path))
    assert config.chunk_tokens == 96
    assert "chunk_size_profiled" in logs_of_building(config)


def test_decode_instances_take_it_too_and_from_the_environment(tmp_path: Path) -> None:
    environment = {"KAVERI_PROFILE": written(tmp_path)}
    config = parse_config(DecodeConfig, "decode", FAKE, environment)
    assert config.chunk_tokens == 96


def test_a_chunk_size_that_is_given_wins(tmp_path: Path) -> None:
    config = prefill_config("--profile", written(tmp_path), "--chunk-tokens", "64")
    assert config.chunk_tokens == 64


def test_without_a_profile_it_is_the_default_and_the_log_says_how_to_do_better() -> None:
    for config in (prefill_config(), prefill_config("--profile", ""), PrefillConfig(engine="fake")):
        assert config.chunk_tokens == DEFAULT_CHUNK_TOKENS
    with capture_logs() as logs:
        build_engine(prefill_config()).close()
    assert ["`kaveri profile`" in str(line.get("advice")) for line in logs] == [True]
    assert not [event for event in logs_of_building(prefill_config("--chunk-tokens", "64")) if "chunk_size" in event]


def test_a_profile_of_another_machine_is_used_with_a_warning(tmp_path: Path) -> None:
    assert "profile_machine_differs" in logs_of_building(prefill_config("--profile", written(tmp_path)))


def test_a_file_that_is_no_profile_is_named_by_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"--profile: .*profile.json is no file of `kaveri profile`"):
        prefill_config("--profile", str(path))
    with pytest.raises(ConfigError, match=r"KAVERI_PROFILE: .*cannot be read"):
        prefill_config(KAVERI_PROFILE=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "profile",
    [make_profile(engine="transformers"), make_profile(dtype="float16"), make_profile(model_fingerprint="other")],
)
def test_a_profile_of_another_engine_model_or_dtype_is_refused(tmp_path: Path, profile: Profile) -> None:
    config = prefill_config("--profile", written(tmp_path, profile))
    with pytest.raises(ConfigError, match="profile: was measured on"):
        build_engine(config)


def test_a_timed_engine_takes_both_time_and_chunks_from_one_profile(tmp_path: Path) -> None:
    path = written(tmp_path, make_profile(chunk_tokens=96, engine="transformers"))
    config = parse_config(
        PrefillConfig, "prefill", ["--engine", "timed", "--latency-model", path, "--profile", path], {}
    )
    engine = build_engine(config)
    assert engine.info.engine == "timed"
    engine.close()
