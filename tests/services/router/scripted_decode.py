"""A decode instance for router tests: a real gRPC service with scripted behaviour."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kaveri.domain.replica import ReplicaLocation
from kaveri.errors import KaveriError, RequestNotFound
from kaveri.v1 import decode_pb2, decode_pb2_grpc, feed_pb2, prefill_pb2, sampling_pb2, term_pb2
from kaveri.wire.replicas import replica_to_proto
from kaveri.wire.status import abort
from tests.services.router.scripted_answers import VOCAB_FLOOR, logprobs_at, token_at

BEAT_S = 0.05
BLOCK_TOKENS = 4
ATTACHED_TOKENS = 20


@dataclass
class ScriptedRequest:
    request_id: str
    router_id: str
    attempt: int
    prompt: tuple[int, ...]
    next_index: int
    max_tokens: int
    logprobs: int | None
    session: int = 0
    replicated: int = 0
    """Tokens of its replica, as last reported to the router."""


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Fake decode instance; draws a token each time that its router has read one, unless paused."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.running: dict[str, ScriptedRequest] = {}
        self.aborted: list[tuple[str, int]] = []
        self.abort_messages: list[bool] = []
        """by_router of each Abort."""
        self.subscribers: list[str] = []
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.stop_at: int | None = None
        """Number of tokens after which answers end as with a stop token."""
        self.pause_at: int | None = None
        """Pause once, when a request has this many tokens; may_step resumes."""
        self.skip_once = False
        self.repeat_tokens = False
        """Send every token twice."""
        self.fail_next: str = ""
        """Error to report for every request at the next step."""
        self.replaced_next = False
        """Report with fail_next that another router has begun the request."""
        self.too_few_logprobs = ""
        """Id of a request that gets fewer logprobs than tokens."""
        self.incarnation = 0
        self.silent = False
        self.keeps_running = False
        self.thawed = asyncio.Event()
        """Cleared, with silent: new streams are not answered either, as by a frozen process."""
        self.thawed.set()
        self.holder: ScriptedDecode | None = None
        """Instance with a replica of every request here; an Abort here drops it."""
        self.copies: set[str] = set()
        self.resumes: list[decode_pb2.ResumeRequest] = []
        self.reserved: dict[tuple[str, int], int] = {}
        """max_tokens of requests placed here that have not begun, by id and attempt."""
        self.attachable: set[str] = set()
        """Requests of earlier sessions that run here, with answers of ATTACHED_TOKENS."""
        self.attached: list[feed_pb2.AttachRequest] = []
        self.refusal: KaveriError | None = None
        self.attach_refusal: KaveriError | None = None
        """Refuses every Attach of a request of another router."""
        self.may_answer = asyncio.Event()
        """Answers to Resume and Attach wait for this."""
        self.may_answer.set()
        self.withholds_ends = False
        """Send an answer's last token without its end."""
        self.read_here = False
        """Report that the client reads every answer here."""
        self._wake = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        return not self.may_step.is_set()

    def start(self, request: prefill_pb2.SubmitRequest) -> None:
        if (request.request_id, request.term.attempt) in self.aborted:
            return
        self.reserved.pop((request.request_id, request.term.attempt), None)
        self._run(request, request.generated_count + 1, request.params)

    def _run(
        self,
        request: prefill_pb2.SubmitRequest | feed_pb2.AttachRequest | decode_pb2.ResumeRequest,
        next_index: int,
        params: sampling_pb2.SamplingParams,
    ) -> None:
        self.running[request.request_id] = ScriptedRequest(
            request.request_id,
            request.router_id,
            request.term.attempt,
            tuple(request.token_ids[: len(request.token_ids) - request.generated_count]),
            next_index,
            params.max_tokens,
            params.logprobs if params.HasField("logprobs") else None,
            request.term.session,
        )
        self._wake.set()

    def abandon(self, request: prefill_pb2.SubmitRequest) -> None:
        self.reserved.pop((request.request_id, request.term.attempt), None)
        running = self.running.get(request.request_id)
        if running is not None and (running.router_id, running.attempt) == (request.router_id, request.term.attempt):
            del self.running[request.request_id]

    async def attach(self, request: feed_pb2.AttachRequest) -> feed_pb2.AttachResponse:
        running = self.running.get(request.request_id)
        if running is not None and (running.router_id, running.attempt) == (request.router_id, request.term.attempt):
            # Its own router may lack what went over a former stream.
            running.next_index = min(running.next_index, max(1, request.generated_count))
            return self._attached(running.max_tokens)
        if (max_tokens := self.reserved.get((request.request_id, request.term.attempt))) is not None:
            return self._attached(max_tokens)
        if self.attach_refusal is not None:
            raise self.attach_refusal
        if request.request_id not in self.attachable:
            raise RequestNotFound(request.request_id)
        self.attached.append(request)
        self._run(request, request.generated_count, sampling_pb2.SamplingParams(max_tokens=ATTACHED_TOKENS))
        await self.may_answer.wait()
        return self._attached(ATTACHED_TOKENS)

    def _attached(self, max_tokens: int) -> feed_pb2.AttachResponse:
        attached = feed_pb2.Attached(max_tokens=max_tokens, first_index=0)
        return feed_pb2.AttachResponse(attached=attached)

    async def Resume(self, request: decode_pb2.ResumeRequest, context: Any) -> decode_pb2.ResumeResponse:  # noqa: N802
        self.resumes.append(request)
        if self.refusal is not None:
            await abort(context, self.refusal)
        if request.holder_incarnation != self.incarnation or request.request_id not in self.copies:
            await abort(context, RequestNotFound(request.request_id))
        self.copies.discard(request.request_id)
        await self.may_answer.wait()
        self._run(request, request.generated_count, request.params)
        held_tokens = (len(request.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return decode_pb2.ResumeResponse(incarnation=self.incarnation, held_tokens=held_tokens)

    def abort(self, request: feed_pb2.AbortRequest) -> None:
        self.abort_messages.append(request.by_router)
        for entry in request.attempts:
            self.aborted.append((entry.request_id, entry.term.attempt))
            self.reserved.pop((entry.request_id, entry.term.attempt), None)
            running = self.running.get(entry.request_id)
            ours = running is not None and running.router_id == entry.router_id
            if running is not None and ours and running.attempt <= entry.term.attempt:
                del self.running[entry.request_id]
                if self.holder is not None:
                    self.holder.copies.discard(entry.request_id)

    async def follow(self, request: feed_pb2.FollowRequest) -> AsyncIterator[feed_pb2.FollowResponse]:
        router_id = request.router_id
        self.subscribers.append(router_id)
        try:
            await self.thawed.wait()
            yield feed_pb2.FollowResponse(incarnation=self.incarnation)
            for named in request.requests:
                if not named.at_prefill and named.request_id not in self.running:
                    gone = decode_pb2.RequestTokens(request_id=named.request_id, term=named.term, error="not here")
                    yield feed_pb2.FollowResponse(requests=[gone])
            while True:
                while self.silent or not (self._of(router_id) and self.may_step.is_set()):
                    awaited = self.may_step if self._of(router_id) else self._wake
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(BEAT_S):
                            await (asyncio.sleep(BEAT_S) if self.silent else awaited.wait())
                    except TimeoutError:
                        if not self.silent:
                            yield feed_pb2.FollowResponse()
                yield feed_pb2.FollowResponse(requests=self._step(router_id))
                await asyncio.sleep(0)
        finally:
            self.subscribers.remove(router_id)
            if not self.keeps_running:
                for running in self._of(router_id):
                    del self.running[running.request_id]

    def _of(self, router_id: str) -> list[ScriptedRequest]:
        return [running for running in self.running.values() if running.router_id == router_id]

    def _step(self, router_id: str) -> list[decode_pb2.RequestTokens]:
        updates = []
        for running in self._of(router_id):
            update = decode_pb2.RequestTokens(
                request_id=running.request_id,
                term=term_pb2.Term(session=running.session, attempt=running.attempt),
                read_here=self.read_here,
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
                if not self.withholds_ends:
                    update.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
                    update.timing.decode_s = 0.25
                del self.running[running.request_id]
            elif running.next_index == self.stop_at:
                update.finish_reason = sampling_pb2.FINISH_REASON_STOP
                del self.running[running.request_id]
            updates.append(update)
        self.fail_next, self.replaced_next = "", False
        return updates

    def _replicate(self, running: ScriptedRequest, update: decode_pb2.RequestTokens) -> None:
        token_count = (len(running.prompt) + running.next_index) // BLOCK_TOKENS * BLOCK_TOKENS
        if self.holder is not None and token_count > running.replicated:
            running.replicated = token_count
            self.holder.copies.add(running.request_id)
            replica = ReplicaLocation(self.holder.instance_id, self.holder.incarnation, token_count)
            update.replica.CopyFrom(replica_to_proto(replica))
