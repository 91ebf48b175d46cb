import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from kaveri import Client, Completion, FinishReason, NoCapacity, SamplingParams
from kaveri.client.loop_thread import LoopThread
from tests.library.client.inference_double import WAIT_S, InferenceDouble, wait_until

FIVE = SamplingParams(max_tokens=5)


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kaveri-client"]


def test_generate_and_stream_give_the_same_answer(running_target: str) -> None:
    with Client(running_target) as client:
        completion = client.generate("prompt", params=FIVE)
        with client.stream("prompt", params=FIVE) as stream:
            chunks = list(stream)
        collected = client.stream("prompt", params=FIVE, request_id="mine").collect()
    assert completion.text == "".join(chunk.text for chunk in chunks) == collected.text == "abcde"
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert collected.request_id == "mine"


def test_models_errors_and_cancel_come_through(service: InferenceDouble, running_target: str) -> None:
    service.error = NoCapacity("router", 0.25, "queue full")
    with Client(running_target) as client:
        assert client.list_models() == [client.get_model("alphabet")]
        assert not client.cancel("nobody")
        with pytest.raises(NoCapacity) as caught:
            client.generate("error")
    assert caught.value.retry_after_s == 0.25


def test_break_cancels_the_request_at_once(service: InferenceDouble, running_target: str) -> None:
    gc.disable()  # At once means: without waiting for a collection.
    try:
        with Client(running_target) as client:
            for _ in client.stream("endless", request_id="left"):
                break
            wait_until(lambda: service.cancelled == {"left"}, "the server sees the cancellation")
    finally:
        gc.enable()


def test_leaving_the_block_cancels_the_request(service: InferenceDouble, running_target: str) -> None:
    with Client(running_target) as client:
        with client.stream("endless", request_id="left") as stream:
            next(stream)
        wait_until(lambda: service.cancelled == {"left"}, "the server sees the cancellation")
        assert list(stream) == []


def test_many_threads_share_one_client(running_target: str) -> None:
    with Client(running_target) as client, ThreadPoolExecutor(8) as pool:

        def ask(count: int) -> Completion:
            return client.generate("prompt", params=SamplingParams(max_tokens=count))

        completions = list(pool.map(ask, range(1, 27)))
    assert [len(completion.token_ids) for completion in completions] == list(range(1, 27))


def test_close_frees_whoever_waits_and_ends_the_thread(service: InferenceDouble, running_target: str) -> None:
    client = Client(running_target)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, "silent", request_id="waits")
        wait_until(lambda: "waits" in service.running, "the request runs")
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(WAIT_S)
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("prompt")
    assert not client_threads()
    wait_until(lambda: not service.running, "the request ends on the server")


def test_a_client_dropped_without_close_ends_its_thread(running_target: str) -> None:
    Client(running_target).generate("prompt", params=FIVE)
    gc.collect()
    wait_until(lambda: not client_threads(), "the thread ends")


def test_a_stream_outlives_its_client_without_harm(running_target: str) -> None:
    with Client(running_target) as client:
        stream = client.stream("endless")
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, check=False, timeout=30, capture_output=True, text=True, env={**os.environ, **environment}
    )


IN_A_CHILD = """
import asyncio, gc, os, signal, sys, kaveri
target, use, state, count = sys.argv[1:]
client = kaveri.Client(target)
stream = client.stream("endless")
next(stream)
if state == "closed":
    client.close()

async def with_a_new_async_client():
    async with kaveri.AsyncClient(target) as client:
        return await client.list_models()

uses = {
    "the client": lambda: client.list_models(),
    "the stream": lambda: next(stream),
    "a new client": lambda: kaveri.Client(target).list_models(),
    "a new async client": lambda: asyncio.run(with_a_new_async_client()),
    "nothing": lambda: gc.collect(),
    "close": lambda: (stream.close(), client.close()),
}
for _ in range(int(count)):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            uses[use]()
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(7)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
if state == "open":
    client.list_models()
"""


@pytest.mark.parametrize("state", ["open", "closed"])
@pytest.mark.parametrize("use", ["the client", "the stream", "a new client", "a new async client"])
def test_use_in_a_child_forked_after_a_client_connected_is_refused_with_one_sentence(
    running_target: str, use: str, state: str
) -> None:
    ended = run_script(IN_A_CHILD, running_target, use, state, "1")
    told, status = ended.stdout.splitlines()
    assert status == "7", ended
    assert "forked after a Kaveri client had connected" in told
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("use", ["nothing", "close"])
def test_children_that_leave_an_open_client_alone_end_well(running_target: str, use: str) -> None:
    # The event engine is where gRPC's fork handlers crash; applications may switch it on.
    ended = run_script(IN_A_CHILD, running_target, use, "open", "30", GRPC_EXPERIMENTS="event_engine_client")
    assert ended.stdout.split() == ["0"] * 30, ended
    assert ended.returncode == 0, ended.stderr


def test_the_interpreter_ends_quietly_with_a_client_open(running_target: str) -> None:
    script = (
        "import sys, kaveri\n"
        "client = kaveri.Client(sys.argv[1])\n"
        "stream = client.stream('endless')\n"
        "print(next(stream).text)\n"
    )
    ended = run_script(script, running_target)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "a\n", "")


def test_ctrl_c_while_waiting_cancels_the_request(service: InferenceDouble, running_target: str) -> None:
    script = (
        "import sys, kaveri\n"
        "with kaveri.Client(sys.argv[1]) as client:\n"
        "    try:\n"
        "        client.generate('silent', request_id='interrupted')\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
        "        sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, running_target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: "interrupted" in service.running, "the request runs")
        os.kill(process.pid, signal.SIGINT)
        # Only the wait was interrupted, not the connection.
        wait_until(lambda: service.cancelled == {"interrupted"}, "the server sees the cancellation")
        assert process.communicate(timeout=30)[0] == "interrupted\n"


def test_work_submitted_while_a_loop_thread_ends_is_never_left_waiting() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 1

    async def nothing() -> None:
        pass

    for _ in range(50):
        loop_thread = LoopThread("racing")
        outcomes: list[object] = []

        def submit(loop_thread: LoopThread = loop_thread, outcomes: list[object] = outcomes) -> None:
            try:
                while True:
                    outcomes.append(loop_thread.run(work()))
            except RuntimeError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=submit, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        loop_thread.end(nothing())
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_the_end_of_a_loop_thread_frees_whatever_waits_on_it() -> None:
    loop_thread = LoopThread("ending")
    started = threading.Event()

    async def wait_without_end() -> None:
        started.set()
        await asyncio.Event().wait()

    async def nothing() -> None:
        pass

    told: SimpleQueue[str] = SimpleQueue()

    def wait() -> None:
        try:
            loop_thread.run(wait_without_end())
        except RuntimeError as error:
            told.put(str(error))

    # A daemon: if nothing frees it, it does not keep this process from ending.
    threading.Thread(target=wait, daemon=True).start()
    assert started.wait(WAIT_S)
    loop_thread.end(nothing())
    assert "closed" in told.get(timeout=WAIT_S)
