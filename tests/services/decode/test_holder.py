"""Which copies a holder keeps, of which owners, over a store that moves nothing."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.replica import ReplicaLocation, ReplicaOffer, Resumption
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import ClusterView
from kaveri.errors import InvalidArgument, NoCapacity, RequestAlreadyExists, StaleAttempt, Unavailable
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import ReplicaGrew, ReplicaKey, ReplicaUsage
from services.decode import holding
from services.decode.forwarder import ReplicaForwarder
from services.decode.holder import ReplicaHolder
from services.decode.replica_metrics import ReplicaMetrics

LAYOUT = KvLayout("m", 2, block_tokens=4, kv_head_count=2, head_dim=8, dtype="float32")
SECRET = bytes(16)
TOKENS = tuple(range(1, 10))


class Store:
    """Keeps the names of copies."""

    layout = LAYOUT

    def __init__(self) -> None:
        self.keys: set[ReplicaKey] = set()
        self.starved: set[ReplicaKey] = set()
        self.sealed: set[ReplicaKey] = set()
        self.lives = {("d0", 1)}
        """Of the cluster's instances."""

    def open(self, key: ReplicaKey, layout: KvLayout, token_count: int, expires_in_s: float, *, stays: bool) -> str:
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
    def note_owner(self, request_id: str, ownership: Ownership) -> None:
        """Knows of none."""

    def resumed(self, request_id: str, ownership: Ownership) -> None:
        """Has resumed none."""


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
    return Ownership(Owner(session, attempt), f"router-{session}", secret)


def offer(number: int, session: int = 0, attempt: int = 1) -> ReplicaOffer:
    return ReplicaOffer("r", owned(session, attempt), "d0", 1, LAYOUT, 20, 60.0, number)


def test_a_late_close_of_an_earlier_copy_leaves_the_one_that_was_opened_again(holder: ReplicaHolder) -> None:
    holder.open(offer(1))
    holder.open(offer(2))
    holder.close("r", owned(0, 1), 1)
    assert holder.held_count == 1
    holder.close("r", owned(0, 1), 2)
    assert holder.held_count == 0


def test_a_late_close_of_the_owners_own_copy_leaves_one_that_was_pushed_on(holder: ReplicaHolder) -> None:
    """Its numbers said nothing about those of the owner: the copy was dropped."""
    pushing: Any = SimpleNamespace()
    forwarder = ReplicaForwarder(pushing, pushing, pushing, random.Random(1))
    holder.open(replace(offer(next(forwarder._numbers)), owner_id="d1"))
    holder.close("r", owned(0, 1), 5)
    assert holder.held_count == 1


def test_a_late_open_of_an_earlier_copy_is_refused(holder: ReplicaHolder) -> None:
    holder.open(offer(2))
    with pytest.raises(Unavailable):
        holder.open(offer(1))
    holder.close("r", owned(0, 1), 1)
    assert holder.held_count == 1


def test_the_complete_copy_of_an_earlier_request_makes_room_for_one_that_uses_its_id_again(
    holder: ReplicaHolder, store: Store
) -> None:
    """The earlier one had had a later session. The new owner was refused as if that were its own, and ended the
    request."""
    holder.open(offer(1, session=1, attempt=2))
    holder._take(holder._held["r"], holding.OwnerGaveUp())
    again = Ownership(Owner(0, 1), "router-9", b"the secret of another request")
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
    assert holder.held_count == 1
    holder.close("r", owned(1, 1))
    assert holder.held_count == 0


def test_an_update_of_another_copy_or_with_another_secret_changes_nothing(holder: ReplicaHolder) -> None:
    holder.open(offer(3))
    holder.update("r", owned(1, 1), 2)
    holder.update("unknown", owned(1, 1), 3)
    with pytest.raises(InvalidArgument):
        holder.update("r", owned(1, 1, bytes(range(16))), 3)
    holder.close("r", owned(0, 1))
    assert holder.held_count == 0


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
    assert holder.held_count == 1


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
    assert holder.held_count == 1
    holder._drop_expired(opened_s + 60.0)
    assert holder.held_count == 0


async def test_a_copy_that_was_pushed_on_is_dropped_soon(store: Store) -> None:
    """It stayed for the whole grace time, and no request could use it any more."""

    class PushingForwarder:
        async def push_on(self, key: ReplicaKey, offer: ReplicaOffer, context_tokens: int) -> ReplicaLocation:
            return ReplicaLocation("d2", 1, 8)

    metrics = ReplicaMetrics(CollectorRegistry())
    holder = ReplicaHolder(FullInstance(), store, 7, 60.0, lambda *_: True, metrics, PushingForwarder())  # type: ignore[arg-type]
    holder.open(offer(1))
    params = ResolvedParams(max_tokens=20, seed=0)
    resumption = Resumption("r", owned(0, 2), TOKENS, 2, params, 60.0, None, 7, may_push_on=True)
    async with asyncio.timeout(5), holder._tasks:
        await holder.resume(resumption)
    now_s = time.monotonic()
    holder._drop_expired(now_s + 2.0)
    assert holder.held_count == 1, "the router may ask again when it has lost the answer"
    holder._drop_expired(now_s + 3.1)
    assert holder.held_count == 0


async def test_a_holder_that_drains_pushes_its_copies_on_and_waits_for_no_longer_than_a_second(store: Store) -> None:
    pushed: list[ReplicaKey] = []

    class Draining:
        owners = Owners()

        async def reserve_resumed(self, resumption: Resumption, held_tokens: int) -> None:
            raise Unavailable("the instance is draining")

    class NotingForwarder:
        async def push_on(self, key: ReplicaKey, offer: ReplicaOffer, context_tokens: int) -> ReplicaLocation:
            pushed.append(key)
            return ReplicaLocation("d2", 1, 8)

    metrics = ReplicaMetrics(CollectorRegistry())
    holder = ReplicaHolder(Draining(), store, 7, 60.0, lambda *_: True, metrics, NotingForwarder())  # type: ignore[arg-type]
    holder.open(offer(1))
    (key,) = store.keys
    holder.drain()
    now_s = time.monotonic()
    assert store.sealed == {key}, "its owner must look for another holder"
    assert not holder.is_idle
    with pytest.raises(Unavailable):
        holder.open(replace(offer(2), request_id="other"))
    params = ResolvedParams(max_tokens=20, seed=0)
    resumption = Resumption("r", owned(0, 2), TOKENS, 2, params, 60.0, None, 7, may_push_on=True)
    async with asyncio.timeout(5), holder._tasks:
        assert (await holder.resume(resumption)).replica == ReplicaLocation("d2", 1, 8)
    assert pushed == [key]
    holder._drop_expired(now_s + 1.1)
    assert holder.is_idle


async def test_a_copy_that_was_pushed_on_stays_the_newer_owners_that_goes_on_from_it(store: Store) -> None:
    pushes: asyncio.Queue[asyncio.Future[ReplicaLocation]] = asyncio.Queue()

    class WaitingForwarder:
        async def push_on(self, key: ReplicaKey, offer: ReplicaOffer, context_tokens: int) -> ReplicaLocation:
            push: asyncio.Future[ReplicaLocation] = asyncio.get_running_loop().create_future()
            pushes.put_nowait(push)
            return await push

    metrics = ReplicaMetrics(CollectorRegistry())
    holder = ReplicaHolder(FullInstance(), store, 7, 10.0, lambda *_: True, metrics, WaitingForwarder())  # type: ignore[arg-type]
    holder.open(offer(1))
    async with asyncio.timeout(5), holder._tasks:
        resumes, taken = [], []
        for session, attempt in ((0, 2), (1, 1)):
            params = ResolvedParams(max_tokens=20, seed=0)
            resumption = Resumption("r", owned(session, attempt), TOKENS, 2, params, 60.0, None, 7, may_push_on=True)
            resumes.append(asyncio.ensure_future(holder.resume(resumption)))
            taken.append(await pushes.get())
        taken[0].set_result(ReplicaLocation("d2", 1, 8))
        assert (await resumes[0]).replica == ReplicaLocation("d2", 1, 8)
        holder.close("r", owned(0, 2))
        assert holder.held_count == 1, "a late abort of the older owner has closed it"
        taken[1].set_result(ReplicaLocation("d3", 1, 8))
        await resumes[1]
        holder.close("r", owned(1, 1))
    assert holder.held_count == 0


@pytest.mark.parametrize("error", [RequestAlreadyExists("r"), StaleAttempt("r", 1, 3), Unavailable("it drains")])
async def test_an_instance_that_refuses_a_copy_ends_no_request(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A newer owner that it knows of may be the one that asks."""
    record = SimpleNamespace(instance_id="d2", incarnation=1, address="127.0.0.1:1")
    target = SimpleNamespace(record=record, load=SimpleNamespace(sequence_number=0))
    monkeypatch.setattr("services.decode.forwarder.choose_holder", lambda *args, **named: target)
    cluster: Any = SimpleNamespace(view=ClusterView)
    forwarder = ReplicaForwarder(store, cluster, record, random.Random(1))  # type: ignore[arg-type]

    async def refuse(*args: object) -> int:
        raise error

    monkeypatch.setattr(forwarder, "_push", refuse)
    with pytest.raises(NoCapacity, match="d2 has not taken the copy"):
        await forwarder.push_on(ReplicaKey("r", 0, 1), offer(1), len(TOKENS))
