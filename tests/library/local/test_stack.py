"""Local cluster of real services on the fake engine: start, restarts, end."""

import asyncio
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.config.services import ServiceKind
from kaveri.domain.view import InstanceState
from kaveri.errors import ConfigError, Unavailable
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.process import CONFIG_ERROR_STATUS
from tests.support.local_cluster import run_cluster
from tests.support.redis_fixture import run_redis

pytestmark = pytest.mark.usefixtures("warm_services")
_PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


async def _answer_tokens(target: str) -> int:
    async with AsyncClient(target) as client:
        return len((await client.generate("hello", params=_PARAMS, timeout_s=30.0)).token_ids)


async def test_ready_stack_answers_and_an_ended_one_has_left_nothing(tmp_path: Path) -> None:
    async with run_cluster(prefill_count=2, decode_count=2, log_dir=tmp_path / "logs") as cluster:
        assert await _answer_tokens(cluster.target) == 4
        assert set(cluster.pids()) == {"redis", "router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
        ready = [name for name, one in cluster.view().instances.items() if one.load.state is InstanceState.READY]
        assert sorted(ready) == ["decode-0", "decode-1", "prefill-0", "prefill-1", "router-0"]
        directory = Path(cluster.redis_url.removeprefix("unix://")).parent
    assert sorted(os.listdir(tmp_path / "logs")) == sorted(f"{name}.log" for name in ready)
    assert directory.name not in os.listdir(directory.parent)


async def test_whichever_instance_is_killed_the_cluster_is_whole_again_after_its_restart() -> None:
    async with run_cluster() as cluster:
        for name in ("decode-0", "prefill-0", "router-0"):
            before = cluster.view().instances[name].record.incarnation
            await cluster.kill(name)
            if name == "decode-0":
                await cluster.wait_for_view(lambda view: "decode-0" not in view.instances, within_s=5.0)
            # Others are restarted before the lease of the killed process expires.
            await cluster.restart(name)
            status = cluster.view().instances[name]
            assert status.record.incarnation != before
            assert status.load.state is InstanceState.READY
            assert await _answer_tokens(cluster.target) == 4
        await cluster.kill("redis")
        await cluster.wait_for_view(lambda view: not view.store_connected)
        assert await _answer_tokens(cluster.target) == 4
        await cluster.restart("redis")
        assert await _answer_tokens(cluster.target) == 4
        await cluster.stack.wait_until_ready(60.0)
        await cluster.kill("decode-0")
        cluster.stack.config = replace(cluster.stack.config, flags={ServiceKind.DECODE: ("--chunk-tokens", "many")})
        started_at_s = time.monotonic()
        with pytest.raises(Unavailable, match=r"decode-0 exited with status 2.*many"):
            await cluster.restart("decode-0")
        assert time.monotonic() - started_at_s < 30.0


async def test_stacks_share_a_redis_by_their_names_and_one_of_the_same_name_ends_the_other() -> None:
    async with run_redis() as redis:
        async with (
            run_cluster(redis_url=redis.url, name="blue") as blue,
            run_cluster(redis_url=redis.url, name="green") as green,
            run_cluster(redis_url=redis.url, name="blue", cluster_name="other") as other,
        ):
            assert "redis" not in blue.pids()
            both = {f"{name}-{role}-0" for name in ("blue", "green") for role in ("router", "prefill", "decode")}
            await blue.wait_for_view(lambda view: set(view.instances) == both)
            assert set(other.view().instances) == {name for name in both if name.startswith("blue-")}
            for cluster in (green, other):
                assert await _answer_tokens(cluster.target) == 4
            lives = [{status.record.incarnation for status in one.view().instances.values()} for one in (blue, other)]
            assert not lives[0] & lives[1]
            async with run_cluster(redis_url=redis.url, name="blue") as newer:
                for name in blue.stack.instance_ids:
                    assert await asyncio.wait_for(blue.stack.process(name).wait(), 60.0) == CONFIG_ERROR_STATUS
                    (line,) = blue.stack.process(name).last_lines(1)
                    assert f"--instance-id: another process has registered as '{name}'" in line
                assert set(newer.pids()) == set(newer.stack.instance_ids)
        assert redis.process.exit_status is None


async def test_log_that_cannot_be_written_is_named_when_its_child_ends(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").symlink_to("/dev/full")
    settings = {"prefill_count": 1, "decode_count": 1, "decode_flags": ("--chunk-tokens", "many")}
    config = StackConfig.of(engine="fake", log_dir=tmp_path, **settings)
    with pytest.raises(ConfigError, match=r"decode-0.log cannot be written: No space left on device"):
        async with LocalStack(config):
            pass


async def test_log_folder_that_cannot_be_written_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __enter__(self) -> BinaryIO:
            return open("/dev/full", "wb", buffering=0)

        def __exit__(self, *error: object) -> None:
            return None

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FullDisk())
    with pytest.raises(ConfigError, match=r"--log-dir: cannot write in .*: No space left on device"):
        async with LocalStack(StackConfig.of(engine="fake", log_dir=tmp_path / "logs")):
            pass


async def test_bad_setting_of_a_service_is_its_own_words_and_nothing_is_left() -> None:
    stack = LocalStack(StackConfig.of(engine="fake", prefill_flags=("--chunk-tokens", "many"), start_timeout_s=60.0))
    with pytest.raises(ConfigError, match="many") as caught:
        async with stack:
            pass
    assert caught.value.field == "--chunk-tokens"
    started = ["redis", *stack.instance_ids]
    assert not [name for name in started if psutil.pid_exists(stack.process(name).pid)]


async def test_child_that_crashes_at_the_start_is_named_with_its_last_words() -> None:
    with pytest.raises(ConfigError, match=r"decode-1: was ended by SIGKILL while starting"):
        async with _Saboteur(StackConfig.of(engine="fake", start_timeout_s=60.0), "decode-1"):
            pass


async def test_instance_that_never_gets_ready_fails_the_start_at_its_deadline() -> None:
    with pytest.raises(ConfigError, match=r"not ready after 3 s.*decode-1") as caught:
        async with _Saboteur(StackConfig.of(engine="fake", start_timeout_s=3.0), "decode-1", signal.SIGSTOP):
            pass
    assert caught.value.field == "start"


class _Saboteur(LocalStack):
    def __init__(self, config: StackConfig, victim: str, signal_number: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(config)
        self._victim = victim
        self._signal_number = signal_number

    def _supervise(self, name: str, role: ServiceKind, directory: Path) -> None:
        super()._supervise(name, role, directory)
        if name == self._victim:
            self.process(name).send_signal(self._signal_number)
