"""Instances without engines, for router_overhead: they speak the prefill, decode and feed protos and answer at once.

Prefill reports all of a prompt in one message. Decode sends, every `step_interval_s`, one message with one token for
each of its requests, as an engine step does; a request names that interval in its seed, in microseconds. The same
process serves InferenceService.Generate with one stream per request, which is what a plain pass-through relays. No KV,
no queue, no tokenizer: whatever a request costs here is gRPC's own cost.
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
from kaveri.feeds.feed import Feed
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.timeouts import BEAT_S
from kaveri.v1 import (
    decode_pb2,
    feed_pb2,
    feed_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    term_pb2,
)

DECODE_ID = "instant-decode"
_INCARNATION = 1
_TERM = term_pb2.Term(attempt=1)
_TOKEN_IDS = range(300, 1_300)
_NOT_FINISHED = sampling_pb2.FINISH_REASON_UNSPECIFIED
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH


class _Sequence:
    __slots__ = ("index", "max_tokens", "request_id")

    def __init__(self, request_id: str, max_tokens: int) -> None:
        self.request_id = request_id
        self.index = 1
        self.max_tokens = max_tokens


class _Prompt:
    __slots__ = ("request",)

    def __init__(self, request: prefill_pb2.SubmitRequest) -> None:
        self.request = request


class InstantDecode(feed_pb2_grpc.FeedServiceServicer):
    """One running batch for all; steps at the pace that the newest request asked for."""

    def __init__(self) -> None:
        self._running: dict[str, _Sequence] = {}
        self._arrived = asyncio.Event()
        self._step_interval_s = 0.0

    def start(self, request: prefill_pb2.SubmitRequest) -> None:
        """Lets a request join the batch."""
        self._running[request.request_id] = _Sequence(request.request_id, request.params.max_tokens)
        self._step_interval_s = request.params.seed / 1e6
        self._arrived.set()

    async def Abort(self, request: feed_pb2.AbortRequest, context: Any) -> feed_pb2.AbortResponse:  # noqa: N802
        for entry in request.attempts:
            self._running.pop(entry.request_id, None)
        return feed_pb2.AbortResponse()

    async def Follow(  # noqa: N802
        self, request: feed_pb2.FollowRequest, context: Any
    ) -> AsyncIterator[feed_pb2.FollowResponse]:
        yield feed_pb2.FollowResponse(incarnation=_INCARNATION)
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            while not self._running:
                self._arrived.clear()
                try:
                    async with asyncio.timeout(BEAT_S):
                        await self._arrived.wait()
                except TimeoutError:
                    yield feed_pb2.FollowResponse()
                due_s = loop.time()
            due_s = max(due_s + self._step_interval_s, loop.time() - 0.1)
            await asyncio.sleep(due_s - loop.time())
            yield feed_pb2.FollowResponse(requests=self._step())

    def _step(self) -> list[decode_pb2.RequestTokens]:
        updates = []
        for sequence in tuple(self._running.values()):
            last = sequence.index + 1 >= sequence.max_tokens
            updates.append(
                decode_pb2.RequestTokens(
                    request_id=sequence.request_id,
                    term=_TERM,
                    index=sequence.index,
                    token_ids=(_TOKEN_IDS[sequence.index % len(_TOKEN_IDS)],),
                    finish_reason=_LENGTH if last else _NOT_FINISHED,
                )
            )
            sequence.index += 1
            if last:
                del self._running[sequence.request_id]
        return updates


class InstantPrefill(prefill_pb2_grpc.PrefillServiceServicer, feed_pb2_grpc.FeedServiceServicer):
    """Reports every step of a prefill at once."""

    def __init__(self, decode: InstantDecode) -> None:
        self._decode = decode
        self._feeds: dict[str, Feed[_Prompt]] = {}
        """By router."""

    async def Submit(  # noqa: N802
        self, request: prefill_pb2.SubmitRequest, context: Any
    ) -> prefill_pb2.SubmitResponse:
        self._feeds[request.router_id].add(_Prompt(request))
        return prefill_pb2.SubmitResponse()

    async def Abort(self, request: feed_pb2.AbortRequest, context: Any) -> feed_pb2.AbortResponse:  # noqa: N802
        return feed_pb2.AbortResponse()

    async def Follow(  # noqa: N802
        self, request: feed_pb2.FollowRequest, context: Any
    ) -> AsyncIterator[feed_pb2.FollowResponse]:
        feed = self._feeds[request.router_id] = Feed()
        yield feed_pb2.FollowResponse(incarnation=_INCARNATION)
        while True:
            yield feed_pb2.FollowResponse(reports=[self._report(prompt.request) for prompt in await feed.take(BEAT_S)])

    def _report(self, request: prefill_pb2.SubmitRequest) -> prefill_pb2.PrefillReport:
        finish = _LENGTH if request.params.max_tokens == 1 else _NOT_FINISHED
        report = prefill_pb2.PrefillReport(
            request_id=request.request_id,
            term=request.term,
            started=prefill_pb2.PrefillStarted(),
            first_token=prefill_pb2.PrefillFirstToken(token_id=_TOKEN_IDS[0], finish_reason=finish),
            ended=prefill_pb2.PrefillEnded(),
        )
        if not finish:
            self._decode.start(request)
            report.placed.decode_instance_id, report.placed.decode_incarnation = DECODE_ID, _INCARNATION
            report.handed_over.SetInParent()
        return report


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
    prefill = InstantPrefill(decode)
    # Each instance has a stream of its own to the router.
    prefill_server, decode_server = RpcServer("127.0.0.1", port, ()), RpcServer("127.0.0.1", 0, ())
    prefill_server.add(partial(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill))
    prefill_server.add(partial(feed_pb2_grpc.add_FeedServiceServicer_to_server, prefill))
    prefill_server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, InstantInference()))
    decode_server.add(partial(feed_pb2_grpc.add_FeedServiceServicer_to_server, decode))
    instances = (("instant-prefill", Phase.PREFILL, prefill_server), (DECODE_ID, Phase.DECODE, decode_server))
    for server in (prefill_server, decode_server):
        await server.start()
    async with RedisStore(redis_url) as store, asyncio.TaskGroup() as group:
        for instance_id, phase, server in instances:
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
        await prefill_server.ready()


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
