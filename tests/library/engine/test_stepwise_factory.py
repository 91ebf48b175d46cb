"""Settings become an engine, or one clear line about the setting that is wrong."""

import errno
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kaveri.config.settings import read_settings
from kaveri.engine import limits
from kaveri.engine.factory import BuiltEngine, build_engine
from kaveri.engine.settings import EngineSettings
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from services.instance.config import DecodeConfig

_FAKE = EngineSettings(engine="fake", kv_cache_memory=2**20)


@dataclass(frozen=True, kw_only=True)
class _Advertised(EngineSettings):
    @property
    def kv_advertise_host(self) -> str:
        return "decode.example"


def built(**settings: Any) -> AbstractContextManager[BuiltEngine]:
    return closing(build_engine(replace(_FAKE, **settings)))


def test_decode_engine_listens_for_every_transport_and_cleans_up() -> None:
    engine = build_engine(_FAKE)
    shm, unix, tcp = engine.info.kv_endpoints
    assert (shm.transport, unix.transport, tcp.transport) == ("shm", "unix", "tcp")
    assert os.path.exists(shm.address)
    assert os.path.exists(unix.address)
    assert tcp.address.startswith("127.0.0.1:")
    assert not tcp.address.endswith(":0")
    engine.close()
    assert not os.path.exists(shm.address)
    assert not os.path.exists(unix.address)


def test_two_transports_over_tcp_cannot_have_one_port() -> None:
    with pytest.raises(ConfigError, match="one port, and tcp and mock need one each") as raised:
        build_engine(replace(_FAKE, kv_transports=("shm", "tcp", "mock"), kv_port=50123, fake_verify_kv=False))
    assert raised.value.field == "kv_port"


def test_endpoints_follow_the_settings() -> None:
    engine = build_engine(_Advertised(**{**vars(_FAKE), "kv_transports": ("tcp",), "kv_host": "0.0.0.0"}))
    (tcp,) = engine.info.kv_endpoints
    assert tcp.address.startswith("decode.example:")
    engine.close()


def test_pool_is_as_large_as_the_memory_given_for_it() -> None:
    with built() as engine:
        layout = engine.info.layout
        assert engine.info.total_blocks == 2**20 // (layout.layer_count * layout.block_bytes)


def test_model_length_is_the_models_own_unless_the_pool_holds_less() -> None:
    with built(fake_shape=FakeModel(max_model_len=500)) as engine:
        assert engine.info.max_model_len == 500
    for beyond in (10**5, 10**15):
        with built(fake_shape=FakeModel(max_model_len=beyond)) as engine:
            assert engine.info.max_model_len == engine.info.total_blocks * engine.info.layout.block_tokens < 10**5


@pytest.mark.parametrize("tokens", [10**5, 10**15])
def test_model_length_that_was_asked_for_and_does_not_fit_is_refused_with_the_numbers(tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"{tokens}, which takes \d+ bytes .* is 1048576, enough for 4096") as raised:
        build_engine(replace(_FAKE, max_model_len=tokens))
    assert raised.value.field == "max_model_len"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine", "abacus"),
        ("max_model_len", -1),
        ("max_model_len", 1),
        ("kv_cache_memory", 10),
        # More than any machine has, more than an int64, and more than a float.
        ("kv_cache_memory", 999_999 * 2**30),
        ("kv_cache_memory", 2**70),
        ("kv_cache_memory", 10**400),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("block_tokens", 0),
        ("chunk_tokens", -1),
        ("max_batch", 0),
    ],
)
def test_setting_that_cannot_be_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        build_engine(replace(_FAKE, **{field: value}))
    assert raised.value.field == field


def test_pool_that_holds_no_request_is_refused() -> None:
    layout = FakeModel(block_tokens=1).layout
    one_block = layout.layer_count * layout.block_bytes
    with pytest.raises(ConfigError, match="enough for 1 token; no request fits") as raised:
        build_engine(replace(_FAKE, block_tokens=1, kv_cache_memory=one_block))
    assert raised.value.field == "kv_cache_memory"
    build_engine(replace(_FAKE, block_tokens=1, kv_cache_memory=2 * one_block)).close()


def test_made_up_kv_takes_the_bytes_that_were_asked_for() -> None:
    with built(fake_kv_token_bytes=64 * 2**10, max_model_len=16) as engine:
        assert engine.info.layout.token_bytes == 64 * 2**10
        assert engine.info.total_blocks == 1


def test_size_of_made_up_kv_that_no_records_fill_is_refused_with_the_unit() -> None:
    with pytest.raises(ConfigError, match="is 1500; it must be a multiple of 1024 bytes") as raised:
        read_settings(DecodeConfig, "kaveri decode", ["--fake-kv-token-bytes", "1500"], {})
    assert raised.value.field == "--fake-kv-token-bytes"


def test_pool_that_cannot_be_allocated_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: KvPool, *_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(KvPool, "__init__", fail)
    with pytest.raises(ConfigError, match=r"1048576 bytes cannot be allocated.*Cannot allocate memory") as raised:
        build_engine(_FAKE)
    assert raised.value.field == "kv_cache_memory"


@pytest.mark.parametrize(("engine", "device"), [("fake", "auto"), ("vllm", "cpu"), ("vllm", "auto")])
def test_only_a_pool_that_may_lie_in_a_gpu_may_be_larger_than_the_host(
    engine: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "_GPU_DEVICES", (tmp_path,))
    # If the size passes, vLLM is "not installed".
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        build_engine(replace(_FAKE, engine=engine, device=device, kv_cache_memory=999_999 * 2**30))
    assert raised.value.field == ("engine" if device == "auto" and engine == "vllm" else "kv_cache_memory")


@pytest.mark.parametrize("engine", ["transformers", "vllm", "fake"])
@pytest.mark.parametrize(
    ("field", "value"), [("device", "tpu"), ("kv_cache_memory", 999_999 * 2**30), ("max_model_len", 1)]
)
def test_setting_that_no_engine_can_serve_is_refused_before_torch_is_loaded(
    engine: str, field: str, value: object
) -> None:
    program = (
        "import sys; from kaveri.engine.factory import *\n"
        f"try: build_engine(EngineSettings(engine={engine!r}, {field}={value!r}))\n"
        f"except ConfigError as error: sys.exit(error.field != {field!r} or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("config", "vocab_size"),
    [
        ({"vocab_size": 320}, 320),
        ({"text_config": {"vocab_size": 150_000}}, 150_000),
        ({"text_config": None}, 1000),
        ({}, 1000),
        (None, 1000),
    ],
)
def test_a_fake_engine_takes_the_prompts_of_the_served_models_tokenizer(
    tmp_path: Path, config: dict[str, object] | None, vocab_size: int
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with built(model=str(tmp_path)) as engine:
        assert engine.info.vocab_size == vocab_size


def test_a_fake_engine_knows_bundled_models_and_takes_hub_ids_for_unknown() -> None:
    for engine_name in ("fake", "timed"):
        settings = replace(_FAKE, engine=engine_name, latency_model="opt-13b-a100-tp1")
        for model, vocab_size in (("kaveri-tiny", 1536), ("somebody/model-7b", 1000)):
            with closing(build_engine(replace(settings, model=model))) as engine:
                assert engine.info.vocab_size == vocab_size


@pytest.mark.parametrize(
    "content", ["{", pytest.param("[" * 100_000, id="nested"), '{"vocab_size": 1}', '{"vocab_size": "1536"}']
)
def test_a_model_folder_with_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config.json") as raised:
        build_engine(replace(_FAKE, model=str(tmp_path)))
    assert raised.value.field == "model"


def test_socket_of_a_killed_process_goes_at_the_next_start_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    abandoned = tmp_path / f"kaveri-kv-{ended.pid}-0001.sock"
    # As of another container: its process is unknown here, yet it answers.
    elsewhere = tmp_path / f"kaveri-kv-{ended.pid}-0002.sock"
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as living:
        dead.bind(str(abandoned))
        living.bind(str(elsewhere))
        living.listen()
        with built() as first, built() as second:
            endpoints = first.info.kv_endpoints + second.info.kv_endpoints
            in_use = {Path(endpoint.address) for endpoint in endpoints if endpoint.transport != "tcp"}
            assert set(tmp_path.iterdir()) == {elsewhere, *in_use}


def test_fake_engine_needs_no_torch() -> None:
    program = (
        "import sys; from kaveri.engine.factory import *; "
        "build_engine(EngineSettings(engine='fake', kv_cache_memory=2**20)).close(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
