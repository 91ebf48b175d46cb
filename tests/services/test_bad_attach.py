"""Invalid attachments to requests of others are refused by field and limit, and disturb nothing."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio

from kaveri.domain.attachment import Attachment
from kaveri.domain.owner import Ownership, Term
from kaveri.errors import InvalidArgument, KaveriError, RequestNotFound, Unavailable
from kaveri.v1 import feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.attempts import attachment_to_proto, ownership_to_proto
from kaveri.wire.status import error_of
from tests.services.conftest import eventually

SECRET = b"0123456789abcdef"
PROMPT = tuple(range(1, 41))
MINE = Ownership(Term(1, 1), "router-1", SECRET)
RIGHT = Attachment("a", MINE, PROMPT, 0)

WRONG = {
    "another secret": (replace(RIGHT, ownership=MINE._replace(secret=b"another secret, too")), "secret"),
    "no secret": (replace(RIGHT, ownership=MINE._replace(secret=b"")), "secret"),
    "the same session": (replace(RIGHT, ownership=MINE._replace(term=Term(0, 2))), "session"),
    "another prompt": (replace(RIGHT, token_ids=PROMPT[::-1]), "prompt"),
    "a shorter prompt": (replace(RIGHT, token_ids=PROMPT[:-1]), "prompt"),
    "another token": (replace(RIGHT, token_ids=(*PROMPT, 0), generated_count=1), "received.token_ids"),
    "more tokens": (replace(RIGHT, token_ids=(*PROMPT, *[0] * 150), generated_count=150), "received.token_ids"),
    "another request": (replace(RIGHT, request_id="b"), ""),
}


async def refusal(attaching: Awaitable[object]) -> KaveriError:
    with pytest.raises(aio.AioRpcError) as caught:
        await attaching
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    return error_of(caught.value)


async def check_refused(attach: Callable[[Attachment], Awaitable[object]], has_ended: bool = False) -> None:
    for name, (wrong, field) in WRONG.items():
        error = await refusal(attach(wrong))
        if not field or (has_ended and field == "secret"):
            assert isinstance(error, RequestNotFound), name
            continue
        assert isinstance(error, InvalidArgument), name
        assert error.field.partition("[")[0] == field, name
        assert error.limit, name
        assert "0123456789" not in str(error), name


async def begin(router: Any, prefill: Any, max_tokens: int) -> Any:
    call = router.prefill(prefill, "a", PROMPT, max_tokens, secret=SECRET)
    await eventually(lambda: call.seen("started"), "it has begun")
    return call


async def let_it_decode(cluster: Any) -> tuple[Any, Any, Any]:
    decode = await cluster.decode(fake_step_s=0.01, orphan_grace_s=60.0)
    router = await cluster.router()
    await (await begin(router, await cluster.prefill(), 120)).ended()
    await eventually(lambda: len(router.tokens.get(("a", 1), ())) > 3, "it decodes")
    return decode, router, FeedServiceStub(decode.channel)


async def test_a_decode_instance_gives_a_request_to_its_own_client_alone(cluster: Any) -> None:
    _, router, stub = await let_it_decode(cluster)
    answer = cluster.expected(list(PROMPT), 120)
    await check_refused(lambda wrong: stub.Attach(attachment_to_proto(wrong), timeout=60))
    await eventually(lambda: router.finished("a"), "it ends")
    assert router.drawn("a") == answer[1:]
    # An answer that is kept is guarded as well, and its client still gets it.
    await check_refused(lambda wrong: stub.Attach(attachment_to_proto(wrong), timeout=60), has_ended=True)
    attached = await stub.Attach(attachment_to_proto(replace(RIGHT, token_ids=(*PROMPT, answer[0]), generated_count=1)))
    assert attached.attached.max_tokens == 120
    await cluster.all_free()


async def test_a_client_that_asks_for_text_gets_no_routers_stream_or_request(cluster: Any) -> None:
    _, router, stub = await let_it_decode(cluster)
    following = feed_pb2.FollowRequest(form=feed_pb2.FORM_TEXT, router_id=router.router_id)
    attaching = attachment_to_proto(RIGHT)
    attaching.form = feed_pb2.FORM_TEXT
    for refused in (stub.Follow(following).read(), stub.Attach(attaching, timeout=60)):
        with pytest.raises(aio.AioRpcError):
            await refused
    await eventually(lambda: router.finished("a"), "it ends")
    assert router.drawn("a") == cluster.expected(list(PROMPT), 120)[1:]


async def test_a_decode_instance_that_gave_a_request_up_is_not_attached_for_nothing(cluster: Any) -> None:
    decode, router, stub = await let_it_decode(cluster)
    attempt = ownership_to_proto("a", Ownership(Term(0, 1), router.router_id, SECRET))
    await stub.Abort(feed_pb2.AbortRequest(attempts=[attempt], by_router=True))
    await cluster.all_free()
    (kept,) = decode.service.owners._kept.values()
    drawn = tuple(cluster.expected(list(PROMPT), 120)[: kept.log.next_index])
    everything = replace(RIGHT, token_ids=(*PROMPT, *drawn), generated_count=len(drawn))
    assert isinstance(await refusal(stub.Attach(attachment_to_proto(everything), timeout=60)), RequestNotFound)
    # One that lacks a token gets it.
    less = replace(RIGHT, token_ids=(*PROMPT, *drawn[:-1]), generated_count=len(drawn) - 1)
    attached = await stub.Attach(attachment_to_proto(less), timeout=60)
    assert attached.attached.max_tokens == 120


async def test_a_decode_instance_does_not_take_one_prefill_instances_request_for_anothers(cluster: Any) -> None:
    """Both instances have computed the prompt, and may have sampled different first tokens."""
    decode, _, stub = await let_it_decode(cluster)
    by_another = attachment_to_proto(replace(RIGHT, placed_by="another"))
    assert isinstance(await refusal(stub.Attach(by_another, timeout=60)), RequestNotFound)
    (there,) = decode.service.owners.by_serial.values()
    attached = await stub.Attach(attachment_to_proto(replace(RIGHT, placed_by=there.placed_by)), timeout=60)
    assert there.placed_by
    assert attached.attached.max_tokens == 120
    await stub.Abort(feed_pb2.AbortRequest(attempts=[ownership_to_proto("a", MINE)], by_router=True))
    await cluster.all_free()


async def test_a_prefill_instance_gives_a_request_to_its_own_client_alone(cluster: Any) -> None:
    prefill = await cluster.prefill(fake_step_s=0.3, chunk_tokens=8, orphan_grace_s=60.0)
    decode = await cluster.decode()
    router = await cluster.router()
    call = await begin(router, prefill, 5)
    stub = FeedServiceStub(prefill.channel)

    async def attach(attachment: Attachment) -> object:
        return await stub.Attach(attachment_to_proto(replace(attachment, at_prefill=True)), timeout=60)

    await check_refused(attach)
    await call.ended()
    assert call.seen("handed_over")
    await eventually(lambda: router.finished("a"), "it ends")
    await eventually(decode.free, "it is over")
    other = replace(RIGHT, ownership=MINE._replace(secret=b"another secret, too"))
    assert isinstance(await refusal(attach(other)), RequestNotFound)
    # The request's own router, in a later attempt, looks for it everywhere: these reports are of an earlier one.
    later = replace(RIGHT, ownership=Ownership(Term(0, 2), router.router_id, SECRET))
    assert isinstance(await refusal(attach(later)), RequestNotFound)
    # What it keeps of the request answers a later session.
    kept: Any = await attach(RIGHT)
    assert kept.attached.max_tokens == 5
    await cluster.all_free()


async def test_an_attachment_meant_for_another_life_of_an_instance_is_refused_as_unavailable(cluster: Any) -> None:
    decode, router, stub = await let_it_decode(cluster)
    answer = cluster.expected(list(PROMPT), 120)
    other_tokens = replace(RIGHT, token_ids=(*PROMPT, answer[0] + 1), generated_count=1)
    # INVALID_ARGUMENT would be wrong: the client's tokens may come from that other life.
    message = attachment_to_proto(other_tokens, decode.host.record.incarnation + 1)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.Attach(message, timeout=60)
    assert isinstance(error_of(caught.value), Unavailable)
    await eventually(lambda: router.finished("a"), "it ends")
    await cluster.all_free()
