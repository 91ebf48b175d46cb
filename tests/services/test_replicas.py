"""Requests resumed from KV copies continue with the same tokens; copies end with their requests. Mostly the former
owner keeps running, like one that was frozen."""

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaOffer, Resumption
from kaveri.domain.sampling import ResolvedParams
from kaveri.domain.view import ReplicaCounts
from kaveri.feeds.expiring import ExpiringMap
from kaveri.v1 import decode_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.wire.messages import layout_to_proto
from kaveri.wire.replicas import offer_to_proto, resumption_to_proto
from services.decode import replicator
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.refusals import refuses

ROUTER = "router-0"
REPLICATED = {
    "replication": "ring",
    "replica_min_tokens": 16,
    "replica_memory": 2**21,
    "fake_step_s": 0.01,
    "orphan_grace_s": 1.0,
}


@dataclass
class Owned:
    prompt: list[int]
    expected: list[int]
    owner: Any
    holder: Any
    router: Any
    first: int

    @property
    def answer(self) -> list[int]:
        return [self.first, *self.router.drawn("a")]

    @property
    def replica(self) -> decode_pb2.Replica:
        replica: decode_pb2.Replica = self.router.replicas["a", 1]
        return replica

    def message(self, token_count: int | None = None, **fields: Any) -> decode_pb2.ResumeRequest:
        """Resume after `token_count` tokens of the answer; None: after all that the router has."""
        answer = self.answer[:token_count]
        resumption = Resumption(
            "a",
            Ownership(Term(0, 2), ROUTER),
            (*self.prompt, *answer),
            len(answer),
            ResolvedParams(max_tokens=len(self.expected), seed=0),
            60.0,
            None,
            self.replica.holder_incarnation,
        )
        message = resumption_to_proto(resumption)
        for name, value in fields.items():
            setattr(message.term if name == "attempt" else message, name, value)
        return message

    async def rest(self) -> list[int]:
        await eventually(lambda: self.router.finished("a", 2), "it ends at the holder")
        tokens: list[int] = self.router.drawn("a", 2)
        return tokens

    async def resume(self, message: decode_pb2.ResumeRequest) -> decode_pb2.ResumeResponse:
        response: decode_pb2.ResumeResponse = await DecodeServiceStub(self.holder.channel).Resume(message, timeout=30)
        return response


@pytest.fixture
def begin(cluster: Any) -> Any:
    async def begin(max_tokens: int = 200, prompt_tokens: int = 50, copied: int = 48, **settings: Any) -> Owned:
        """Begin a request; return once its KV copy has at least `copied` tokens."""
        prefill = await cluster.prefill()
        decodes = {name: await cluster.decode(name, **REPLICATED | settings) for name in ("decode-0", "decode-1")}
        router = await cluster.router(ROUTER)
        token_ids = prompt(5, prompt_tokens)
        call = router.prefill(prefill, "a", token_ids, max_tokens)
        await call.ended()

        def is_copied() -> bool:
            replica = router.replicas.get(("a", 1))
            return replica is not None and replica.token_count >= copied

        await eventually(is_copied, "a copy is held")
        holder = decodes.pop(router.replicas["a", 1].holder_id)
        (owner,) = decodes.values()
        expected = cluster.expected(token_ids, max_tokens)
        return Owned(token_ids, expected, owner, holder, router, call.get("first_token").token_id)

    return begin


async def nothing_is_held(cluster: Any) -> None:
    for name, replicas in cluster.replicas.items():
        await eventually(lambda replicas=replicas: replicas.usage().used_bytes == 0, f"{name} holds no copy")
        replicas.check_integrity()


async def test_a_request_goes_on_at_the_holder_of_its_copy_with_the_same_tokens(cluster: Any, begin: Any) -> None:
    owned = await begin()
    assert owned.owner.metric("kaveri_replica_copied_tokens_total") >= 48

    def counts_of(instance: Any) -> ReplicaCounts:
        counts: ReplicaCounts = instance.load().replica_counts
        return counts

    await eventually(lambda: counts_of(owned.owner).owned == 1, "the owner says that it has a copy")
    assert counts_of(owned.owner).unprotected == 0
    assert counts_of(owned.holder) == ReplicaCounts()
    message = owned.message()
    generated_count = message.generated_count
    resumed = await owned.resume(message)
    assert resumed.held_tokens >= 48
    assert counts_of(owned.holder).resumed == 1
    assert resumed.held_tokens % owned.holder.engine.info.layout.block_tokens == 0
    await owned.owner.abort("a")
    assert await owned.rest() == owned.expected[generated_count:]
    assert min(owned.router.tokens["a", 2]) == generated_count
    timing = owned.router.last["a", 2].timing
    assert timing.held_tokens == resumed.held_tokens
    assert timing.recomputed_tokens == len(message.token_ids) - resumed.held_tokens
    await cluster.all_free()
    await nothing_is_held(cluster)


async def test_a_resume_may_be_asked_for_twice(cluster: Any, begin: Any) -> None:
    owned = await begin()
    message = owned.message()
    first = await owned.resume(message)
    assert await owned.resume(message) == first
    await owned.owner.abort("a")
    await eventually(lambda: owned.router.finished("a", 2), "it ends at the holder")
    assert await owned.resume(message) == first, "also shortly after its end"
    assert owned.router.duplicates == 0


async def test_a_router_with_fewer_tokens_than_the_copy_resumes_from_its_own(cluster: Any, begin: Any) -> None:
    owned = await begin(copied=80)
    resumed = await owned.resume(owned.message(token_count=4))
    assert resumed.held_tokens == 48, "whole blocks of the 54 tokens that the router has"
    await owned.owner.abort("a")
    assert await owned.rest() == owned.expected[4:]


async def test_what_a_former_owner_goes_on_to_draw_changes_nothing_at_the_holder(cluster: Any, begin: Any) -> None:
    owned = await begin(max_tokens=300)
    await owned.resume(owned.message())
    # It hears that its push has ended, and that the holder has a newer owner, and gives the request up.
    await eventually(lambda: owned.owner.metric("kaveri_replica_losses_total") == 1, "the owner's copy is over")
    await eventually(owned.owner.free, "the owner has given it up")
    assert owned.owner.metric("kaveri_decode_requests_total", outcome="replaced") == 1
    await eventually(lambda: owned.router.finished("a", 2), "it ends at the holder")
    assert len(owned.router.tokens["a", 2]) > 0
    gained = owned.router.tokens["a", 2]
    assert [gained[index] for index in sorted(gained)] == owned.expected[min(gained) :]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"request_id": "b"}, grpc.StatusCode.NOT_FOUND),
        ({"holder_incarnation": 1}, grpc.StatusCode.NOT_FOUND),
        ({"secret": bytes(16)}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"router_id": "router-1"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"attempt": 1}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"timeout_s": 0.0}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_resume_by_any_other_is_refused_and_disturbs_nothing(
    cluster: Any, begin: Any, fields: dict[str, Any], status: grpc.StatusCode
) -> None:
    owned = await begin(max_tokens=120)
    with refuses(status):
        await owned.resume(owned.message(**fields))
    await eventually(lambda: owned.router.finished("a"), "it ends at its owner")
    assert owned.answer == owned.expected
    assert owned.owner.metric("kaveri_replica_losses_total") == 0
    await nothing_is_held(cluster)


async def test_a_resume_with_another_prompt_is_refused_and_the_copy_stays_for_the_right_one(
    cluster: Any, begin: Any
) -> None:
    owned = await begin()
    message = owned.message()
    wrong = decode_pb2.ResumeRequest.FromString(message.SerializeToString())
    wrong.token_ids[3] += 1
    with refuses(grpc.StatusCode.INVALID_ARGUMENT, "token_ids[3]"):
        await owned.resume(wrong)
    assert (await owned.resume(message)).held_tokens >= 48
    await owned.owner.abort("a")
    await owned.holder.abort("a", 2)


async def test_a_holder_does_not_take_the_next_life_of_an_owner_for_the_one_that_it_has_a_copy_of(
    cluster: Any, begin: Any
) -> None:
    owned = await begin()
    holder = owned.holder.service._holder
    (held,) = holder._held.values()
    owner_id, life = held.offer.owner_id, held.offer.owner_incarnation
    assert owner_id == owned.owner.instance_id
    assert holder._is_there(owner_id, life)
    assert not holder._is_there(owner_id, life + 1)
    await owned.owner.abort("a")
    await nothing_is_held(cluster)


async def test_a_draining_owner_whose_router_is_gone_keeps_its_request(
    cluster: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = await begin(max_tokens=400, orphan_grace_s=60.0)
    released: list[Any] = []
    monkeypatch.setattr(owned.owner.engine, "release", lambda *args: released.append(args))
    owned.router.unsubscribe(owned.owner)
    streams = owned.owner.service._instance.owners.feeds
    await eventually(lambda: not streams.has(ROUTER), "its router is gone")
    owned.owner.service.drain()
    watermark = cluster.replicas[owned.holder.instance_id].usage
    used_bytes = watermark().used_bytes
    await eventually(lambda: watermark().used_bytes > used_bytes, "it draws on, and its copy grows")
    assert not released
    await owned.owner.abort("a")


async def test_only_a_few_requests_of_a_draining_owner_stand_still_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await cluster.prefill()
    owner = await cluster.decode("decode-0", **REPLICATED)
    other = await cluster.decode("decode-1", **REPLICATED)
    router = await cluster.router(ROUTER)
    names = [f"r{number}" for number in range(7)]
    for number, name in enumerate(names):
        await router.prefill(prefill, name, prompt(number, 20), 450).ended()
    asked: list[Any] = []
    monkeypatch.setattr(owner.engine, "release", lambda key, timeout_s: asked.append(key))
    here = [name for name in names if name in owner.service._instance.owners.by_id]
    owner.service.drain()
    await eventually(lambda: len(asked) >= min(2, len(here)), "some are let go")
    await eventually(lambda: owner.metric("kaveri_replicas_owned") == len(here), "all have copies")
    for _ in range(3):
        owner.service._replicator._move_some()
    assert len(asked) == min(2, len(here))
    assert len(set(asked)) == len(asked)
    for name in names:
        for decode in (owner, other):
            await decode.abort(name)


async def test_a_draining_owner_lets_the_next_request_go_when_the_one_before_goes_on_at_its_holder(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "_MOST_MOVING", 1)
    monkeypatch.setattr(replicator, "_RESUME_TIMEOUT_S", 60.0)
    prefill = await cluster.prefill()
    owner = await cluster.decode("decode-0", **REPLICATED)
    router = await cluster.router(ROUTER)
    answers = {}
    for name in ("a", "b"):
        call = router.prefill(prefill, name, prompt(5, 50), 450)
        await call.ended()
        answers[name] = call.get("first_token").token_id
    holder = await cluster.decode("decode-1", **REPLICATED)
    await eventually(lambda: len(router.replicas) == 2, "both have copies")
    let_go: list[Any] = []
    release = owner.engine.release

    def count_and_release(key: Any, timeout_s: float) -> None:
        let_go.append(key)
        release(key, timeout_s)

    monkeypatch.setattr(owner.engine, "release", count_and_release)
    owner.service.drain()
    await eventually(lambda: any(end.moved for end in router.last.values()), "one is let go")
    ((first, _),) = (key for key, end in router.last.items() if end.moved)
    second = "b" if first == "a" else "a"

    def second_could_go() -> bool:
        return 50 + len(router.tokens[second, 1]) - router.replicas[second, 1].token_count <= 16

    await eventually(second_could_go, "the copy of the second is nearly whole")
    owner.service._replicator._move_some()
    assert len(let_go) == 1
    gained = (answers[first], *router.drawn(first))
    resumption = Resumption(
        first,
        Ownership(Term(0, 2), ROUTER),
        (*prompt(5, 50), *gained),
        len(gained),
        ResolvedParams(max_tokens=450, seed=0),
        60.0,
        None,
        router.last[first, 1].replica.holder_incarnation,
        replica_tokens=router.last[first, 1].replica.token_count,
    )
    await DecodeServiceStub(holder.channel).Resume(resumption_to_proto(resumption), timeout=30)
    await eventually(lambda: router.finished(second, 1), "the second is let go")
    assert router.last[second, 1].moved
    for decode in (owner, holder):
        for name in ("a", "b"):
            await decode.abort(name, attempt=3)


def offer(holder: Any, request_id: str, token_count: int = 50, attempt: int = 1, router_id: str = ROUTER) -> Any:
    ownership = Ownership(Term(0, attempt), router_id)
    layout = holder.engine.info.layout
    return offer_to_proto(ReplicaOffer(request_id, ownership, "decode-9", 1, layout, token_count, 60.0))


async def refusal(holder: Any, message: Any) -> grpc.StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await DecodeServiceStub(holder.channel).OpenReplica(message, timeout=60)
    code: grpc.StatusCode = caught.value.code()
    return code


async def test_a_holder_refuses_what_it_cannot_hold_by_name(cluster: Any) -> None:
    off = await cluster.decode("decode-0")
    assert await refusal(off, offer(off, "a")) is grpc.StatusCode.FAILED_PRECONDITION
    resumption = Resumption("a", Ownership(Term(0, 1), ROUTER), (1, 2), 1, ResolvedParams(), 1.0, None, 1)
    with refuses(grpc.StatusCode.FAILED_PRECONDITION, "replicas are off"):
        await DecodeServiceStub(off.channel).Resume(resumption_to_proto(resumption), timeout=60)
    holder = await cluster.decode("decode-1", **REPLICATED)
    stub = DecodeServiceStub(holder.channel)
    other = offer(holder, "a")
    other.layout.CopyFrom(layout_to_proto(holder.engine.info.layout))
    other.layout.dtype = "float16"
    assert await refusal(holder, other) is grpc.StatusCode.FAILED_PRECONDITION
    await stub.OpenReplica(offer(holder, "a", attempt=2), timeout=60)
    # Seconds later it remembers the owner by the copy alone.
    holder.service._instance.owners._newest = ExpiringMap(60.0, max_count=1)
    assert await refusal(holder, offer(holder, "a", attempt=1)) is grpc.StatusCode.ABORTED
    assert await refusal(holder, offer(holder, "a", router_id="router-1")) is grpc.StatusCode.UNAVAILABLE
    assert await refusal(holder, offer(holder, "b", token_count=10**6)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert holder.load().replica_free_bytes < holder.load().replica_total_bytes


async def test_a_full_holder_drops_short_copies_for_a_long_one(cluster: Any) -> None:
    holder = await cluster.decode("decode-0", **REPLICATED | {"replica_memory": 2**20})
    stub = DecodeServiceStub(holder.channel)
    total = holder.load().replica_total_bytes
    layout = holder.engine.info.layout
    blocks = total // (layout.layer_count * layout.block_bytes)
    short = layout.block_tokens * 3
    for number in range(blocks // 4):
        await stub.OpenReplica(offer(holder, f"r{number}", short), timeout=60)
    assert await refusal(holder, offer(holder, "equal", short)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await refusal(holder, offer(holder, "long", 4 * short)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    replicas = cluster.replicas["decode-0"]
    await eventually(lambda: replicas.usage().used_bytes < total - total // 20, "there is room")
    await stub.OpenReplica(offer(holder, "long", 4 * short), timeout=60)
    assert holder.metric("kaveri_replica_drops_total", cause="full") >= 3
