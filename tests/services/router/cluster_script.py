"""A cluster for router tests: real gRPC servers that speak the prefill and decode protos and do as the test says.

Tokens are a function of the prompt and the index alone, as real engines' are for a seed, so that a test can say what
every answer must be however often it was placed again. No KV moves: the two sides meet in memory.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
from grpc import aio

from kaveri.cluster.heartbeat import Heartbeat
from kaveri.cluster.memory_store import MemoryCluster, MemoryStore
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import BOTH_PHASES, InstanceLoad, InstanceRecord, InstanceState, Phase, Role
from kaveri.errors import KaveriError, RequestNotFound, Unavailable
from kaveri.hosting.service_host import ServiceHost
from kaveri.kv.layout.layout import KvLayout
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
)
from kaveri.wire.replicas import replica_to_proto
from kaveri.wire.status import abort
from services.router.config import RouterConfig
from services.router.lifecycle_values import Placed
from services.router.requests import RequestEntry
from services.router.service import Router, router_host

MODEL = "kaveri-tiny"
MAX_MODEL_LEN = 8_192
_BEAT_S = 0.05
BLOCK_TOKENS = 4
"""Of scripted copies."""
VOCAB_FLOOR = 300
"""Ids from here on are ordinary tokens of the bundled tokenizer."""


def token_at(prompt: tuple[int, ...], index: int) -> int:
    """The token at `index` of the answer to `prompt`."""
    return VOCAB_FLOOR + (sum(prompt) + 31 * index + index * index) % 1_000


def answer(prompt: tuple[int, ...], token_count: int) -> list[int]:
    """The whole answer."""
    return [token_at(prompt, index) for index in range(token_count)]


PROMPT = (300, 301, 302)


def ask(
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 20,
    stop: tuple[str, ...] = (),
    logprobs: int | None = None,
    **fields: Any,
) -> inference_pb2.GenerateRequest:
    """A greedy request."""
    params = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0, stop=stop, logprobs=logprobs)
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), params=params, **fields)


async def collect(call: AsyncIterator[inference_pb2.GenerateResponse]) -> list[inference_pb2.GenerateResponse]:
    """All responses; fails on a gap or a duplicate."""
    responses = [response async for response in call]
    expected = 0
    for response in responses:
        assert response.index == expected
        expected += len(response.token_ids)
    return responses


async def rest_of(call: Any) -> list[inference_pb2.GenerateResponse]:
    """The responses after those that were read one by one."""
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    """All tokens of an answer."""
    return [token_id for response in responses for token_id in response.token_ids]


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    """The whole text of an answer."""
    return "".join(response.text for response in responses)


def logprobs_at(index: int, top_count: int) -> sampling_pb2.Logprobs:
    """Recognizable log-probabilities for the token at `index`."""
    top = [sampling_pb2.TokenLogprob(token_id=rank, logprob=-float(rank)) for rank in range(top_count)]
    return sampling_pb2.Logprobs(logprob=-float(index), top=top)


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Waits until `condition()` holds; fails when it does not within `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def holds_the_last_token(entry: RequestEntry) -> bool:
    """Whether all tokens of decode have come to the router and wait there."""
    return isinstance(entry.state, Placed) and any(getattr(held, "finish", None) for held in entry.state.held.events)


@dataclass
class Running:
    """A request that a scripted decode instance generates."""

    request_id: str
    router_id: str
    attempt: int
    prompt: tuple[int, ...]
    next_index: int
    max_tokens: int
    logprobs: int | None
    session: int = 0
    replicated: int = 0
    """Tokens of the copy that the router has heard of."""


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """A decode instance. Steps as fast as its router reads, unless `paused`."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.running: dict[str, Running] = {}
        self.aborted: list[tuple[str, int]] = []
        """Request ids and attempts, as routers named them."""
        self.abort_messages: list[bool] = []
        """Of each Abort: whether a router asks, by its own word."""
        self.subscribers: list[str] = []
        """The router ids of the streams that are open."""
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.stop_at: int | None = None
        """Tokens behind which answers end as with a stop token."""
        self.pause_at: int | None = None
        """Stop stepping, once, when a request has so many tokens; may_step goes on."""
        self.skip_once = False
        """Leave one token out."""
        self.repeat_tokens = False
        """Send every token twice, the second time together with its successor's index."""
        self.fail_next: str = ""
        """Report this error for every request at the next step."""
        self.replaced_next = False
        """Say with fail_next that another router has begun the same request."""
        self.too_few_logprobs = ""
        """The id of a request that gets fewer logprobs than tokens."""
        self.incarnation = 0
        self.beats = True
        """Send an empty message every 0.05 s while there are no tokens; else say that none are sent."""
        self.silent = False
        """Send nothing, like an instance that hangs."""
        self.keeps_running = False
        """Requests outlive their stream."""
        self.thawed = asyncio.Event()
        """Cleared, with silent: a new stream is not answered either, as by a frozen process."""
        self.thawed.set()
        self.holder: ScriptedDecode | None = None
        """Has a copy of every request here; an Abort here drops it."""
        self.copies: set[str] = set()
        """Requests of which this instance holds a copy."""
        self.resumes: list[decode_pb2.ResumeRequest] = []
        self.reserved: set[tuple[str, int]] = set()
        """Requests and attempts that prefill has placed here, and that have not begun."""
        self.attachable: set[str] = set()
        """Requests of earlier sessions that run here, with answers of `attached_tokens`."""
        self.attached_tokens = 20
        self.attached: list[decode_pb2.AttachRequest] = []
        self.refusal: KaveriError | None = None
        """Of every Resume."""
        self.attach_refusal: KaveriError | None = None
        """Of every Attach of a request that is not its router's already."""
        self.may_answer = asyncio.Event()
        """The answer to Resume or Attach waits for this."""
        self.may_answer.set()
        self.draws_before_its_answer = False
        """Begin to draw when Resume comes, whenever its answer goes out."""
        self._wake = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        """Whether pause_at was reached."""
        return not self.may_step.is_set()

    def start(self, request: prefill_pb2.PrefillRequest) -> None:
        """Begins to generate after the token that prefill drew."""
        prompt_length = len(request.token_ids) - request.generated_count
        self.reserved.discard((request.request_id, request.attempt))
        self.running[request.request_id] = Running(
            request.request_id,
            request.router_id,
            request.attempt,
            tuple(request.token_ids[:prompt_length]),
            request.generated_count + 1,
            request.params.max_tokens,
            request.params.logprobs if request.params.HasField("logprobs") else None,
            request.session,
        )
        self._wake.set()

    async def Attach(self, request: decode_pb2.AttachRequest, context: Any) -> decode_pb2.AttachResponse:  # noqa: N802
        running = self.running.get(request.request_id)
        if running is not None and (running.router_id, running.attempt) == (request.router_id, request.attempt):
            # Its own router, which may lack what went over a former stream.
            running.next_index = min(running.next_index, max(1, request.generated_count))
            return decode_pb2.AttachResponse(incarnation=self.incarnation)
        if (request.request_id, request.attempt) in self.reserved:
            return decode_pb2.AttachResponse(incarnation=self.incarnation)
        if self.attach_refusal is not None:
            await abort(context, self.attach_refusal)
        if request.request_id not in self.attachable:
            await abort(context, RequestNotFound(request.request_id))
        self.attached.append(request)
        prompt = tuple(request.token_ids[: len(request.token_ids) - request.generated_count])
        self.running[request.request_id] = Running(
            request.request_id,
            request.router_id,
            request.attempt,
            prompt,
            request.generated_count,
            self.attached_tokens,
            None,
            request.session,
        )
        self._wake.set()
        await self.may_answer.wait()
        attached = decode_pb2.Attached(max_tokens=self.attached_tokens, first_index=0)
        return decode_pb2.AttachResponse(attached=attached, incarnation=self.incarnation)

    async def Resume(self, request: decode_pb2.ResumeRequest, context: Any) -> decode_pb2.ResumeResponse:  # noqa: N802
        self.resumes.append(request)
        if self.refusal is not None:
            await abort(context, self.refusal)
        if request.holder_incarnation != self.incarnation or request.request_id not in self.copies:
            await abort(context, RequestNotFound(request.request_id))
        self.copies.discard(request.request_id)
        if not self.draws_before_its_answer:
            await self.may_answer.wait()
        prompt_length = len(request.token_ids) - request.generated_count
        self.running[request.request_id] = Running(
            request.request_id,
            request.router_id,
            request.attempt,
            tuple(request.token_ids[:prompt_length]),
            request.generated_count,
            request.params.max_tokens,
            request.params.logprobs if request.params.HasField("logprobs") else None,
            request.session,
        )
        self._wake.set()
        await self.may_answer.wait()
        held_tokens = (len(request.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return decode_pb2.ResumeResponse(incarnation=self.incarnation, held_tokens=held_tokens)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:  # noqa: N802
        self.abort_messages.append(request.by_router)
        for entry in request.attempts:
            self.aborted.append((entry.request_id, entry.attempt))
            self.reserved.discard((entry.request_id, entry.attempt))
            running = self.running.get(entry.request_id)
            ours = running is not None and running.router_id == entry.router_id
            if running is not None and ours and running.attempt <= entry.attempt:
                del self.running[entry.request_id]
                if self.holder is not None:
                    self.holder.copies.discard(entry.request_id)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        router_id = request.router_id
        self.subscribers.append(router_id)
        try:
            await self.thawed.wait()
            yield decode_pb2.StreamTokensResponse(incarnation=self.incarnation, beat_s=_BEAT_S if self.beats else 0.0)
            for named in request.requests:
                # It keeps nothing when a stream ends.
                if named.request_id not in self.running:
                    gone = decode_pb2.RequestTokens(
                        request_id=named.request_id, attempt=named.attempt, session=named.session, error="not here"
                    )
                    yield decode_pb2.StreamTokensResponse(requests=[gone])
            while True:
                while self.silent or not (self._of(router_id) and self.may_step.is_set()):
                    awaited = self.may_step if self._of(router_id) else self._wake
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(_BEAT_S):
                            await (asyncio.sleep(_BEAT_S) if self.silent else awaited.wait())
                    except TimeoutError:
                        if self.beats and not self.silent:
                            yield decode_pb2.StreamTokensResponse()
                yield decode_pb2.StreamTokensResponse(requests=self._step(router_id))
                await asyncio.sleep(0)
        finally:
            self.subscribers.remove(router_id)
            if not self.keeps_running:
                for running in self._of(router_id):
                    del self.running[running.request_id]

    def _of(self, router_id: str) -> list[Running]:
        return [running for running in self.running.values() if running.router_id == router_id]

    def _step(self, router_id: str) -> list[decode_pb2.RequestTokens]:
        updates = []
        for running in self._of(router_id):
            update = decode_pb2.RequestTokens(
                request_id=running.request_id, attempt=running.attempt, session=running.session
            )
            if self.fail_next:
                update.error = self.fail_next
                update.replaced = self.replaced_next
                del self.running[running.request_id]
                updates.append(update)
                continue
            first = running.next_index - 1 if self.repeat_tokens else running.next_index
            update.index = first
            update.token_ids.extend(token_at(running.prompt, index) for index in range(first, running.next_index + 1))
            if running.logprobs is not None:
                indices = range(first, running.next_index + 1)
                update.logprobs.extend(logprobs_at(index, running.logprobs) for index in indices)
            self._replicate(running, update)
            if self.too_few_logprobs == running.request_id:
                update.token_ids.append(VOCAB_FLOOR)
            running.next_index += 1
            if self.skip_once and running.next_index > 3:
                self.skip_once = False
                running.next_index += 1
            if running.next_index == self.pause_at:
                self.pause_at = None
                self.may_step.clear()
            if running.next_index >= running.max_tokens:
                update.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
                update.timing.decode_s = 0.25
                del self.running[running.request_id]
            elif running.next_index == self.stop_at:
                update.finish_reason = sampling_pb2.FINISH_REASON_STOP
                del self.running[running.request_id]
            updates.append(update)
        self.fail_next, self.replaced_next = "", False
        return updates

    def _replicate(self, running: Running, update: decode_pb2.RequestTokens) -> None:
        token_count = (len(running.prompt) + running.next_index) // BLOCK_TOKENS * BLOCK_TOKENS
        if self.holder is not None and token_count > running.replicated:
            running.replicated = token_count
            self.holder.copies.add(running.request_id)
            replica = ReplicaLocation(self.holder.instance_id, self.holder.incarnation, token_count)
            update.replica.CopyFrom(replica_to_proto(replica))


class ScriptedPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill instance that places every request on the decode instance that `decode_of` names."""

    def __init__(
        self,
        instance_id: str,
        decode_of: Callable[[], ScriptedDecode],
        life_of: Callable[[str], int] = lambda instance_id: 0,
    ) -> None:
        self.instance_id = instance_id
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.cancelled: list[str] = []
        self.refusals: list[KaveriError] = []
        """Errors for the next requests, one each."""
        self.hold: set[str] = set()
        """Steps before which every request waits for `release`: started, placed, first_token, handed_over."""
        self.release = asyncio.Event()
        self.decode_first = False
        """Let decode begin before the first token is reported."""
        self.decode_has_begun = False
        """The test has let decode begin."""
        self.break_after_hold = False
        """Fail every request that was held, once it is released."""
        self.open_requests = 0
        self.waiting_requests = 0
        """Requests that a hold stops now."""
        self.remaining_s: list[float | None] = []
        """Seconds until the deadline, for every request as it came."""
        self.stop_at: int | None = None
        """Tokens behind which answers end as with a stop token."""
        self.placed_in_vain = ""
        """Decode instance on which every request is placed before the one that takes it."""
        self.queue_limit: int | None = None
        """Heartbeats say that it takes so many requests, those included that a hold stops. None: they say nothing."""
        self.break_before = ""
        """The step before which every request fails with UNAVAILABLE."""
        self.placed_life: int | None = None
        """The incarnation that every placement names; None: the decode instance's own."""
        self.lost_questions = 0
        """So many of the next calls of GiveBackPrefill are lost."""
        self.gives_back = asyncio.Event()
        """Set once it gives back what a hold stops."""
        self._decode_of = decode_of
        self._life_of = life_of

    async def BeatPrefill(  # noqa: N802
        self, request: prefill_pb2.BeatPrefillRequest, context: Any
    ) -> prefill_pb2.BeatPrefillResponse:
        return prefill_pb2.BeatPrefillResponse()

    async def GiveBackPrefill(  # noqa: N802
        self, request: prefill_pb2.GiveBackPrefillRequest, context: Any
    ) -> prefill_pb2.GiveBackPrefillResponse:
        if self.lost_questions:
            self.lost_questions -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self.gives_back.set()
        self.release.set()
        return prefill_pb2.GiveBackPrefillResponse()

    async def AbortPrefill(  # noqa: N802
        self, request: prefill_pb2.AbortPrefillRequest, context: Any
    ) -> prefill_pb2.AbortPrefillResponse:
        decode = self._decode_of()
        for entry in request.attempts:
            running = decode.running.get(entry.request_id)
            if running is not None and (running.router_id, running.attempt) == (entry.router_id, entry.attempt):
                del decode.running[entry.request_id]
        return prefill_pb2.AbortPrefillResponse()

    async def AttachPrefill(  # noqa: N802
        self, request: prefill_pb2.AttachPrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.AttachPrefillResponse]:
        await abort(context, RequestNotFound(request.attach.request_id))
        yield prefill_pb2.AttachPrefillResponse()

    @property
    def queue_room(self) -> int | None:
        """What heartbeats say."""
        return None if self.queue_limit is None else max(0, self.queue_limit - self.waiting_requests)

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        decode = self._decode_of()
        prompt = tuple(request.token_ids[: len(request.token_ids) - request.generated_count])
        finish = (
            sampling_pb2.FINISH_REASON_LENGTH
            if request.generated_count + 1 >= request.params.max_tokens
            else sampling_pb2.FINISH_REASON_STOP
            if request.generated_count + 1 == self.stop_at
            else sampling_pb2.FINISH_REASON_UNSPECIFIED
        )
        self.open_requests += 1
        try:
            await self._before("started", context)
            yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(queue_s=0.125))
            if self.placed_in_vain:
                vain = self.placed_in_vain
                yield prefill_pb2.PrefillResponse(placed=_placed(vain, self._life_of(vain)))
            await self._before("placed", context)
            life = decode.incarnation if self.placed_life is None else self.placed_life
            if not decode.running.get(request.request_id):
                decode.reserved.add((request.request_id, request.attempt))
            yield prefill_pb2.PrefillResponse(placed=_placed(decode.instance_id, life))
            if self.decode_first and not finish:
                decode.start(request)
            await self._before("first_token", context)
            first = prefill_pb2.PrefillFirstToken(
                token_id=token_at(prompt, request.generated_count), finish_reason=finish, prefill_s=0.5
            )
            if request.params.HasField("logprobs"):
                first.logprobs.CopyFrom(logprobs_at(request.generated_count, request.params.logprobs))
            yield prefill_pb2.PrefillResponse(first_token=first)
            if finish:
                return
            if not self.decode_first and not self.decode_has_begun:
                decode.start(request)
            await self._before("handed_over", context)
            handed_over = prefill_pb2.PrefillHandedOver(kv_bytes=4096, kv_transfer_s=0.0625, kv_transport="tcp")
            yield prefill_pb2.PrefillResponse(handed_over=handed_over)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.open_requests -= 1

    async def _before(self, step: str, context: Any) -> None:
        if self.break_before == step:
            await abort(context, Unavailable(f"scripted to break before {step}"))
        if step in self.hold:
            self.waiting_requests += 1
            try:
                await self.release.wait()
            finally:
                self.waiting_requests -= 1
            if self.gives_back.is_set():
                await abort(context, Unavailable("it drains", retry_after_s=1.0))
            if self.break_after_hold:
                await abort(context, Unavailable("scripted to break"))


def _placed(instance_id: str, incarnation: int) -> prefill_pb2.PrefillPlaced:
    return prefill_pb2.PrefillPlaced(decode_instance_id=instance_id, decode_incarnation=incarnation)


@dataclass
class Instance:
    """A scripted instance's server and its place in the cluster."""

    record: InstanceRecord
    load: InstanceLoad
    server: RpcServer
    heartbeat: Heartbeat
    task: "asyncio.Task[None]"
    register: Callable[[aio.Server], None]

    async def kill(self) -> None:
        """Cuts every connection at once and lets the lease run out, as SIGKILL does."""
        self.task.cancel()
        await self.server.stop(0)

    async def die(self) -> None:
        """Cuts every connection at once; its heartbeats go on, as for the lease of a killed process."""
        await self.server.stop(0)

    async def come_back(self) -> None:
        """Answers at the same address as before, in the same life."""
        self.server = RpcServer("127.0.0.1", self.server.port, ())
        self.server.add(self.register)
        await self.server.start()

    async def leave(self) -> None:
        """Deregisters and stops."""
        self.heartbeat.stop()
        await self.task
        await self.server.stop(0)


@dataclass
class ScriptedCluster:
    """Scripted instances around one in-memory store, and routers on top."""

    tokenizer: ModelTokenizer
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    instances: dict[str, Instance] = field(default_factory=dict)
    decodes: dict[str, ScriptedDecode] = field(default_factory=dict)
    prefills: dict[str, ScriptedPrefill] = field(default_factory=dict)
    colocated: dict[str, tuple[ScriptedPrefill, ScriptedDecode]] = field(default_factory=dict)
    incarnations: int = 0
    lease_ttl_s: float = 0.3
    """Of instances that start from now on."""
    layout: KvLayout | None = None
    """Of instances that start from now on; their pools have 100 blocks."""
    place_on: str = ""
    """Decode instance that prefill instances place on; empty: the first one that lives."""

    def _decode(self) -> ScriptedDecode:
        if self.place_on:
            return self.decodes[self.place_on]
        return next(decode for name, decode in self.decodes.items() if name in self.instances)

    def _life(self, instance_id: str) -> int:
        return self.decodes[instance_id].incarnation if instance_id in self.decodes else 0

    async def add_decode(self, instance_id: str) -> ScriptedDecode:
        decode = self.decodes[instance_id] = ScriptedDecode(instance_id)
        register = partial(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode)
        self.instances[instance_id] = await self._start(instance_id, (Phase.DECODE,), register)
        decode.incarnation = self.instances[instance_id].record.incarnation
        return decode

    async def add_prefill(self, instance_id: str) -> ScriptedPrefill:
        prefill = self.prefills[instance_id] = ScriptedPrefill(instance_id, self._decode, self._life)
        register = partial(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill)
        self.instances[instance_id] = await self._start(instance_id, (Phase.PREFILL,), register)
        return prefill

    async def add_colocated(self, instance_id: str) -> tuple[ScriptedPrefill, ScriptedDecode]:
        """One server for both; what it prefills it decodes itself."""
        decode = ScriptedDecode(instance_id)
        prefill = ScriptedPrefill(instance_id, lambda: decode)
        self.colocated[instance_id] = prefill, decode

        def register(server: aio.Server) -> None:
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server)
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)

        self.instances[instance_id] = await self._start(instance_id, BOTH_PHASES, register)
        decode.incarnation = self.instances[instance_id].record.incarnation
        return prefill, decode

    def taken(self) -> list[prefill_pb2.PrefillRequest]:
        """Every request that any prefill instance has got, an instance at a time."""
        return [request for prefill in self.prefills.values() for request in prefill.requests]

    def let_all_go(self) -> None:
        """Ends every hold."""
        for prefill in self.prefills.values():
            prefill.release.set()
        for decode in self.decodes.values():
            decode.may_step.set()

    async def kill(self, instance_id: str) -> None:
        await self.instances.pop(instance_id).kill()

    async def leave(self, instance_id: str) -> None:
        await self.instances.pop(instance_id).leave()

    async def close(self) -> None:
        for instance_id in tuple(self.instances):
            await self.kill(instance_id)

    @contextlib.asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator["RouterUnderTest"]:
        """A router on this cluster, with a client's stub; checks afterwards that nothing leaked."""
        config = RouterConfig(**{"instance_id": "router-0", "heartbeat_interval_s": 0.02, **settings})
        async with MemoryStore(self.cluster) as store, _run_router(config, store, self.tokenizer) as under_test:
            router = under_test.router
            subscriber = router.router_id
            decodes = self.decodes | {name: decode for name, (_, decode) in self.colocated.items()}
            alive = [decode for name, decode in decodes.items() if name in self.instances]
            await eventually(
                lambda: all(any(name.startswith(subscriber) for name in decode.subscribers) for decode in alive)
            )
            yield under_test
            await under_test.check_integrity()

    async def _start(
        self, instance_id: str, phases: tuple[Phase, ...], register: Callable[[aio.Server], None]
    ) -> Instance:
        server = RpcServer("127.0.0.1", 0, ())
        server.add(register)
        await server.start()
        self.incarnations += 1
        record = InstanceRecord(
            instance_id=instance_id,
            incarnation=self.incarnations,
            role=Role.ENGINE,
            address=f"127.0.0.1:{server.port}",
            model=MODEL,
            engine="fake",
            phases=phases,
            layout=self.layout,
            max_model_len=MAX_MODEL_LEN,
            lease_ttl_s=self.lease_ttl_s,
        )
        load = InstanceLoad(state=InstanceState.READY, free_blocks=100, total_blocks=100)
        store = MemoryStore(self.cluster)

        def load_now() -> InstanceLoad:
            stated = self.instances[instance_id].load if instance_id in self.instances else load
            prefill = self.prefills.get(instance_id)
            return stated if prefill is None else replace(stated, queue_room=prefill.queue_room)

        heartbeat = Heartbeat(store, record, load_now, 0.02)

        async def beat() -> None:
            async with store:
                await heartbeat.run()

        return Instance(record, load, server, heartbeat, asyncio.create_task(beat()), register)


@dataclass
class RouterUnderTest:
    """A running router and a client's way to it."""

    router: Router
    host: ServiceHost
    stub: Any
    channel: aio.Channel
    stopping: asyncio.Event
    serving: asyncio.Task[int]

    @property
    def address(self) -> str:
        return self.host.address

    async def drain(self) -> None:
        """Returns when the router has ended."""
        self.stopping.set()
        assert await self.serving == 0

    async def check_integrity(self) -> None:
        """Nothing of ended requests is left: table, counts, timers, attempts tied to streams."""
        await eventually(lambda: len(self.router.table) == 0)
        await self.router.claims.close_all()
        await self.router.placer.close()
        await eventually(lambda: not any(task.get_name().startswith("request ") for task in asyncio.all_tasks()))
        self.router.claims.check_integrity()
        self.router.placer.check_integrity()
        self.router.feeds.check_integrity()
        assert await self.router.store.requests() == ()


@contextlib.asynccontextmanager
async def _run_router(
    config: RouterConfig, store: MemoryStore, tokenizer: ModelTokenizer
) -> AsyncIterator[RouterUnderTest]:
    """A router that takes requests; at the end it has left the cluster."""
    router, stopping = Router(config, store, tokenizer), asyncio.Event()
    host = router_host(router)
    serving = asyncio.create_task(host.serve(stopping))
    started = asyncio.create_task(host.started.wait())
    await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    try:
        async with open_channel(host.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield RouterUnderTest(router, host, stub, channel, stopping, serving)
    finally:
        host.break_off("the test is over")
        await serving


async def read_once_placed(
    cluster: ScriptedCluster, router: RouterUnderTest, request_id: str, instance_id: str
) -> tuple[Any, list[inference_pb2.GenerateResponse]]:
    """Starts a request; returns its call and first response, once the router has read the placement on the instance."""
    call = router.stub.Generate(ask(request_id=request_id), timeout=60)
    responses = [await call.read()]

    def is_placed() -> bool:
        entry = router.router.table.get(request_id)
        return entry is not None and (getattr(entry.state, "decode", None) or ("",))[0] == instance_id

    await eventually(is_placed)
    return call, responses
