"""Instances without engines, for router_overhead: they speak the prefill and decode protos and answer at once.

Prefill answers within the call. Decode sends, every `step_interval_s`, one message with one token for each of its
requests, as an engine step does; a request names that interval in its seed, in microseconds. The same process serves
InferenceService.Generate with one stream per request, which is what a plain pass-through relays. No KV, no queue, no
tokenizer: whatever a request costs here is gRPC's own cost.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import uvloop

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.redis_store import RedisStore
from kaveri.domain.view import InstanceLoad, InstanceRecord, Phase, Role
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
)

DECODE_ID = "instant-decode"
_INCARNATION = 1
_TOKEN_IDS = range(300, 1_300)
_NOT_FINISHED = sampling_pb2.FINISH_REASON_UNSPECIFIED
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH


class _Sequence:
    __slots__ = ("index", "max_tokens", "request_id")

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.request_id = request_id
        self.index = 1
        self.max_tokens = max_tokens


class InstantDecode(decode_pb2_grpc.DecodeServiceServicer):
    """One running batch for all; steps at the pace that the newest request asked for."""

    def __init__(self) -> None:
        self._running: dict[str, _Sequence] = {}
        self._arrived = asyncio.Event()
        self._step_interval_s = 0.0

    def start(self, request: prefill_pb2.PrefillRequest) -> None:
        """Lets a request join the batch."""
        self._running[request.request_id] = _Sequence(request.request_id, request.params.max_tokens)
        self._step_interval_s = request.params.seed / 1e6
        self._arrived.set()

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:  # noqa: N802
        for entry in request.attempts:
            self._running.pop(entry.request_id, None)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        yield decode_pb2.StreamTokensResponse(incarnation=_INCARNATION)
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            if not self._running:
                self._arrived.clear()
                await self._arrived.wait()
                due_s = loop.time()
            due_s = max(due_s + self._step_interval_s, loop.time() - 0.1)
            await asyncio.sleep(due_s - loop.time())
            yield decode_pb2.StreamTokensResponse(requests=self._step())

    def _step(self) -> list[decode_pb2.RequestTokens]:
        updates = []
        for sequence in tuple(self._running.values()):
            last = sequence.index + 1 >= sequence.max_tokens
            updates.append(
                decode_pb2.RequestTokens(
                    request_id=sequence.request_id,
                    attempt=1,
                    index=sequence.index,
                    token_ids=(_TOKEN_IDS[sequence.index % len(_TOKEN_IDS)],),
                    finish_reason=_LENGTH if last else _NOT_FINISHED,
                )
            )
            sequence.index += 1
            if last:
                del self._running[sequence.request_id]
        return updates


class InstantPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers every step of a prefill at once."""

    def __init__(self, decode: InstantDecode) -> None:
        self._decode = decode

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        finish = _LENGTH if request.params.max_tokens == 1 else _NOT_FINISHED
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        if not finish:
            placed = prefill_pb2.PrefillPlaced(decode_instance_id=DECODE_ID, decode_incarnation=_INCARNATION)
            yield prefill_pb2.PrefillResponse(placed=placed)
        first = prefill_pb2.PrefillFirstToken(token_id=_TOKEN_IDS[0], finish_reason=finish)
        yield prefill_pb2.PrefillResponse(first_token=first)
        if not finish:
            self._decode.start(request)
            yield prefill_pb2.PrefillResponse(handed_over=prefill_pb2.PrefillHandedOver())


class InstantInference(inference_pb2_grpc.InferenceServiceServicer):
    """One stream per request, one token per message, paced like the decode instance: what a pass-through relays."""

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        interval_s = request.params.seed / 1e6
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for index in range(request.params.max_tokens):
            last = index + 1 == request.params.max_tokens
            yield inference_pb2.GenerateResponse(
                index=index, token_ids=(_TOKEN_IDS[index % len(_TOKEN_IDS)],), finish_reason=_LENGTH if last else 0
            )
            due_s += interval_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))


class PassThrough(inference_pb2_grpc.InferenceServiceServicer):
    """The plainest relay in Python: one stream in, the same messages out."""

    def __init__(self, address: str) -> None:
        self._upstream = inference_pb2_grpc.InferenceServiceStub(open_channel(address))

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async for response in self._upstream.Generate(request):
            yield response


async def _serve_instances(port: int, redis_url: str, model: str) -> None:
    decode = InstantDecode()
    server = RpcServer("127.0.0.1", port, ())
    server.add(partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode))
    server.add(partial(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, InstantPrefill(decode)))
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, InstantInference()))
    await server.start()
    async with RedisStore(redis_url) as store, asyncio.TaskGroup() as group:
        for instance_id, phase in (("instant-prefill", Phase.PREFILL), (DECODE_ID, Phase.DECODE)):
            record = InstanceRecord(
                instance_id=instance_id,
                incarnation=_INCARNATION,
                role=Role.ENGINE,
                address=f"127.0.0.1:{server.port}",
                model=model,
                engine="fake",
                phases=(phase,),
                max_model_len=100_000,
                lease_ttl_s=5.0,
            )
            load = InstanceLoad(free_blocks=100_000, total_blocks=100_000)
            group.create_task(Heartbeat(store, record, lambda load=load: load).run())
        await server.ready()


async def _serve_pass_through(port: int, address: str) -> None:
    server = RpcServer("127.0.0.1", port, ())
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, PassThrough(address)))
    await server.start()
    await server.ready()
    await asyncio.Event().wait()


def main() -> int:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.support.instant_instances", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--redis-url", help="serve instances, registered here")
    parser.add_argument("--model", default="kaveri-tiny")
    parser.add_argument("--pass-through", metavar="ADDRESS", help="relay InferenceService from here instead")
    given = parser.parse_args()
    serving = (
        _serve_pass_through(given.port, given.pass_through)
        if given.pass_through
        else _serve_instances(given.port, given.redis_url, given.model)
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)
    return 0


if __name__ == "__main__":
    sys.exit(main())
