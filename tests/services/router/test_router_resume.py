import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import grpc
import pytest
import structlog
from grpc import aio
from prometheus_client import REGISTRY

from kaveri.cluster.store import RequestClaim
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestNotFound, StaleAttempt, Unsupported
from kaveri.lives.request_values import Decoding, InstanceLife, Resuming, SeekingOwner
from kaveri.v1 import decode_pb2, inference_pb2, term_pb2
from services.router import request_placer, subscriptions
from services.router.accepted_request import OwnerHint, hint_to_proto
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster
from tests.services.router.scripted_answers import (
    PROMPT,
    SECRET,
    answer,
    ask,
    ask_again,
    collect,
    eventually,
    rest_of,
    tokens_of,
)
from tests.services.router.scripted_decode import ScriptedDecode


def resumes(outcome: str) -> float:
    return REGISTRY.get_sample_value("kaveri_router_resumes_total", {"outcome": outcome}) or 0.0


@pytest.fixture
def owner(cluster: ScriptedCluster) -> ScriptedDecode:
    """Places every request here, pauses at its tenth token, and has decode-1 hold its replica."""
    cluster.place_on = "decode-0"
    decode = cluster.decodes["decode-0"]
    decode.holder = cluster.decodes["decode-1"]
    decode.pause_at = 10
    return decode


@pytest.fixture
def holder(cluster: ScriptedCluster, owner: ScriptedDecode) -> ScriptedDecode:
    return cluster.decodes["decode-1"]


@contextlib.asynccontextmanager
async def begun(
    cluster: ScriptedCluster, request_id: str = "one", **settings: Any
) -> AsyncIterator[tuple[RouterUnderTest, "asyncio.Task[list[inference_pb2.GenerateResponse]]"]]:
    """A request of which the router has ten tokens and knows the replica."""
    async with cluster.router(**settings) as router:
        call = router.stub.Generate(ask(request_id=request_id), timeout=20)
        collecting = asyncio.create_task(collect(call))
        await eventually(lambda: state_of(router, request_id, 10) is not None)
        yield router, collecting


def state_of(router: RouterUnderTest, request_id: str, next_index: int) -> Decoding | None:
    entry = router.router.table.get(request_id)
    state = None if entry is None else entry.state
    return state if isinstance(state, Decoding) and state.next_index == next_index and state.replica else None


async def test_the_holder_goes_on_with_the_requests_of_a_killed_instance(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "CONNECT_GRACE_S", 60.0)
    before = resumes("resumed")
    with structlog.testing.capture_logs() as logs:
        async with begun(cluster) as (router, collecting):
            await cluster.instances["decode-0"].die()
            responses = await collecting
            steps = [step.event for step in router.router.recent.account_of("one").steps]
    assert tokens_of(responses) == answer(PROMPT, 20)
    assert [step.split(" ")[0] for step in steps] == ["attempt", "lost", "attempt"], steps
    assert steps[1].startswith("lost decode-0: ")
    assert steps[2] == "attempt 2 resumed at decode-1"
    (taken,) = cluster.taken()
    (resume,) = holder.resumes
    assert (resume.term.attempt, resume.generated_count) == (taken.term.attempt + 1, 10)
    assert tuple(resume.token_ids) == (*PROMPT, *answer(PROMPT, 10))
    timing = responses[-1].timing
    assert (timing.resumes, timing.attempts, timing.held_tokens, timing.recomputed_tokens) == (1, 2, 12, 1)
    assert cluster.prefills[timing.prefill_instance_id].requests == [taken]
    assert timing.decode_instance_id == "decode-1"
    assert timing.stall_s > 0
    (change,) = [line for line in logs if line["event"] == "owner_changed"]
    assert (change["outcome"], change["former_instance_id"]) == ("resumed", "decode-0")
    assert (change["new_instance_id"], change["held_tokens"]) == ("decode-1", 12)
    assert change["stall_s"] == pytest.approx(timing.stall_s, abs=1e-3)
    assert "decode-0" in change["cause"]
    assert resumes("resumed") == before + 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestNotFound("one"), "not_found"),
        (NoCapacity("decode", 0.1), "no_room"),
        (Unsupported("replicas are off here"), "refused"),
        (InvalidArgument("token_ids[3]", 1, "that of the copy"), "refused"),
        (StaleAttempt("one", 2, 5), "refused"),
    ],
)
async def test_a_refused_request_is_computed_again_at_once(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode, error: KaveriError, outcome: str
) -> None:
    holder.refusal = error
    before = resumes(outcome)
    async with begun(cluster) as (_, collecting):
        cluster.place_on = "decode-1"
        await cluster.kill("decode-0")
        responses = await collecting
    assert tokens_of(responses) == answer(PROMPT, 20)
    assert len(holder.resumes) == 1, "one try at each holder"
    _, second = sorted(cluster.taken(), key=lambda request: request.term.attempt)
    assert second.term.attempt == (6 if isinstance(error, StaleAttempt) else 3)
    timing = responses[-1].timing
    assert (timing.attempts, timing.resumes, timing.held_tokens) == (2, 0, 0)
    assert timing.recomputed_tokens == len(PROMPT) + 10
    assert timing.stall_s > 0
    assert resumes(outcome) == before + 1


async def test_a_resume_that_another_life_of_the_holder_answers_is_none(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode
) -> None:
    holder.may_answer.clear()
    holder.may_step.clear()
    await cluster.add_decode("decode-2")
    async with begun(cluster) as (router, collecting):
        cluster.place_on = "decode-2"
        await cluster.kill("decode-0")
        (entry,) = router.router.table.entries()
        await eventually(lambda: isinstance(entry.state, Resuming) and bool(holder.resumes))
        holder.incarnation += 1
        holder.may_answer.set()
        responses = await collecting
    assert tokens_of(responses) == answer(PROMPT, 20)
    assert (responses[-1].timing.resumes, responses[-1].timing.decode_instance_id) == (0, "decode-2")


async def test_the_next_life_of_a_hinted_owner_is_not_asked_for_what_the_holder_has(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode
) -> None:
    owner.attachable.add("one")
    holder.copies.add("one")
    async with cluster.router() as router:
        await eventually(lambda: router.router.feeds.is_connected(InstanceLife("decode-1", holder.incarnation)))
        hint = OwnerHint(None, InstanceLife("decode-0", 1), InstanceLife("decode-1", holder.incarnation))
        rest = await rest_of(router.stub.Generate(ask_again(answer(PROMPT, 10), hint), timeout=20))
    assert answer(PROMPT, 10) + tokens_of(rest) == answer(PROMPT, 20)
    assert (rest[-1].timing.resumes, owner.attached) == (1, [])


async def test_a_prompt_whose_stream_breaks_while_it_is_attached_is_attached_again(
    cluster: ScriptedCluster, owner: ScriptedDecode
) -> None:
    prefill = cluster.prefills["prefill-0"]
    prefill.handed_over_to = owner
    owner.attachable.add("one")
    async with cluster.router() as router:
        life = InstanceLife("prefill-0", prefill.incarnation)
        await eventually(lambda: router.router.feeds.is_connected(life))
        prefill.when_attached = [lambda: router.router.feeds._subscriptions["prefill-0"].break_off("in the test")]
        rest = await rest_of(router.stub.Generate(ask_again(answer(PROMPT, 10), OwnerHint(life)), timeout=20))
    assert answer(PROMPT, 10) + tokens_of(rest) == answer(PROMPT, 20)
    assert rest[-1].timing.attempts == 1


@pytest.mark.parametrize("hinted", ["decode", "prefill", "decode, the store by a former one", "none"])
@pytest.mark.parametrize("known_at_prefill", [False, True])
async def test_a_client_that_has_more_than_a_former_owner_is_placed_again(
    cluster: ScriptedCluster, hinted: str, known_at_prefill: bool
) -> None:
    """The last owner has died. The one before, cut off, still generates and is behind; prefill may still name it."""
    former = cluster.decodes["decode-0"]
    cluster.prefills["prefill-0"].handed_over_to = former if known_at_prefill else None
    former.attach_refusal = InvalidArgument("received.token_ids", "10 tokens", "at most 4: no more were generated")
    cluster.place_on = "decode-0"
    async with cluster.router() as router:
        life = cluster.instances["decode-1"].record.incarnation
        await cluster.instances["decode-1"].die()
        request = ask_again(answer(PROMPT, 10))
        if "store" in hinted:
            hint = OwnerHint(decode=InstanceLife("decode-0", former.incarnation))
            stored = hint_to_proto(hint).SerializeToString()
            claim = RequestClaim("one", "router-9", 1, secret_hash=sha256(SECRET).hexdigest(), hint=stored)
            cluster.cluster.put_request(claim, 60.0)
        if hinted != "none":
            told = (
                # Prefill had not named the next decode instance.
                inference_pb2.OwnerHint(prefill_instance_id="prefill-9", prefill_incarnation=1)
                if hinted == "prefill"
                else inference_pb2.OwnerHint(decode_instance_id="decode-1", decode_incarnation=life)
            )
            request.received.owner.CopyFrom(told)
            rest = await rest_of(router.stub.Generate(request, timeout=60))
            assert answer(PROMPT, 10) + tokens_of(rest) == answer(PROMPT, 20)
            return
        with pytest.raises(aio.AioRpcError) as refused:
            await rest_of(router.stub.Generate(request, timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_attempts_after_a_re_attach_go_on_counting_however_long_it_ran(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the replica's holder would refuse the second attempt of the same number."""
    monkeypatch.setattr(request_placer, "ATTEMPT_REMEMBERED_S", 0.0)
    owner.attachable.add("one")
    async with cluster.router() as router:
        request = ask_again(answer(PROMPT, 5))
        call = router.stub.Generate(request, timeout=20)
        await eventually(lambda: state_of(router, "one", 10) is not None)
        await cluster.kill("decode-0")
        assert answer(PROMPT, 5) + tokens_of(await rest_of(call)) == answer(PROMPT, 20)
    (attached,), (resume,) = owner.attached, holder.resumes
    assert (attached.term.attempt, resume.term.attempt) == (1, 2)


async def test_a_copy_that_is_named_before_the_answer_to_an_attach_is_known_to_a_later_session(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode
) -> None:
    owner.attachable.add("one")
    owner.may_answer.clear()
    async with cluster.router() as router:
        request = ask_again(answer(PROMPT, 5))
        call = router.stub.Generate(request, timeout=20)
        await eventually(lambda: owner.is_paused)
        entry = router.router.table.get("one")
        assert entry is not None
        await eventually(lambda: isinstance(entry.state, SeekingOwner) and entry.state.held.token_count == 5)
        owner.may_answer.set()
        while not (response := await call.read()).HasField("owner"):
            pass
        assert (response.owner.decode_instance_id, response.owner.holder_instance_id) == ("decode-0", "decode-1")
        owner.may_step.set()
        await rest_of(call)


async def test_a_holder_that_has_refused_is_not_asked_once_more_when_no_instance_has_the_request(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode
) -> None:
    async with cluster.router() as router:
        life = cluster.instances["decode-0"].record.incarnation
        await cluster.instances["decode-0"].die()
        cluster.place_on = "decode-1"
        hint = OwnerHint(None, InstanceLife("decode-0", life), InstanceLife("decode-1", holder.incarnation))
        request = ask_again(answer(PROMPT, 10), hint)
        rest = await rest_of(router.stub.Generate(request, timeout=20))
    assert answer(PROMPT, 10) + tokens_of(rest) == answer(PROMPT, 20)
    assert len(holder.resumes) == 1


async def test_what_an_earlier_session_still_has_elsewhere_is_ended(
    cluster: ScriptedCluster, owner: ScriptedDecode, holder: ScriptedDecode
) -> None:
    """The client re-attached here while the holder was asked to resume the earlier session."""
    owner.attachable.add("one")
    async with cluster.router() as router:
        request = ask(request_id="one", secret=SECRET, session=1)
        request.received.max_tokens = 20
        call = router.stub.Generate(request, timeout=20)
        await eventually(lambda: state_of(router, "one", 10) is not None)
        feeds, life = router.router.feeds, InstanceLife("decode-0", owner.incarnation)
        late = decode_pb2.RequestTokens(request_id="one", term=term_pb2.Term(attempt=2), index=9, token_ids=[7])
        feeds._deliver(life, late, 0.0)
        elsewhere = life._replace(instance_id="decode-1", incarnation=holder.incarnation)
        over = decode_pb2.RequestTokens(request_id="one", term=term_pb2.Term(attempt=3), error="gave up")
        feeds._deliver(elsewhere, over, 0.0)
        feeds._deliver(elsewhere, late, 0.0)
        await eventually(lambda: ("one", 2) in holder.aborted)
        assert (owner.aborted, holder.aborted) == ([], [("one", 2)])
        owner.may_step.set()
        assert tokens_of(await rest_of(call)) == answer(PROMPT, 20)
