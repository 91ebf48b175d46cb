import asyncio
import threading
from typing import Any

import pytest

from kaveri import AsyncClient, SamplingParams
from kaveri.client.loop_thread import LoopThread
from kaveri.client.received import Received
from kaveri.errors import NoCapacity, Unavailable
from kaveri.v1 import inference_pb2
from tests.library.client.inference_double import WAIT_S, InferenceDouble, serving, until

TWO = SamplingParams(max_tokens=2)
TEN = SamplingParams(max_tokens=10)


async def test_a_request_that_has_failed_is_not_cancelled_any_more(
    service: InferenceDouble, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.client.sessions._CANCEL_UNKNOWN_S", 10 * WAIT_S)
    service.error = NoCapacity("router", 0.25, "queue full")
    async with AsyncClient(target) as client:
        stream = client.stream("error", request_id="mine")
        stream._sessions.cancel_when_known()
        cancelling = stream._sessions._cancellation.task
        assert cancelling is not None
        with pytest.raises(NoCapacity):
            await anext(stream)
        await until(cancelling.done, "the cancel is given up")
        assert cancelling.cancelled(), "it ends with the request, not after a while"


async def test_a_cancel_of_an_answer_that_has_ended_unread_is_given_up(
    service: InferenceDouble, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kaveri.client.sessions._CANCEL_UNKNOWN_S", 0.5)
    async with AsyncClient(target) as client:
        stream = client.stream("prompt", params=TWO, request_id="unread")
        await until(lambda: service.finished == {"unread"}, "the answer ends")
        await client.cancel("unread")
        cancelling = stream._sessions._cancellation.task
        assert cancelling is not None
        await until(cancelling.done, "the cancel is given up")


async def test_closing_a_client_ends_its_streams_and_fails_its_calls(service: InferenceDouble, target: str) -> None:
    client = AsyncClient(target)
    stream = client.stream("silent", request_id="mine")

    async def read() -> int:
        return len([chunk async for chunk in stream])

    reading = asyncio.create_task(read())
    await until(lambda: "mine" in service.running, "the request runs")
    service.hangs = True
    asking = asyncio.create_task(client.list_models())
    await asyncio.sleep(0)
    await client.close()
    assert await asyncio.wait_for(reading, WAIT_S) == 0
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asking, WAIT_S)
    assert not client._routers._channels


async def test_a_stream_goes_on_when_its_channel_is_closed_for_another_call(
    service: InferenceDouble, target: str
) -> None:
    service.pause_at, service.routers = 1, [target]
    async with AsyncClient(target) as client:
        answer = asyncio.create_task(client.generate("prompt", params=TEN))
        await until(lambda: bool(service.paused), "the answer pauses")
        channel = client._routers._channels.pop(target)
        del client._routers._stubs[target]
        service.pause_at = None
        await channel.close()
        completion = await asyncio.wait_for(answer, WAIT_S)
    assert completion.text == "abcdefghij"
    assert [request.session for request in service.requests] == [0, 1]


@pytest.mark.parametrize("way", ["stream", "ask"])
async def test_a_task_that_is_cancelled_while_it_runs_ends_at_its_next_wait(
    service: InferenceDouble, target: str, way: str
) -> None:
    async with AsyncClient(target) as client:
        stream = client.stream("silent")

        async def cancelled_while_it_runs() -> None:
            this = asyncio.current_task()
            assert this is not None
            # As Ctrl-C does, between two steps of the task.
            this.cancel()
            await (anext(stream) if way == "stream" else client.list_models())

        task = asyncio.create_task(cancelled_while_it_runs())
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_task_that_was_cancelled_can_still_leave_a_router_that_hangs(
    service: InferenceDouble, target: str
) -> None:
    hanging = InferenceDouble()
    async with serving(hanging) as hanging_target, AsyncClient([hanging_target, target]) as client:
        # Both have answered before, and promptly.
        for _ in range(2):
            await client.list_models()
        hanging.hangs = True

        async def clean_up() -> int:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return sum([len(await client.list_models()) for _ in range(2)])
            return 0

        task = asyncio.create_task(clean_up())
        await asyncio.sleep(0)
        task.cancel()
        assert await asyncio.wait_for(task, WAIT_S) == 2


def test_a_finish_reason_that_is_not_known_is_an_error_that_says_so() -> None:
    received = Received(wants_prompt=False)
    response: Any = inference_pb2.GenerateResponse(token_ids=[1], text="a")
    response.finish_reason = 77
    with pytest.raises(Unavailable, match="finish reason 77"):
        received.take(response, "router-0")
    assert not received.token_ids


def test_work_whose_submission_is_interrupted_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_thread = LoopThread("interrupted")
    ran = threading.Event()

    async def work() -> None:
        ran.set()

    async def nothing() -> None:
        pass

    submit = asyncio.run_coroutine_threadsafe

    def interrupt(*args: Any) -> None:
        submit(*args)
        raise KeyboardInterrupt

    # The loop starts no work until the interrupt has been handled.
    held = threading.Event()
    loop_thread._loop.call_soon_threadsafe(held.wait, WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop_thread.run(work())
    held.set()
    loop_thread.run(nothing())
    assert not ran.is_set()
    loop_thread.end(nothing())


def test_a_signal_handler_may_use_the_client_that_its_thread_is_using() -> None:
    loop_thread = LoopThread("interrupted")

    async def nothing() -> None:
        pass

    def handle_a_signal_while_submitting() -> None:
        with loop_thread._submitting:
            loop_thread.run(nothing())
            loop_thread.end(nothing())

    thread = threading.Thread(target=handle_a_signal_while_submitting, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed already"):
        loop_thread.run(nothing())
