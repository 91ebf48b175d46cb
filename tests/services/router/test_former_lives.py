"""Messages of former runs of instances and routers, and of successors at their addresses, are told apart."""

from dataclasses import replace
from typing import Any

import pytest

from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.cluster.store import RequestClaim
from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Role
from kaveri.errors import Unavailable
from kaveri.lives.request_values import InstanceLife
from kaveri.v1 import inference_pb2
from services.router.claims import RequestClaims
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import PROMPT, SECRET, answer, collect, eventually, tokens_of


async def test_another_life_that_answers_at_the_address_is_not_followed_and_owns_nothing(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, record = cluster.decodes["decode-0"], cluster.instances["decode-0"].record
    async with cluster.router() as router:
        feeds, life = router.router.feeds, InstanceLife("decode-0", record.incarnation)
        await eventually(lambda: feeds.is_connected(life))
        assert not feeds.is_connected(life._replace(incarnation=life.incarnation + 1))
        decode.incarnation += 1
        decode.attachable.add("one")
        mine = Ownership(Term(1, 1), "router", SECRET)
        with pytest.raises(Unavailable, match="restarted"):
            await feeds.attach(record, Attachment("one", mine, PROMPT, 0))
        subscription = feeds._subscriptions["decode-0"]
        read, asked = feeds._read, []

        async def read_again(*args: Any) -> None:
            asked.append(args)
            await read(*args)

        monkeypatch.setattr(feeds, "_read", read_again)
        subscription.break_off("planted")
        await eventually(lambda: len(asked) > 3)
        assert not feeds.is_connected(life)


async def test_an_instance_that_starts_again_at_its_address_is_followed_in_its_new_life(
    cluster: ScriptedCluster,
) -> None:
    decode, instance = cluster.decodes["decode-0"], cluster.instances["decode-0"]
    cluster.place_on = "decode-0"
    async with cluster.router() as router:
        feeds = router.router.feeds
        await eventually(lambda: feeds.is_connected(InstanceLife("decode-0", decode.incarnation)))
        decode.incarnation += 1
        instance.heartbeat._record = replace(instance.record, incarnation=decode.incarnation)
        await eventually(lambda: feeds.is_connected(InstanceLife("decode-0", decode.incarnation)))
        responses = await collect(router.ask())
    assert (tokens_of(responses), responses[-1].timing.attempts) == (answer(PROMPT, 20), 1)


class ClaimedStore(MemoryStore):
    """A store in which a restarted router's former run has claimed an id."""

    lookups = 0

    async def claim_request(self, claim: RequestClaim, ttl_s: float) -> RequestClaim | None:
        self.lookups += 1
        return RequestClaim("mine", "router-9", 7) if self.lookups < 8 else None

    def view(self) -> ClusterView:
        record = InstanceRecord("router-9", 8, Role.ROUTER, "127.0.0.1:1", "m", lease_ttl_s=1.0)
        return ClusterView({"router-9": InstanceStatus(record, InstanceLoad(), 0.0)})


async def test_the_next_life_of_a_router_does_not_speak_for_the_claims_of_the_one_before() -> None:
    async with ClaimedStore(MemoryCluster()) as store:
        claims = RequestClaims(store, "router-0", 1)
        assert await claims.open(claims.claim_of("mine", 0, b""), 60.0) == b""


async def test_a_request_whose_router_has_started_again_may_be_cancelled(cluster: ScriptedCluster) -> None:
    """The client may re-attach here."""
    async with cluster.router() as router:
        former = RequestClaim("mine", "router-0", router.router.incarnation + 1, secret_hash="of its client")
        cluster.cluster.put_request(former, 60.0)
        assert (await router.stub.Cancel(inference_pb2.CancelRequest(request_id="mine"), timeout=60)).found
        await router.router.store.close_requests([former])
