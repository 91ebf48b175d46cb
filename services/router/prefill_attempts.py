"""Attempts at prefill instances: sends requests, applies reports, and aborts abandoned attempts.

Draining instances are asked to give back prompts that they have not begun, once another instance accepts requests,
which only the router knows."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Final

from grpc import aio

from kaveri.domain.owner import Term
from kaveri.domain.replica import ReplicaLocation
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, accepts
from kaveri.errors import KaveriError, NoCapacity, RequestCancelled, Unavailable
from kaveri.lives import request_values as lives
from kaveri.lives.request_values import InstanceLife
from kaveri.policy.retry import FIRST_PAUSE_S
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.rpc.channels import Channels
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import feed_pb2, prefill_pb2, term_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.attempts import ownership_to_proto
from kaveri.wire.messages import FINISH_FROM_PROTO, params_to_proto
from kaveri.wire.status import error_from_bytes, error_of, is_answer, is_unsent
from services.router.requests import RequestEntry
from services.router.subscriptions import PromptTie
from services.router.token_feeds import TokenFeeds

_MOST_TRIES = 6
"""Max calls that ask a draining instance to give prompts back."""
_FIRST_PAUSE_S = 0.05
"""Pause after the first such call. It doubles."""
_MOST_AT_ONCE = 4096
"""Max requests of one such call: less than half of the largest message, even with the longest ids."""
_MOST_SUBMITS = 4
"""Max Submit calls for one attempt, when connections break."""
_SHORTEST_S = 1e-3
_IN_ORDER: Final = ("started", "placed", "prompt_logprobs", "first_token", "handed_over")
"""Fields of a PrefillReport, in reading order."""

_Attempt = tuple[RequestEntry, int]
"""Request and attempt number."""


class PrefillAttempts:
    """A router's attempts (placements of requests) at prefill instances. Not thread-safe."""

    def __init__(
        self, model: str, stream_id: str, channels: Channels, feeds: TokenFeeds, has_begun: Callable[[], object]
    ) -> None:
        """stream_id: this router's id in the prefill protocol. has_begun: called when an instance has begun or ended a
        prompt, and may have room for another."""
        self._model = model
        self._stream_id = stream_id
        self._channels = channels
        self._feeds = feeds
        self._has_begun = has_begun
        self.unconfirmed: UnconfirmedWork[tuple[str, int]] = UnconfirmedWork()
        """Prompts sent that no heartbeat of their instance includes yet."""
        self._instances: Mapping[str, ViewedInstance] = {}
        self._waiting: dict[_Attempt, InstanceRecord] = {}
        """Attempts that their instance has not begun."""
        self._asked: set[_Attempt] = set()
        """Waiting attempts that a draining instance was asked to give back."""
        self._asking: set[asyncio.Task[None]] = set()

    def update(self, view: ClusterView) -> None:
        """Apply a cluster view: ask instances that take no more prompts to return those that they have not begun, if
        another instance takes them."""
        if view.instances is self._instances:
            return
        self._instances = view.instances
        if not self._waiting or not view.ready(Phase.PREFILL, self._model):
            return
        due: dict[str, list[_Attempt]] = {}
        for attempt, record in self._waiting.items():
            status = view.instances.get(record.instance_id)
            if status is None or status.record.incarnation != record.incarnation or accepts(status, Phase.PREFILL):
                # It may refuse requests again.
                self._asked.discard(attempt)
            elif attempt not in self._asked:
                self._asked.add(attempt)
                due.setdefault(record.address, []).append(attempt)
        for address, attempts in due.items():
            for first in range(0, len(attempts), _MOST_AT_ONCE):
                asking = self._ask(address, attempts[first : first + _MOST_AT_ONCE])
                task = asyncio.create_task(asking, name=f"waiting prompts at {address}")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Wait until the calls that ask draining instances to return prompts are over."""
        if self._asking:
            await asyncio.wait(self._asking)

    def check_integrity(self) -> None:
        """Assert, while no request is in flight, that no attempt is left."""
        assert not len(self.unconfirmed), len(self.unconfirmed)
        assert not len(self._waiting), len(self._waiting)

    async def send(
        self, entry: RequestEntry, attempt: lives.Attempt, target: ViewedInstance, over: asyncio.Future[None]
    ) -> None:
        """Submit an attempt to a prefill instance, and apply its reports until they end. over: the attempt's end, which
        also ends this call."""
        accepted = entry.accepted
        request = prefill_pb2.SubmitRequest(
            request_id=entry.request_id,
            term=term_pb2.Term(session=accepted.session, attempt=attempt.number),
            router_id=self._stream_id,
            secret=accepted.secret,
            token_ids=(*accepted.prompt_token_ids, *entry.answer.token_ids),
            generated_count=attempt.first_index,
            params=params_to_proto(accepted.params),
            silent_decode_ids=sorted(self._feeds.silent_ids),
            traceparent=entry.account.traceparent,
            suspect_until=attempt.suspect_until,
            incarnation=target.record.incarnation,
        )
        self.unconfirmed.add((entry.request_id, attempt.number), target, len(request.token_ids))
        now_s = time.monotonic()
        if entry.account.timing.attempts == 1:
            entry.account.timing.router_s = now_s - accepted.arrived_s
        request.timeout_s = max(accepted.deadline_s - now_s, _SHORTEST_S)
        tie = self._feeds.expect_reports(entry, attempt.number, target.record)
        tie.was_sent = self._channels.is_connected(target.record.address)
        submitting = asyncio.create_task(self._submit(request, tie), name=f"submit {entry.request_id}")
        try:
            await self.read(entry, attempt, tie, over)
        finally:
            submitting.cancel()
            await asyncio.wait((submitting,))

    async def _submit(self, request: prefill_pb2.SubmitRequest, tie: PromptTie) -> None:
        """Submit until the instance answers. A refusal, or an unreachable instance, ends the reports."""
        stub, name = self._channels.stub(PrefillServiceStub, tie.record.address), tie.record.instance_id
        for _ in range(_MOST_SUBMITS):
            sent_s = time.monotonic()
            try:
                await stub.Submit(request, timeout=CALL_TIMEOUT_S)
            except aio.AioRpcError as rpc_error:
                if is_unsent(rpc_error) or is_answer(rpc_error):
                    tie.has_ended = tie.has_ended or not tie.is_there
                    tie.was_sent = is_answer(rpc_error)
                    tie.lose(error_of(rpc_error))
                    return
                # The connection broke, or the instance is slow: to submit again does no harm.
                tie.was_sent = True
                continue
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Not this task but the call was cancelled: the channel was closed.
                tie.lose(Unavailable(f"prefill instance {name} has left the cluster"))
                return
            tie.is_there = True
            if not self._feeds.may_lack_reports(tie, sent_s):
                return
        if not tie.is_there:
            tie.lose(Unavailable(f"prefill instance {name} does not answer"))

    async def read(
        self, entry: RequestEntry, attempt: lives.Attempt, tie: PromptTie, over: asyncio.Future[None]
    ) -> None:
        """Apply the prefill reports that arrive in `tie` until they end or `over`, the attempt's end, completes."""
        ended = lives.PrefillEnded()
        self._waiting[entry, attempt.number] = tie.record
        over.add_done_callback(lambda _: tie.news.put_nowait(None))
        try:
            while not over.done():
                report = await tie.news.get()
                if report is None:
                    break
                if isinstance(report, KaveriError):
                    raise report
                for kind in _IN_ORDER:
                    if over.done():
                        break
                    if report.HasField(kind):
                        self._take(entry, attempt, kind, report)
                if report.ended.error:
                    raise error_from_bytes(report.ended.error)
                if report.HasField("ended"):
                    break
        except KaveriError as error:
            if isinstance(error, RequestCancelled):
                error = Unavailable(f"prefill instance gave the request up: {error}")
            waits = (entry, attempt.number) in self._waiting
            if waits and isinstance(error, Unavailable) and error.retry_after_s is not None:
                # It drains or ceases to prefill, and has not begun the request, so this is no fault.
                error = NoCapacity("prefill", max(error.retry_after_s, FIRST_PAUSE_S), error.reason)
            ended = lives.PrefillEnded(error, was_reached=tie.was_sent or tie.is_there)
        finally:
            self._confirm(entry, attempt)
            self._feeds.drop(tie)
            if not tie.has_ended and not entry.is_superseded:
                # Otherwise the request would go on there, for its client to re-attach.
                term = Term(entry.accepted.session, attempt.number)
                self._feeds.disown(entry.request_id, term, tie.life.instance_id, entry.accepted.secret)
        if not over.done():
            entry.handle(ended, time.monotonic())

    async def _ask(self, address: str, attempts: list[_Attempt]) -> None:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_MOST_TRIES):
            names = [
                ownership_to_proto(entry.request_id, entry.ownership(number, self._stream_id))
                for entry, number in attempts
                if (entry, number) in self._asked
            ]
            if not names:
                return
            message = feed_pb2.AbortRequest(attempts=names, give_back=True)
            with contextlib.suppress(aio.AioRpcError):
                await self._channels.stub(FeedServiceStub, address).Abort(message, timeout=CALL_TIMEOUT_S)
                return
            await asyncio.sleep(pause_s)
            pause_s *= 2
        # The next view asks again.
        self._asked.difference_update(attempts)

    def _confirm(self, entry: RequestEntry, attempt: lives.Attempt) -> None:
        self._waiting.pop((entry, attempt.number), None)
        self._asked.discard((entry, attempt.number))
        self.unconfirmed.remove((entry.request_id, attempt.number), attempt.prefill.instance_id)
        self._has_begun()

    def _note_kept(self, entry: RequestEntry, attempt: lives.Attempt, kept_tokens: int, now_s: float) -> None:
        """Record that the prompt's KV stays on the prefill instance, unless decode has named a replica before."""
        state = entry.state
        if isinstance(state, lives.Placed | lives.Decoding) and state.attempt == attempt and state.replica is None:
            prefill = attempt.prefill
            kept = ReplicaLocation(prefill.instance_id, prefill.incarnation, kept_tokens)
            entry.handle(lives.ReplicaNamed(attempt.number, state.decode, kept), now_s)
            entry.note_holder()

    def _take(self, entry: RequestEntry, attempt: lives.Attempt, kind: str, report: prefill_pb2.PrefillReport) -> None:
        timing, now_s = entry.account.timing, time.monotonic()
        match kind:
            case "started":
                self._confirm(entry, attempt)
                timing.prefill_queue_s = report.started.queue_s
                entry.has_begun = True
                entry.wake()
            case "placed":
                placed = report.placed
                life = InstanceLife(placed.decode_instance_id, placed.decode_incarnation)
                # Prefill names an instance other than the one that draws if it missed that its push was accepted. A
                # later session must not look for the request there.
                state = entry.state
                if not (
                    isinstance(state, lives.Finishing) or (isinstance(state, lives.Decoding) and state.decode != life)
                ):
                    entry.note_owner(attempt.prefill, life)
                entry.handle(lives.DecodeNamed(life), now_s)
                if isinstance(entry.state, lives.Placed | lives.Decoding) and entry.state.replica is not None:
                    entry.note_holder()
            case "prompt_logprobs":
                # Later attempts repeat them.
                entry.answer.append_prompt(report.prompt_logprobs.first, report.prompt_logprobs.logprobs)
                entry.wake()
            case "first_token":
                first = report.first_token
                timing.prefill_s = first.prefill_s
                if timing.attempts == 1 and not entry.accepted.session:
                    # A later attempt finds the KV of an earlier one.
                    timing.cached_tokens = first.cached_tokens
                logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
                entry.handle(
                    lives.FirstTokenReported((first.token_id,), logprobs, FINISH_FROM_PROTO[first.finish_reason]), now_s
                )
            case "handed_over":
                timing.kv_bytes = report.handed_over.kv_bytes
                timing.kv_transfer_s = report.handed_over.kv_transfer_s
                timing.kv_tail_s = report.handed_over.kv_tail_s
                timing.kv_transport = report.handed_over.kv_transport
                entry.handle(lives.HandOverReported(), now_s)
                if report.handed_over.kept_tokens:
                    self._note_kept(entry, attempt, report.handed_over.kept_tokens, now_s)
