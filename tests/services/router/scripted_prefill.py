"""A prefill instance for router tests: a real gRPC service with scripted behaviour. No KV moves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kaveri.domain.attachment import Attached
from kaveri.domain.sampling import ResolvedParams
from kaveri.errors import KaveriError, RequestNotFound, Unavailable
from kaveri.v1 import decode_pb2, feed_pb2, prefill_pb2, prefill_pb2_grpc, sampling_pb2
from kaveri.wire.attempts import attached_to_proto
from kaveri.wire.status import abort, error_to_bytes
from tests.services.router.scripted_answers import CACHED_TOKENS, logprobs_at, prompt_logprobs_at, token_at
from tests.services.router.scripted_decode import BEAT_S, ScriptedDecode

PROMPT_PART = 3
"""Positions per report on a prompt."""


class ScriptedPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill instance that places every request on decode_of()."""

    def __init__(
        self,
        instance_id: str,
        decode_of: Callable[[], ScriptedDecode],
        life_of: Callable[[str], int] = lambda instance_id: 0,
    ) -> None:
        self.instance_id = instance_id
        self.requests: list[prefill_pb2.SubmitRequest] = []
        self.incarnation = 0
        self.refusals: list[KaveriError] = []
        self.hold: set[str] = set()
        """Steps before which requests wait for `release`, such as started, placed or first_token."""
        self.release = asyncio.Event()
        self.break_after_hold = False
        """Fail held requests once they are released."""
        self.open_requests = 0
        self.waiting_requests = 0
        self.remaining_s: list[float | None] = []
        """Time to the deadline of every request at its arrival."""
        self.stop_at: int | None = None
        self.placed_in_vain = ""
        """Decode instance named for every request before the real one."""
        self.queue_limit: int | None = None
        """Queue size by heartbeats, including held requests; None: not reported."""
        self.break_before = ""
        """Step before which every request fails with UNAVAILABLE."""
        self.lost_questions = 0
        """Number of next calls, to give requests back, that are lost."""
        self.handed_over_to: ScriptedDecode | None = None
        """Instance that already has every request attached here."""
        self.when_attached: list[Callable[[], object]] = []
        """Each is called once, at the next Attach, whose reports are lost."""
        self.gives_back = asyncio.Event()
        self.knows_prompt_logprobs = True
        self.joins = False
        self.breaks_within_prompt = False
        """Fail every request after the first part of its prompt's logprobs."""
        self._decode_of = decode_of
        self._life_of = life_of
        self._news: dict[str, asyncio.Queue[prefill_pb2.PrefillReport]] = {}
        """Unsent reports by router."""
        self._told: dict[tuple[str, str, int], list[prefill_pb2.PrefillReport]] = {}
        self._running: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    async def follow(self, router_id: str) -> AsyncIterator[feed_pb2.FollowResponse]:
        news = self._of(router_id)
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    report = await news.get()
            except TimeoutError:
                yield feed_pb2.FollowResponse()
            else:
                yield feed_pb2.FollowResponse(reports=[report])

    async def give_back(self, context: Any) -> None:
        if self.lost_questions:
            self.lost_questions -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        self.gives_back.set()
        self.release.set()

    def abort(self, name: decode_pb2.AttemptId) -> None:
        task = self._running.get((name.router_id, name.request_id, name.term.attempt))
        if task is not None:
            task.cancel()
        decode = self._decode_of()
        running = decode.running.get(name.request_id)
        if running is not None and (running.router_id, running.attempt) == (name.router_id, name.term.attempt):
            del decode.running[name.request_id]

    def attach(self, request: feed_pb2.AttachRequest) -> feed_pb2.AttachResponse:
        decode = self.handed_over_to
        if decode is None:
            raise RequestNotFound(request.request_id)
        placed = _placed(decode.instance_id, decode.incarnation)
        reports = (
            prefill_pb2.PrefillReport(placed=placed),
            prefill_pb2.PrefillReport(handed_over=prefill_pb2.PrefillHandedOver(), ended=prefill_pb2.PrefillEnded()),
        )
        if self.when_attached:
            self.when_attached.pop()()
            reports = ()
        for report in reports:
            self._report(request, report)
        attached = attached_to_proto(Attached(ResolvedParams(max_tokens=20, temperature=0.0), first_index=0))
        return feed_pb2.AttachResponse(attached=attached)

    @property
    def queue_room(self) -> int | None:
        return None if self.queue_limit is None else max(0, self.queue_limit - self.waiting_requests)

    async def Submit(  # noqa: N802
        self, request: prefill_pb2.SubmitRequest, context: Any
    ) -> prefill_pb2.SubmitResponse:
        key = request.router_id, request.request_id, request.term.attempt
        if key in self._told:
            for report in self._told[key]:
                self._of(request.router_id).put_nowait(report)
            return prefill_pb2.SubmitResponse()
        self.requests.append(request)
        self.remaining_s.append(request.timeout_s)
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        self._told[key] = []
        task = self._running[key] = asyncio.create_task(self._run(request))
        task.add_done_callback(lambda _: self._running.pop(key, None))
        return prefill_pb2.SubmitResponse()

    async def _run(self, request: prefill_pb2.SubmitRequest) -> None:
        joined, ended = prefill_pb2.PrefillReport(), prefill_pb2.PrefillEnded()
        try:
            async for report in self._reports(request):
                if self.joins:
                    joined.MergeFrom(report)
                else:
                    self._report(request, report)
        except KaveriError as error:
            ended.error = error_to_bytes(error)
        joined.ended.CopyFrom(ended)
        self._report(request, joined)

    def _of(self, router_id: str) -> "asyncio.Queue[prefill_pb2.PrefillReport]":
        return self._news.setdefault(router_id, asyncio.Queue())

    def _report(
        self, request: prefill_pb2.SubmitRequest | feed_pb2.AttachRequest, report: prefill_pb2.PrefillReport
    ) -> None:
        report.request_id = request.request_id
        report.term.CopyFrom(request.term)
        self._told.setdefault((request.router_id, request.request_id, request.term.attempt), []).append(report)
        self._of(request.router_id).put_nowait(report)

    async def _reports(self, request: prefill_pb2.SubmitRequest) -> AsyncIterator[prefill_pb2.PrefillReport]:
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
            await self._before("started")
            yield prefill_pb2.PrefillReport(started=prefill_pb2.PrefillStarted(queue_s=0.125))
            if self.placed_in_vain:
                vain = self.placed_in_vain
                yield prefill_pb2.PrefillReport(placed=_placed(vain, self._life_of(vain)))
            await self._before("placed")
            if not decode.running.get(request.request_id):
                decode.reserved[request.request_id, request.term.attempt] = request.params.max_tokens
            yield prefill_pb2.PrefillReport(placed=_placed(decode.instance_id, decode.incarnation))
            if (
                request.params.HasField("prompt_logprobs")
                and not request.generated_count
                and self.knows_prompt_logprobs
            ):
                await self._before("prompt_logprobs")
                for place in range(1, len(prompt), PROMPT_PART):
                    yield _prompt_part(prompt, place, request.params.prompt_logprobs)
                    if self.breaks_within_prompt:
                        raise Unavailable("scripted to break within the prompt")
            await self._before("first_token")
            first = prefill_pb2.PrefillFirstToken(
                token_id=token_at(prompt, request.generated_count),
                finish_reason=finish,
                prefill_s=0.5,
                cached_tokens=CACHED_TOKENS,
            )
            if request.params.HasField("logprobs"):
                first.logprobs.CopyFrom(logprobs_at(request.generated_count, request.params.logprobs))
            yield prefill_pb2.PrefillReport(first_token=first)
            if finish:
                return
            decode.start(request)
            await self._before("handed_over")
            handed_over = prefill_pb2.PrefillHandedOver(kv_bytes=4096, kv_transfer_s=0.0625, kv_transport="tcp")
            yield prefill_pb2.PrefillReport(handed_over=handed_over)
        except asyncio.CancelledError:
            decode.abandon(request)
            raise
        finally:
            self.open_requests -= 1

    async def _before(self, step: str) -> None:
        if self.break_before == step:
            raise Unavailable(f"scripted to break before {step}")
        if step in self.hold:
            self.waiting_requests += 1
            try:
                await self.release.wait()
            finally:
                self.waiting_requests -= 1
            if self.gives_back.is_set():
                raise Unavailable("it drains", retry_after_s=1.0)
            if self.break_after_hold:
                raise Unavailable("scripted to break")


def _prompt_part(prompt: tuple[int, ...], first: int, count: int) -> prefill_pb2.PrefillReport:
    places = range(first, min(first + PROMPT_PART, len(prompt)))
    entries = [prompt_logprobs_at(prompt, place, count) for place in places]
    return prefill_pb2.PrefillReport(prompt_logprobs=sampling_pb2.PromptLogprobs(first=first, logprobs=entries))


def _placed(instance_id: str, incarnation: int) -> prefill_pb2.PrefillPlaced:
    return prefill_pb2.PrefillPlaced(decode_instance_id=instance_id, decode_incarnation=incarnation)
