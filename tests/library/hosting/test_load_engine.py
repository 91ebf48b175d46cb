import asyncio
import os
import threading
from unittest import mock

import pytest

from kaveri.engine import factory, own_process
from kaveri.engine.settings import EngineSettings
from kaveri.errors import ConfigError
from kaveri.hosting.config import load_engine

FAKE = EngineSettings(engine="fake", kv_cache_memory=2**20)


async def test_an_engine_that_is_loaded_is_returned() -> None:
    engine = await load_engine(FAKE, asyncio.Event())
    assert engine is not None
    engine.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies are Linux's")
@pytest.mark.parametrize(("engine", "is_batch"), [("vllm", True), ("fake", False)])
async def test_an_instance_that_wakes_does_not_interrupt_the_process_of_its_engine(
    engine: str, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_process, "OwnProcessEngine", mock.Mock())
    usual = os.sched_getscheduler(0)
    try:
        loaded = await load_engine(EngineSettings(engine=engine, kv_cache_memory=2**20), asyncio.Event())
        assert os.sched_getscheduler(0) == (os.SCHED_BATCH if is_batch else usual)
    finally:
        os.sched_setscheduler(0, usual, os.sched_param(0))
    assert loaded is not None
    loaded.close()


async def test_stopping_while_it_loads_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def build(settings: EngineSettings) -> None:
        loading.set()
        go_on.wait(30)
        ended.set()

    monkeypatch.setattr(factory, "build_engine", build)
    stopping = asyncio.Event()
    waiting = asyncio.create_task(load_engine(FAKE, stopping))
    assert await asyncio.to_thread(loading.wait, 10)
    stopping.set()
    assert await asyncio.wait_for(waiting, 5) is None
    assert not ended.is_set()
    # The thread's late result has no effect.
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_setting_that_cannot_be_is_named_by_its_flag() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        await load_engine(EngineSettings(engine="fake", kv_cache_memory=1), asyncio.Event())


async def test_loading_that_ends_its_thread_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: EngineSettings) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(factory, "build_engine", build)
    with pytest.raises(ConfigError, match="ended while it was loaded: SystemExit"):
        await asyncio.wait_for(load_engine(FAKE, asyncio.Event()), 10)
