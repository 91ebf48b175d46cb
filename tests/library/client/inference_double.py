"""Test double of a router: an InferenceService on real gRPC that answers a fixed alphabet."""
# ruff: noqa: N802 - gRPC names the methods

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import grpc

from kaveri.errors import KaveriError, ModelNotFound
from kaveri.rpc.server import RpcServer
from kaveri.v1 import inference_pb2 as pb
from kaveri.v1 import inference_pb2_grpc, sampling_pb2
from kaveri.wire.status import abort

WAIT_S = 30.0


class InferenceDouble(inference_pb2_grpc.InferenceServiceServicer):
    """Test double of a router. Token i of an answer is i, its text chr(97 + i).

    The prompt, or the last message, selects the behaviour: "error" raises `error`, "endless" sends one token and waits,
    "silent" sends nothing and waits, "gap" skips a token, "twice" repeats one, "cut" ends without a finish reason,
    "held" has text after the last token, "stop" ends as with a stop token. Others: params.max_tokens tokens.
    """

    def __init__(self) -> None:
        self.error: KaveriError = KaveriError()
        self.requests: list[pb.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        """Seconds left until the deadline of each Generate call."""
        self.short_deadlines_s: list[float | None] = []
        """Seconds left until the deadline of each other call."""
        self.running: set[str] = set()
        self.cancelled: set[str] = set()
        self.finished: set[str] = set()
        self.paused: set[str] = set()
        self.routers: list[str] = []
        """Router addresses in the first response. Empty: as an older version."""
        self.pause_at: int | None = None
        """Number of tokens after which an answer waits for `go_on`."""
        self.go_on = asyncio.Event()
        self.break_with: KaveriError | None = None
        self.cancels_calls = False
        """Cancel calls at `pause_at`, as a gRPC server that stops."""
        self.break_after: KaveriError | None = None
        """Error with which answers end after their finish reason."""
        self.beat_takes_s = 0.0
        self.knows_beat = True
        self.ignores_cancels = False
        """Act as a router that dies before it has ended the request."""
        self.found_cancels = 0
        self.hangs = False
        self.beats = self.answered_beats = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.text_lag = 0
        self._told_to_cancel: dict[str, asyncio.Event] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        request_id = request.request_id
        self.running.add(request_id)
        cancel = self._told_to_cancel[request_id] = asyncio.Event()
        try:
            async for response in self._answer(request, context, cancel):
                yield response
            self.finished.add(request_id)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(request_id)
            raise
        finally:
            self.running.discard(request_id)

    async def _answer(self, request: pb.GenerateRequest, context: Any, cancel: asyncio.Event) -> Any:
        prompt = request.messages.messages[-1].content if request.HasField("messages") else request.text
        if prompt == "error":
            self.running.discard(request.request_id)  # A cancel would find it until the abort is through.
            await abort(context, self.error)
        if prompt == "silent":
            await cancel.wait()
        if prompt in ("endless", "gap", "twice", "cut"):
            yield pb.GenerateResponse(request_id=request.request_id, index=0, token_ids=[0], text="a")
        if prompt == "gap":
            yield pb.GenerateResponse(index=2, token_ids=[2], text="c")
        if prompt == "twice":
            yield pb.GenerateResponse(index=0, token_ids=[0], text="a")
        if prompt == "cut":
            return
        if prompt == "endless":
            await cancel.wait()
        count = 0 if cancel.is_set() else request.params.max_tokens
        first, sent = len(request.received.token_ids), request.received.characters
        text = "".join(chr(97 + index) for index in range(count))
        for index in range(first, count):
            if index == self.pause_at or self.hangs:
                self.paused.add(request.request_id)
                if self.cancels_calls:
                    await context.abort(grpc.StatusCode.CANCELLED, "the server stops")
                if self.break_with is not None:
                    await abort(context, self.break_with)
                await asyncio.wait(
                    (asyncio.ensure_future(self.go_on.wait()), asyncio.ensure_future(cancel.wait())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if cancel.is_set():
                    count = index
                    break
            logprobs = [sampling_pb2.Logprobs(logprob=-0.5 - index)] if request.params.HasField("logprobs") else []
            end = max(sent, index + 1 - self.text_lag)
            response = pb.GenerateResponse(index=index, token_ids=[index], text=text[sent:end], logprobs=logprobs)
            sent = end
            if index == first and self.routers:
                response.max_tokens, response.owner.decode_instance_id = count, f"decode-{index}"
                response.routers.extend(self.routers)
            yield response
        cancelled = sampling_pb2.FINISH_REASON_CANCELLED
        finish = sampling_pb2.FINISH_REASON_STOP if prompt == "stop" else sampling_pb2.FINISH_REASON_LENGTH
        yield pb.GenerateResponse(
            index=count,
            text=text[sent:count] + ("!" if prompt == "held" else ""),
            finish_reason=cancelled if cancel.is_set() else finish,
            usage=pb.Usage(prompt_tokens=len(request.text), completion_tokens=count),
            timing=pb.Timing(
                router_s=0.001,
                prefill_queue_s=0.002,
                prefill_s=0.003,
                kv_transfer_s=0.004,
                kv_tail_s=0.005,
                decode_queue_s=0.006,
                decode_s=0.007,
                kv_bytes=4096,
                kv_transport="tcp",
                prefill_instance_id="prefill-0",
                decode_instance_id="decode-1",
                attempts=2,
                ttft_s=0.008,
                e2e_s=0.009,
                reattaches=request.session,
            ),
        )
        if self.break_after is not None:
            await abort(context, self.break_after)

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.short_deadlines_s.append(context.time_remaining())
        found = request.request_id in self.running
        self.found_cancels += found
        if found and not self.ignores_cancels:
            self._told_to_cancel[request.request_id].set()
        return pb.CancelResponse(found=found)

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:
        self.beats += 1
        if self.hangs:
            await self.go_on.wait()
        if not self.knows_beat:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
        await asyncio.sleep(self.beat_takes_s)
        self.answered_beats += 1
        return pb.BeatResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self.short_deadlines_s.append(context.time_remaining())
        if self.hangs:
            await self.go_on.wait()
        return pb.ListModelsResponse(models=[_model()])

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self.short_deadlines_s.append(context.time_remaining())
        if request.model != "alphabet":
            await abort(context, ModelNotFound(request.model, ("alphabet",)))
        return pb.GetModelResponse(model=_model())


def _model() -> pb.Model:
    return pb.Model(name="alphabet", max_model_len=26, vocab_size=26, has_chat_template=True, ready=True)


@contextlib.asynccontextmanager
async def serving(service: InferenceDouble) -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1", 0, ["kaveri.v1.InferenceService"])
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, service))
    await server.start()
    await server.ready()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@contextlib.contextmanager
def serving_in_a_thread(service: InferenceDouble) -> Iterator[str]:
    stop, started = threading.Event(), threading.Event()
    targets: list[str] = []

    async def run() -> None:
        service.loop = asyncio.get_running_loop()
        async with serving(service) as target:
            targets.append(target)
            started.set()
            await asyncio.get_running_loop().run_in_executor(None, stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert started.wait(WAIT_S)
        yield targets[0]
    finally:
        stop.set()
        thread.join(WAIT_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition in another thread, at most WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}"
        time.sleep(0.005)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition on the event loop, at most WAIT_S."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - conditions of all kinds, polled
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S} s: {what}") from None
