"""ReplicaHolder over a store that moves no bytes: copies that it keeps and drops."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaOffer, Resumption
from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import EngineKey, KeepingEngine, KvPushed
from kaveri.errors import ConfigError, InvalidArgument, NoCapacity, RequestAlreadyExists, StaleAttempt, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import (
    ReplicaDropped,
    ReplicaGrew,
    ReplicaKey,
    ReplicaOrphaned,
    ReplicaStore,
    ReplicaUsage,
)
from kaveri.lives import copy_holder
from kaveri.policy.replication import ReplicationMode
from kaveri.policy.waits import COPY_STARVED_S
from services.decode.holder import ReplicaHolder
from services.decode.replica_metrics import ReplicaMetrics
from services.decode.replicated import ReplicatedDecode, open_replicas

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
SECRET = bytes(16)
TOKENS = tuple(range(1, 10))


class Store:
    layout = LAYOUT

    def __init__(self) -> None:
        self.keys: set[ReplicaKey] = set()
        self.starved: set[ReplicaKey] = set()
        self.sealed: set[ReplicaKey] = set()
        self.lives = {("d0", 1)}

    def open(
        self,
        key: ReplicaKey,
        layout: KvLayout,
        token_count: int,
        expires_in_s: float,
        *,
        stays: bool,
        extends: ReplicaKey | None,
    ) -> str:
        self.keys.discard(extends or key)
        self.keys.add(key)
        return f"ticket of {key}"

    def drop(self, key: ReplicaKey) -> None:
        self.keys.discard(key)

    def seal(self, key: ReplicaKey) -> None:
        self.sealed.add(key)

    def is_starved(self, key: ReplicaKey) -> bool:
        return key in self.starved

    def watermark(self, key: ReplicaKey) -> int:
        return len(TOKENS) - 1

    def token_ids(self, key: ReplicaKey) -> tuple[int, ...]:
        return TOKENS[:-1]

    def usage(self) -> ReplicaUsage:
        return ReplicaUsage(0, 1024, len(self.keys))


class Owners:
    def note_owner(self, request_id: str, ownership: Ownership) -> None: ...

    def resumed(self, request_id: str, ownership: Ownership) -> None: ...


class FullInstance:
    owners = Owners()

    async def reserve_resumed(self, resumption: Resumption, held_tokens: int) -> None:
        raise NoCapacity("decode", 0.1, "the pool is full")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def holder(store: Store) -> ReplicaHolder:
    metrics = ReplicaMetrics(CollectorRegistry())
    return ReplicaHolder(FullInstance(), store, 7, 10.0, lambda *life: life in store.lives, metrics)  # type: ignore[arg-type]


def owned(session: int, attempt: int, secret: bytes = SECRET) -> Ownership:
    return Ownership(Term(session, attempt), f"router-{session}", secret)


def offer(number: int, session: int = 0, attempt: int = 1) -> ReplicaOffer:
    return ReplicaOffer("r", owned(session, attempt), "d0", 1, LAYOUT, 20, 60.0, number)


def test_a_late_close_of_an_earlier_copy_leaves_the_one_that_was_opened_again(holder: ReplicaHolder) -> None:
    holder.open(offer(1))
    holder.open(offer(2))
    holder.close("r", owned(0, 1), 1)
    assert len(holder._held) == 1
    holder.close("r", owned(0, 1), 2)
    assert len(holder._held) == 0


def test_a_late_open_of_an_earlier_copy_is_refused(holder: ReplicaHolder) -> None:
    holder.open(offer(2))
    with pytest.raises(Unavailable):
        holder.open(offer(1))
    holder.close("r", owned(0, 1), 1)
    assert len(holder._held) == 1


def test_the_complete_copy_of_an_earlier_request_makes_room_for_one_that_uses_its_id_again(
    holder: ReplicaHolder, store: Store
) -> None:
    holder.open(offer(1, session=1, attempt=2))
    holder._take(holder._held["r"], copy_holder.BareEvent.OWNER_GAVE_UP)
    again = Ownership(Term(0, 1), "router-9", b"the secret of another request")
    holder.open(replace(offer(1), ownership=again))
    assert store.keys == {ReplicaKey("r", 0, 1)}


@pytest.mark.parametrize("close", [lambda holder: holder.close("r", owned(0, 1)), lambda holder: holder.open(offer(4))])
def test_an_older_session_changes_nothing_once_the_request_was_attached(
    holder: ReplicaHolder, close: Callable[[ReplicaHolder], Any]
) -> None:
    holder.open(offer(3))
    holder.update("r", owned(1, 1), 3)
    with contextlib.suppress(StaleAttempt, RequestAlreadyExists):
        close(holder)
    assert len(holder._held) == 1
    holder.close("r", owned(1, 1))
    assert len(holder._held) == 0


def test_an_update_of_another_copy_or_with_another_secret_changes_nothing(holder: ReplicaHolder) -> None:
    holder.open(offer(3))
    holder.update("r", owned(1, 1), 2)
    holder.update("unknown", owned(1, 1), 3)
    with pytest.raises(InvalidArgument):
        holder.update("r", owned(1, 1, bytes(range(16))), 3)
    holder.close("r", owned(0, 1))
    assert len(holder._held) == 0


def test_an_update_of_a_former_owner_gives_it_nothing_back(holder: ReplicaHolder) -> None:
    holder.open(offer(3))
    holder.update("r", owned(2, 1), 3)
    holder.update("r", owned(1, 1), 3)
    holder.close("r", owned(1, 1))
    assert len(holder._held) == 1


def test_another_request_with_the_same_id_gets_no_room_while_the_copy_is_in_use(
    holder: ReplicaHolder, store: Store
) -> None:
    holder.open(offer(3))
    held = set(store.keys)
    with pytest.raises(Unavailable):
        holder.open(replace(offer(4), ownership=owned(9, 9, bytes(range(16)))))
    assert store.keys == held


async def test_another_request_with_the_same_id_neither_closes_a_copy_nor_waits_for_it(holder: ReplicaHolder) -> None:
    holder.open(offer(3))
    other = owned(9, 9, bytes(range(16)))
    holder.close("r", other)
    assert len(holder._held) == 1
    with pytest.raises(InvalidArgument):
        async with asyncio.timeout(10.0):
            await holder.await_resumed("r", other, 3)


def test_late_news_of_a_copy_change_nothing_of_the_one_that_replaced_it(holder: ReplicaHolder, store: Store) -> None:
    holder.open(offer(1))
    (former,) = store.keys
    holder.open(offer(1, attempt=2))
    lost = "the link is lost"
    for news in (ReplicaGrew(former, 16), ReplicaOrphaned(former, lost), ReplicaDropped(former, lost)):
        holder._hear(news)
    (held,) = holder._held.values()
    assert (held.key.attempt, held.watermark, held.state) == (2, 0, copy_holder.Growing())


async def test_a_former_owner_resumes_nothing_however_long_the_present_one_has_the_copy(holder: ReplicaHolder) -> None:
    holder.open(offer(1, session=1, attempt=2))
    late = Resumption("r", owned(0, 5), TOKENS, 1, ResolvedParams(), 60.0, None, holder_incarnation=7)
    with pytest.raises(RequestAlreadyExists):
        await holder.resume(late)
    with pytest.raises(StaleAttempt):
        await holder.resume(replace(late, ownership=owned(1, 1)))


def test_a_copy_that_finds_no_block_for_long_is_shut_and_kept(holder: ReplicaHolder, store: Store) -> None:
    holder.open(offer(1))
    (key,) = store.keys
    store.starved.add(key)
    holder._drop_expired(100.0)
    store.starved.clear()
    holder._drop_expired(102.0)
    store.starved.add(key)
    holder._drop_expired(103.0)
    holder._drop_expired(105.9)
    assert not store.sealed, "it had a block in between"
    holder._drop_expired(106.0)
    assert store.sealed == {key}
    holder._drop_expired(115.0)
    assert len(holder._held) == 1


def test_the_copy_of_an_owner_whose_life_has_left_the_cluster_is_kept_for_the_grace_time(
    holder: ReplicaHolder, store: Store
) -> None:
    holder.open(offer(1))
    (key,) = store.keys
    opened_s = time.monotonic()
    holder._hear(ReplicaGrew(key, 16))
    holder._drop_expired(opened_s + 50.0)
    # It died while it was cut off, and lives again: its connection was never closed.
    store.lives = {("d0", 2)}
    holder._drop_expired(opened_s + 50.0)
    holder._drop_expired(opened_s + 59.0)
    assert len(holder._held) == 1
    holder._drop_expired(opened_s + 60.0)
    assert len(holder._held) == 0


async def test_a_holder_that_drains_takes_no_copy_and_keeps_those_it_has_for_a_second(
    holder: ReplicaHolder, store: Store
) -> None:
    holder.open(offer(1))
    (key,) = store.keys
    holder.drain()
    now_s = time.monotonic()
    assert store.sealed == {key}, "its owner must look for another holder"
    assert not holder.is_idle
    with pytest.raises(Unavailable):
        holder.open(replace(offer(2), request_id="other"))
    holder._drop_expired(now_s + 1.1)
    assert holder.is_idle


class Keeper:
    def __init__(self) -> None:
        self.kept: list[tuple[EngineKey, ReplicaKey]] = []

    def keep(self, key: EngineKey, replica: ReplicaKey) -> None:
        self.kept.append((key, replica))


def keeping(store: Store) -> tuple[ReplicaHolder, Keeper]:
    """A holder whose store is in the pool of an engine that keeps prompts."""
    keeper, metrics = Keeper(), ReplicaMetrics(CollectorRegistry())
    life: Any = FullInstance()
    engine, memory = cast(KeepingEngine, keeper), cast(ReplicaStore, store)
    return ReplicaHolder(life, memory, 7, 10.0, lambda *_: True, metrics, engine), keeper


PROMPT, KEY = EngineKey("r", 3), ReplicaKey("r", 0, 1)


def pushed(store: Store, holder: ReplicaHolder) -> None:
    """The engine's news that the prompt's push was accepted, and that its blocks are a replica now."""
    store.keys.add(KEY)
    holder.handle([KvPushed(PROMPT, 100, "unix", KEY, 8)])


def test_a_kept_prompt_is_a_complete_copy_until_its_owner_extends_it(store: Store) -> None:
    holder, keeper = keeping(store)
    holder.keep(PROMPT, offer(0))
    assert keeper.kept == [(PROMPT, KEY)]
    pushed(store, holder)
    held = holder._held["r"]
    assert isinstance(held.state, copy_holder.Complete)
    holder.open(offer(1))
    held = holder._held["r"]
    assert (held.state, held.watermark, held.offer.number) == (copy_holder.Growing(), 8, 1)
    assert store.keys == {KEY}, "what was kept is extended, not dropped"


def test_a_kept_prompt_whose_owner_never_extends_it_is_dropped_like_a_copy_that_nobody_began(store: Store) -> None:
    for grows in (False, True):
        holder, _ = keeping(store)
        holder.keep(PROMPT, offer(0))
        pushed(store, holder)
        opened_s = time.monotonic()
        holder.open(offer(1))
        if grows:
            holder._hear(ReplicaGrew(KEY, 24))
        holder._drop_expired(opened_s + 9.0)
        assert "r" in holder._held
        holder._drop_expired(opened_s + 11.0)
        assert ("r" in holder._held) is grows, "its owner may have missed the ticket"


@pytest.mark.parametrize("why", ["its request has ended", "another copy of it is here", "the holder drains"])
def test_a_prompt_that_nobody_can_use_is_not_kept(store: Store, why: str) -> None:
    holder, _ = keeping(store)
    holder.keep(PROMPT, offer(0))
    if why == "its request has ended":
        holder.forget(PROMPT)
    elif why == "the holder drains":
        holder.drain()
    else:
        holder.open(offer(1, attempt=2))
    pushed(store, holder)
    assert KEY not in store.keys
    assert all(held.key != KEY for held in holder._held.values())


def test_a_holder_that_drains_keeps_no_prompts(store: Store) -> None:
    holder, keeper = keeping(store)
    holder.drain()
    holder.keep(PROMPT, offer(0))
    assert not keeper.kept


def test_a_copy_that_was_asked_for_before_the_news_of_what_was_kept_stays(store: Store) -> None:
    holder, _ = keeping(store)
    holder.keep(PROMPT, offer(0))
    holder.open(offer(1))
    pushed(store, holder)
    assert store.keys == {KEY}
    assert isinstance(holder._held["r"].state, copy_holder.Growing)


@pytest.mark.parametrize("always_holds", [False, True])
def test_an_instance_that_ceases_to_decode_goes_on_holding_only_if_it_is_of_a_pair(always_holds: bool) -> None:
    instance, holder, replicator = Mock(), Mock(), Mock()
    decode = ReplicatedDecode(instance, holder, replicator, always_holds=always_holds)
    decode.drain()
    assert holder.method_calls == [call.drain()], "the whole instance drains"
    holder.reset_mock()
    # Its drain was taken back, and it serves prefill only.
    decode.drain(0.0)
    assert holder.method_calls == [call.undrain() if always_holds else call.drain()]


class _Part:
    """Stand-in for the instance or the holder of a decode service: busy until `idle` is set."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.wait_idle = self.idle.wait

    @property
    def is_idle(self) -> bool:
        return self.idle.is_set()


async def test_an_instance_is_not_idle_while_a_request_runs_that_was_resumed_from_a_copy_in_its_drain() -> None:
    instance, holder = _Part(), _Part()
    decode = ReplicatedDecode(cast(Any, instance), cast(Any, holder), Mock(), always_holds=False)
    instance.idle.set()
    waiting = asyncio.create_task(decode.wait_idle())
    await asyncio.sleep(0)
    instance.idle.clear()
    holder.idle.set()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    instance.idle.set()
    await waiting


def test_a_copy_in_the_pool_that_finds_no_block_is_dropped_and_takes_none_from_requests(store: Store) -> None:
    holder, _ = keeping(store)
    holder.open(offer(1))
    store.starved.add(KEY)
    now_s = time.monotonic()
    for later_s in (0.0, COPY_STARVED_S):
        holder._drop_expired(now_s + later_s)
    assert not holder._held
    assert not store.keys


async def test_copies_in_the_pool_are_refused_by_name_for_an_engine_that_cannot_keep_them() -> None:
    config: Any = Mock(replication=ReplicationMode.PAIR, replica_place="pool")
    engine: Any = Mock(info=Mock(engine="vllm", can_replicate=True, can_keep=False))
    with pytest.raises(ConfigError, match="--replica-place: is pool; vllm keeps copies in host memory only"):
        async with open_replicas(config, engine):
            raise AssertionError("it was opened")
