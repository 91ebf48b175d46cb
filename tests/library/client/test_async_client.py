import asyncio
import gc
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from kaveri import (
    AsyncClient,
    AsyncStream,
    Chunk,
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    KaveriError,
    Message,
    ModelNotFound,
    NoCapacity,
    RequestAlreadyExists,
    SamplingParams,
    Unavailable,
    Usage,
)
from tests.library.client.inference_double import InferenceDouble, until
from tests.support.redis_fixture import free_port

FIVE = SamplingParams(max_tokens=5)


async def test_generate_returns_the_whole_answer(target: str) -> None:
    async with AsyncClient(target) as client:
        completion = await client.generate("prompt", params=FIVE, request_id="mine")
    assert completion.request_id == "mine"
    assert completion.text == "abcde"
    assert completion.token_ids == (0, 1, 2, 3, 4)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.finish_reason == "length"
    assert completion.usage == Usage(prompt_tokens=6, completion_tokens=5)
    assert completion.logprobs == ()


async def test_text_held_back_until_the_end_is_part_of_the_answer(target: str) -> None:
    async with AsyncClient(target) as client:
        assert (await client.generate("held", params=FIVE)).text == "abcde!"


async def test_timing_holds_the_callers_clock_and_the_servers_split(target: str) -> None:
    async with AsyncClient(target) as client:
        timing = (await client.generate("prompt", params=FIVE)).timing
        one_token = (await client.generate("prompt", params=SamplingParams(max_tokens=1))).timing
    assert timing.ttft_s is not None
    assert timing.tpot_s is not None
    assert timing.tpot_s > 0
    assert 0 < timing.ttft_s <= timing.ttft_s + 4 * timing.tpot_s <= timing.e2e_s
    assert one_token.tpot_s is None
    server = timing.server
    assert (server.router_s, server.prefill_queue_s, server.prefill_s) == (0.001, 0.002, 0.003)
    assert (server.kv_transfer_s, server.kv_tail_s) == (0.004, 0.005)
    assert (server.decode_queue_s, server.decode_s) == (0.006, 0.007)
    assert (server.kv_bytes, server.kv_transport, server.attempts) == (4096, "tcp", 2)
    assert (server.prefill_instance_id, server.decode_instance_id) == ("prefill-0", "decode-1")
    assert (server.ttft_s, server.e2e_s) == (0.008, 0.009)


async def test_stream_yields_chunks_with_consecutive_indices(target: str) -> None:
    async with AsyncClient(target) as client:
        chunks = [chunk async for chunk in client.stream("prompt", params=FIVE)]
    assert [chunk.index for chunk in chunks if chunk.token_ids] == [0, 1, 2, 3, 4]
    assert "".join(chunk.text for chunk in chunks) == "abcde"
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[-1].usage is not None
    assert chunks[-1].timing is not None


async def test_an_answer_read_to_its_end_is_not_cancelled(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client:
        async for _ in client.stream("prompt", params=FIVE, request_id="whole"):
            pass
        await until(lambda: not service.running, "the request ends")
    assert service.finished == {"whole"}
    assert not service.cancelled


async def test_each_kind_of_prompt_arrives_as_its_own(service: InferenceDouble, target: str) -> None:
    turns = [Message("system", "be short"), {"role": "user", "content": "hi"}, Message("user", ["one", "two"])]
    async with AsyncClient(target) as client:
        await client.generate("text", params=FIVE, model="alphabet")
        await client.generate(prompt_token_ids=[3, 1, 2], params=FIVE)
        await client.generate(messages=turns, params=FIVE)
    text, token_ids, messages = service.requests
    assert (text.text, text.model) == ("text", "alphabet")
    assert list(token_ids.token_ids.ids) == [3, 1, 2]
    assert [(turn.role, turn.content) for turn in messages.messages.messages] == [
        ("system", "be short"),
        ("user", "hi"),
        ("user", ""),
    ]
    assert list(messages.messages.messages[2].parts) == ["one", "two"]
    assert len({request.request_id for request in service.requests}) == 3


async def test_params_left_out_stay_unset_but_the_seed(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client, client.stream("silent"):
        await until(lambda: bool(service.requests), "the request arrives")
    assert [field.name for field, _ in service.requests[0].params.ListFields()] == ["seed"]


async def _leave_by_break(client: AsyncClient) -> None:
    async for _ in client.stream("endless", request_id="left"):
        break


async def _leave_the_block(client: AsyncClient) -> None:
    async with client.stream("endless", request_id="left") as stream:
        async for _ in stream:
            break
        kept.append(stream)  # A reference that lives on must not keep the request.


async def _close_it(client: AsyncClient) -> None:
    stream = client.stream("endless", request_id="left")
    await anext(stream)
    stream.close()
    stream.close()
    kept.append(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def _raise_in_the_loop(client: AsyncClient) -> None:
    async def divide() -> None:
        async with client.stream("endless", request_id="left") as stream:
            async for chunk in stream:
                _ = chunk.index / 0

    with pytest.raises(ZeroDivisionError):
        await divide()


async def _cancel_the_task(client: AsyncClient) -> None:
    task = asyncio.create_task(client.generate("endless", request_id="left"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _drop_it_unread(client: AsyncClient) -> None:
    client.stream("silent", request_id="left")


async def _close_the_client(client: AsyncClient) -> None:
    kept.append(client.stream("silent", request_id="left"))
    await client.close()


kept: list[AsyncStream] = []


@pytest.mark.parametrize("leave", [_leave_by_break, _leave_the_block, _close_it, _raise_in_the_loop, _drop_it_unread])
async def test_leaving_a_stream_cancels_its_request_at_once(
    service: InferenceDouble, target: str, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    gc.disable()  # At once means: without waiting for a collection.
    try:
        async with AsyncClient(target) as client:
            # A first answer opens the connection, so that the next request is sent before its task is cancelled.
            await client.generate("prompt", params=FIVE)
            await leave(client)
            await until(lambda: "left" not in service.running, "the request ends on the server")
            assert len(service.requests) == 1 or service.cancelled == {"left"}
            assert "left" not in service.finished
    finally:
        gc.enable()
        kept.clear()


@pytest.mark.parametrize("leave", [_cancel_the_task, _close_the_client])
async def test_ending_the_task_or_the_client_cancels_the_request(
    service: InferenceDouble, target: str, leave: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    async with AsyncClient(target) as client:
        await client.generate("prompt", params=FIVE)
        await leave(client)
        await until(lambda: not service.running, "the request ends on the server")
    assert "left" not in service.finished
    kept.clear()


async def test_close_from_another_task_ends_the_reader_quietly(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream("endless", request_id="shared")

        async def read() -> list[Chunk]:
            return [chunk async for chunk in stream]

        reader = asyncio.create_task(read())
        await until(lambda: "shared" in service.running, "the request runs")
        stream.close()
        chunks = await asyncio.wait_for(reader, 5)
        assert len(chunks) <= 1
        await until(lambda: not service.running, "the request ends on the server")


async def test_cancel_by_id_ends_the_stream_with_cancelled(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client:
        task = asyncio.create_task(client.generate("endless", request_id="named"))
        await until(lambda: "named" in service.running, "the request runs")
        assert await client.cancel("named")
        assert (await task).finish_reason is FinishReason.CANCELLED
        assert not await client.cancel("named")


async def test_a_cancel_that_overtakes_its_request_is_not_lost(target: str) -> None:
    async with AsyncClient(target) as client:
        for number in range(50):
            task = asyncio.create_task(client.generate("endless", request_id=f"r{number}"))
            await asyncio.sleep(0)
            async with asyncio.timeout(10):
                # The request may not have been sent yet.
                while not await client.cancel(f"r{number}"):
                    pass
                assert (await task).finish_reason is FinishReason.CANCELLED


async def test_a_cancel_that_reaches_no_router_is_given_up_at_the_requests_deadline() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        stream = client.stream("unread", request_id="late", timeout_s=0.3)
        stream._sessions.cancel_when_known()
        cancelling = stream._sessions._cancellation.task
        assert cancelling is not None
        await until(cancelling.done, "the cancel is given up")


async def test_the_deadline_reaches_the_server_and_raises_deadline_exceeded(
    service: InferenceDouble, target: str
) -> None:
    async with AsyncClient(target, timeout_s=1.0) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("silent")
        await until(lambda: not service.running, "the request ends on the server")
        await client.generate("prompt", params=FIVE, timeout_s=50)
    default_s, given_s = service.deadlines_s
    assert default_s is not None
    assert given_s is not None
    assert default_s < 2
    assert 40 < given_s < 51


async def test_every_call_has_the_clients_deadline_or_its_own(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target, timeout_s=50) as client:
        await client.list_models()
        await client.get_model("alphabet")
        await client.cancel("none")
        await client.list_models(timeout_s=20)
        await client.get_model("alphabet", timeout_s=20)
        await client.cancel("none", timeout_s=20)
    left_s = [deadline_s for deadline_s in service.short_deadlines_s if deadline_s is not None]
    assert all(30 < deadline_s < 51 for deadline_s in left_s[:3]), left_s
    assert all(5 < deadline_s < 21 for deadline_s in left_s[3:]), left_s
    assert len(left_s) == 6


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("params.max_tokens", 99, "at most 26"),
        ModelNotFound("other", ("alphabet",)),
        RequestAlreadyExists("twice"),
        NoCapacity("router", 0.25, "queue full"),
        Unavailable("no decode instance is left", 0.5),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_arrive_with_their_data(service: InferenceDouble, target: str, error: KaveriError) -> None:
    service.error = error
    async with AsyncClient(target) as client:
        with pytest.raises(type(error)) as caught:
            await client.generate("error")
    assert str(caught.value) == str(error)
    assert {name: str(value) for name, value in vars(caught.value).items()} == {
        name: str(value) for name, value in vars(error).items()
    }


@pytest.mark.parametrize("listens", [False, True])
async def test_a_peer_that_is_none_or_mute_raises_unavailable_soon_and_is_named(listens: bool) -> None:
    with socket.socket() as taken:  # Bound, so no other process gets the port meanwhile.
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        started_s = time.monotonic()
        async with AsyncClient(target) as client:
            with pytest.raises(Unavailable, match=target):
                await client.generate("prompt")
            if not listens:
                with pytest.raises(Unavailable, match=target):
                    await client.list_models()
    assert time.monotonic() - started_s < (10 if listens else 5)


@pytest.mark.parametrize("prompt", ["gap", "twice", "cut"])
async def test_an_answer_with_a_hole_is_an_error_not_a_shorter_answer(target: str, prompt: str) -> None:
    async with AsyncClient(target) as client:
        with pytest.raises(Unavailable):
            await client.generate(prompt)


async def test_cancelling_a_reader_cancels_the_request_though_its_stream_is_kept(
    service: InferenceDouble, target: str
) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream("silent", request_id="mid")
        reading = asyncio.ensure_future(anext(stream))
        await until(lambda: "mid" in service.running, "the request runs")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: service.cancelled == {"mid"}, "the server sees the cancellation")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_reading_an_answer_that_breaks_off_raises_after_its_last_chunk(target: str) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream("cut")
        assert (await anext(stream)).text == "a"
        with pytest.raises(Unavailable, match="without a finish reason"):
            await anext(stream)


async def test_other_than_one_prompt_is_refused_before_anything_is_sent(service: InferenceDouble, target: str) -> None:
    async with AsyncClient(target) as client:
        with pytest.raises(InvalidArgument, match="exactly one of"):
            client.stream()
        with pytest.raises(InvalidArgument, match="prompt and prompt_token_ids"):
            client.stream("prompt", prompt_token_ids=[])
        with pytest.raises(InvalidArgument, match="params"):
            client.stream("prompt", params=SamplingParams(max_tokens=2**32))
    assert not service.requests


async def test_a_prompt_over_the_message_limit_is_an_invalid_argument(target: str) -> None:
    async with AsyncClient(target) as client:
        with pytest.raises(InvalidArgument, match="size limits of a call"):
            await client.generate("x" * (5 * 2**20))
        assert (await client.generate("prompt", params=FIVE)).text == "abcde"


async def test_models_are_described(target: str) -> None:
    async with AsyncClient(target) as client:
        (model,) = await client.list_models()
        assert model == await client.get_model("alphabet")
        assert (model.name, model.max_model_len, model.vocab_size) == ("alphabet", 26, 26)
        assert model.has_chat_template
        assert model.ready
        with pytest.raises(ModelNotFound, match="alphabet") as caught:
            await client.get_model("other")
        assert caught.value.model == "other"


@pytest.mark.parametrize("was_used", [False, True])
async def test_a_closed_client_says_so(target: str, was_used: bool) -> None:
    client = AsyncClient(target)
    if was_used:
        await client.list_models()
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.generate("prompt")


def test_a_client_belongs_to_one_event_loop_and_says_so_elsewhere() -> None:
    client = AsyncClient("127.0.0.1:1", timeout_s=5)

    async def call() -> None:
        with pytest.raises(Unavailable):
            await client.list_models()

    asyncio.run(call())
    with pytest.raises(RuntimeError, match=r"each asyncio\.run\(\) makes another one: make a client per loop"):
        asyncio.run(client.list_models())
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match=r"needs a running event loop; kaveri\.Client works without one"):
        AsyncClient("127.0.0.1:1").stream("hello")
