import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import pytest

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.store import RequestClaim
from kaveri.domain.view import InstanceLoad, InstanceRecord, Role
from kaveri.errors import InvalidArgument
from kaveri.wire.messages import id_drawn_from
from services.router.claims import _FLUSH_AFTER_S, _MOST_AT_ONCE, RequestClaims
from services.router.request_table import RequestTable
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import SECRET, collect, eventually, finish, refused, rest_of

OTHER = InstanceRecord("router-9", 7, Role.ROUTER, "127.0.0.1:1", "kaveri-tiny", lease_ttl_s=0.5)
HELD = RequestClaim("mine", OTHER.instance_id, OTHER.incarnation)


@contextlib.asynccontextmanager
async def beside_another(
    cluster: ScriptedCluster, *, lives: bool = True
) -> AsyncIterator[tuple[RouterUnderTest, MemoryStore]]:
    """A router with another one in its view. lives: the other one keeps sending heartbeats."""
    async with cluster.router() as router, MemoryStore(cluster.cluster) as other:
        await other.heartbeat(OTHER, InstanceLoad())
        beating = asyncio.create_task(Heartbeat(other, OTHER, InstanceLoad, 0.05).run() if lives else asyncio.sleep(0))
        await eventually(lambda: OTHER.instance_id in router.router.store.view().instances)
        yield router, other
        beating.cancel()


async def test_an_id_that_its_client_drew_from_the_secret_waits_for_no_claim(cluster: ScriptedCluster) -> None:
    async with beside_another(cluster) as (router, other):
        drawn, foreign = (replace(HELD, request_id=id_drawn_from(secret)) for secret in (SECRET, b"another" * 3))
        for held in (drawn, foreign):
            cluster.cluster.put_request(held, 60.0)
        await finish(router.ask(request_id=drawn.request_id, secret=SECRET))
        again = collect(router.ask(request_id=foreign.request_id, secret=SECRET))
        await refused(again, grpc.StatusCode.ALREADY_EXISTS)
        await other.close_requests([drawn, foreign])


async def test_a_session_whose_id_a_later_one_has_claimed_elsewhere_ends(cluster: ScriptedCluster) -> None:
    """A router that stalled while tokenizing finds out at its own claim, after the placement."""
    later = replace(HELD, request_id=id_drawn_from(SECRET), session=1, secret_hash=hashlib.sha256(SECRET).hexdigest())
    cluster.pausing()
    async with beside_another(cluster) as (router, other):
        cluster.cluster.put_request(later, 60.0)
        call = router.ask(request_id=later.request_id, secret=SECRET)
        await refused(rest_of(call), grpc.StatusCode.ALREADY_EXISTS)
        assert cluster.cluster.requests() == (later,)
        await other.close_requests([later])


async def test_the_request_id_of_a_router_that_has_died_waits_for_its_lease_and_is_free_then(
    cluster: ScriptedCluster,
) -> None:
    async with beside_another(cluster, lives=False) as (router, _):
        cluster.cluster.put_request(HELD, 60.0)
        started_s = time.monotonic()
        await finish(router.ask(request_id="mine"))
        assert time.monotonic() - started_s < 20.0


async def test_the_request_id_of_a_router_that_lives_is_refused_at_its_next_heartbeat(cluster: ScriptedCluster) -> None:
    async with beside_another(cluster) as (router, other):
        cluster.cluster.put_request(HELD, 60.0)
        started_s = time.monotonic()
        await refused(collect(router.ask(request_id="mine")), grpc.StatusCode.ALREADY_EXISTS)
        assert time.monotonic() - started_s < 20.0
        assert cluster.cluster.requests() == (HELD,), "the other router's claim stays"
        await other.close_requests([HELD])


async def test_the_ids_of_requests_that_ended_while_the_store_was_away_are_free_when_it_returns(
    cluster: ScriptedCluster,
) -> None:
    cluster.pausing()
    async with cluster.router() as router, MemoryStore(cluster.cluster) as other:
        call = router.ask(request_id="mine")
        await cluster.read_until_paused(call)
        cluster.cluster.take_away()
        cluster.let_all_go()
        await rest_of(call)
        claims = router.router.claims
        await eventually(lambda: claims._ended and claims._timer is None and claims._flushing is None)
        cluster.cluster.bring_back()
        assert cluster.cluster.request("mine") is not None
        await eventually(lambda: cluster.cluster.request("mine") is None)
        assert await other.claim_request(HELD, 60.0) is None
        await other.close_requests([HELD])


async def test_a_later_session_waits_for_the_end_of_a_dead_routers_claim_of_another_request(
    cluster: ScriptedCluster,
) -> None:
    """The store was away when the first session began, so an older claim is still there."""
    of_another = replace(HELD, secret_hash="of another request", hint=b"of another request")
    async with beside_another(cluster, lives=False) as (router, _):
        cluster.cluster.put_request(of_another, 60.0)
        claims = router.router.claims
        claim = claims.claim_of("mine", 1, SECRET)
        assert await asyncio.wait_for(claims.open(claim, 60.0), 20.0) == b""
        assert cluster.cluster.requests() == (claim,)
        claims.close(claim)


async def test_a_later_session_is_refused_once_the_router_that_has_another_request_is_heard(
    cluster: ScriptedCluster,
) -> None:
    of_another = replace(HELD, secret_hash="of another request")
    async with beside_another(cluster) as (router, other):
        cluster.cluster.put_request(of_another, 60.0)
        claims = router.router.claims
        with pytest.raises(InvalidArgument, match="secret"):
            await asyncio.wait_for(claims.open(claims.claim_of("mine", 1, SECRET), 60.0), 20.0)
        assert cluster.cluster.requests() == (of_another,), "the other router's claim stays"
        await other.close_requests([of_another])


async def test_a_claim_that_this_router_has_left_behind_refuses_nothing(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await eventually(lambda: "router-0" in router.router.store.view().instances)
        life = router.router.store.view().instances["router-0"].record
        cluster.cluster.put_request(replace(HELD, router_id="router-0", router_incarnation=life.incarnation), 60.0)
        await finish(router.ask(request_id="mine"))


async def test_a_request_that_another_router_has_begun_ends_at_once_and_is_not_placed_again(
    cluster: ScriptedCluster,
) -> None:
    decode = cluster.pausing()
    async with cluster.router() as router:
        call = router.ask(request_id="mine")
        await cluster.read_until_paused(call)
        decode.fail_next, decode.replaced_next = "another router has begun it", True
        cluster.let_all_go()
        await refused(rest_of(call), grpc.StatusCode.ALREADY_EXISTS)
        assert len(cluster.taken()) == 1


class CountingStore(MemoryStore):
    closed: int = 0

    async def close_requests(self, claims: Sequence[RequestClaim]) -> bool:
        self.closed += 1
        return await super().close_requests(claims)


async def test_a_router_that_ends_closes_all_claims_and_starts_no_work_afterwards() -> None:
    cluster = MemoryCluster()
    async with CountingStore(cluster) as store:
        claims = RequestClaims(store, "router-0", 1)
        names = [f"request-{number}" for number in range(2 * _MOST_AT_ONCE + 1)]
        for name in names:
            await claims.open(claims.claim_of(name, 0, b""), 60.0)
        for name in names:
            claims.close(claims.claim_of(name, 0, b""))
        await claims.end()
        assert store.cluster.requests() == ()
        before = store.closed
        # The last calls may end after the claims are closed.
        claims.close(claims.claim_of("late", 0, b""))
        claims.update(store.view())
        await asyncio.sleep(3 * _FLUSH_AFTER_S)
        assert store.closed == before


async def test_a_router_that_ends_without_its_store_does_not_wait_for_it() -> None:
    cluster = MemoryCluster()
    async with MemoryStore(cluster) as store:
        claims = RequestClaims(store, "router-0", 1)
        await claims.open(claims.claim_of("mine", 0, b""), 60.0)
        cluster.take_away()
        claims.close(claims.claim_of("mine", 0, b""))
        async with asyncio.timeout(5):
            await claims.end()


class StandingStore(MemoryStore):
    async def find_request(self, request_id: str) -> RequestClaim | None:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_re_attach_that_is_cut_short_leaves_no_claim_of_the_session_before() -> None:
    async with StandingStore(MemoryCluster()) as store:
        claims = RequestClaims(store, "router-0", 1)
        first, second = claims.claim_of("mine", 0, SECRET), claims.claim_of("mine", 1, SECRET)
        await claims.open(first, 60.0)
        claims.close(first)
        opening = asyncio.create_task(claims.open(second, 60.0))
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        claims.close(second)
        await claims.end()
        assert store.cluster.requests() == ()


@pytest.mark.parametrize(
    ("session", "secret", "field"),
    [(3, b"t" * 16, "secret"), (3, b"", "secret"), (2, SECRET, "session"), (1, SECRET, "session")],
)
async def test_a_session_that_is_not_the_next_one_of_the_same_request_leaves_the_present_one_alone(
    session: int, secret: bytes, field: str
) -> None:
    table = RequestTable(1)
    present, late = (asyncio.create_task(asyncio.sleep(60.0)) for _ in range(2))
    slot = table.reserve("r", 2, SECRET, present)
    with pytest.raises(InvalidArgument) as refused:
        table.reserve("r", session, secret, late)
    assert refused.value.field == field
    assert table.slot_of("r") is slot
    assert slot.interruption is None
    for task in (present, late):
        task.cancel()
