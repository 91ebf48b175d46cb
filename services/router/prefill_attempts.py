"""Attempts at prefill instances: sends requests there, passes on what is reported, and aborts what is given up."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.owner import Ownership
from kaveri.domain.view import ClusterView, InstanceRecord, Phase, ViewedInstance, phases_now
from kaveri.errors import DeadlineExceeded, NoCapacity, RequestCancelled, Unavailable
from kaveri.policy.unconfirmed import UnconfirmedWork
from kaveri.rpc.channels import Channels
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.attempts import ownership_to_proto
from kaveri.wire.messages import finish_from_proto, params_to_proto
from kaveri.wire.status import error_of, is_answer, is_unsent
from services.router.lifecycle_values import (
    Attempt,
    DecodeNamed,
    Decoding,
    Finishing,
    FirstTokenReported,
    HandOverReported,
    InstanceLife,
    Placed,
    PrefillEnded,
    Prefilling,
    State,
)
from services.router.prefill_watch import PrefillSteps, PrefillWatch
from services.router.requests import RequestEntry
from services.router.take_over import TakeOver
from services.router.token_feeds import TokenFeeds
from services.router.waiting_prompts import WaitingPrompts

_MOST_STREAMS = 8
"""Of one attempt at a prefill instance, when they break again and again."""
_IN_ORDER = ("started", "placed", "prompt_logprobs", "first_token", "handed_over")
"""Fields of a PrefillResponse, in the order in which they are read."""


class PrefillAttempts:
    """Of one router. For one event loop."""

    def __init__(
        self,
        *,
        model: str,
        stream_id: str,
        suspect_after_s: float,
        store: ClusterStore,
        channels: Channels,
        feeds: TokenFeeds,
        takeover: TakeOver,
        has_begun: Callable[[], object],
    ) -> None:
        """stream_id, suspect_after_s: as of the placer. has_begun: called when an instance has begun a prompt, or has
        ended it: there may be room."""
        self._stream_id = stream_id
        self._store = store
        self._channels = channels
        self._feeds = feeds
        self._takeover = takeover
        self._has_begun = has_begun
        self.unconfirmed: UnconfirmedWork[tuple[str, int]] = UnconfirmedWork()
        """Prompts that no heartbeat shows yet."""
        self._waiting = WaitingPrompts(model, stream_id, channels)
        self._watch = PrefillWatch(channels, suspect_after_s)
        self._instances: Mapping[str, ViewedInstance] = {}
        self._errands: dict[asyncio.Task[None], None] = {}

    @property
    def silent_ids(self) -> frozenset[str]:
        """The prefill instances that went silent and were not heard since."""
        return self._watch.silent_ids

    def update(self, view: ClusterView) -> None:
        """Takes in a view."""
        self._watch.update(view)
        if view.instances is not self._instances:
            self._instances = view.instances
            self._waiting.update(view)

    async def close(self) -> None:
        """Waits until the aborts that are under way are sent."""
        self._watch.close()
        if self._errands:
            await asyncio.wait(self._errands)
        await self._waiting.close()

    def check_integrity(self) -> None:
        """Asserts, while no request is in flight, that nothing of ended ones is left."""
        assert not self._errands, self._errands
        assert not len(self.unconfirmed), len(self.unconfirmed)
        assert not len(self._waiting), len(self._waiting)

    async def send(
        self, entry: RequestEntry, attempt: Attempt, target: ViewedInstance, over: asyncio.Future[None]
    ) -> None:
        """Sends the request to prefill, and passes on what it reports until its stream ends or the attempt is over."""
        accepted = entry.accepted
        request = prefill_pb2.PrefillRequest(
            request_id=entry.request_id,
            attempt=attempt.number,
            router_id=self._stream_id,
            token_ids=(*accepted.prompt_token_ids, *entry.answer.token_ids),
            generated_count=attempt.first_index,
            params=params_to_proto(accepted.params),
            session=accepted.session,
            secret=accepted.secret,
            silent_decode_ids=sorted(self._feeds.silent_ids),
            traceparent=entry.traceparent,
            suspect_until=attempt.suspect_until,
        )
        self.unconfirmed.add((entry.request_id, attempt.number), target, len(request.token_ids))
        now_s = time.monotonic()
        if entry.timing.attempts == 1:
            entry.timing.router_s = now_s - accepted.arrived_s
        was_connected = self._channels.is_connected(target.record.address)
        call = self._channels.stub(PrefillServiceStub, target.record.address).Prefill(
            request, timeout=accepted.deadline_s - now_s
        )
        await self.read(entry, attempt, PrefillSteps(call, target.record, was_connected=was_connected), over)

    async def read(
        self, entry: RequestEntry, attempt: Attempt, steps: PrefillSteps, over: asyncio.Future[None]
    ) -> None:
        """Passes on what prefill reports, until its stream ends or the attempt is over. A stream that breaks is opened
        again at the same instance, where the request goes on."""
        ended, has_ended_it = PrefillEnded(), False
        self._waiting.add(entry, attempt, steps.record)
        try:
            for _ in range(_MOST_STREAMS):
                ended, has_ended_it, is_broken = await self._read_steps(entry, attempt, steps, over)
                if not is_broken or over.done() or not isinstance(entry.state, Prefilling | Placed):
                    break
                again = await self._takeover.reopen(entry, attempt.number, steps)
                if again is None:
                    break
                steps = again
        finally:
            self._confirm(entry, attempt)
            if entry.accepted.secret and not has_ended_it and not entry.is_superseded:
                # Without it the request would go on there, for its client to re-attach.
                self._abort_later(steps.record, entry.request_id, entry.ownership(attempt.number, self._stream_id))
        if not over.done():
            entry.handle(ended, time.monotonic())

    async def _read_steps(
        self, entry: RequestEntry, attempt: Attempt, steps: PrefillSteps, over: asyncio.Future[None]
    ) -> tuple[PrefillEnded, bool, bool]:
        """How the stream ended, whether the request has ended there, and whether the stream has just broken."""
        call: Any = steps.call

        def stop_reading(_: object) -> None:
            call.cancel()

        over.add_done_callback(stop_reading)
        self._watch.begin(steps)
        try:
            # Not `async for`: gRPC does not mix it with read(), by which the first event of Attach was read.
            while (response := await call.read()) is not aio.EOF:
                self._watch.heard(steps)
                if isinstance(response, prefill_pb2.AttachPrefillResponse):
                    response = response.progress
                for kind in _IN_ORDER:
                    if over.done():
                        return PrefillEnded(), False, False
                    if response.HasField(kind):
                        self._take(entry, attempt, kind, response)
            return PrefillEnded(), True, False
        except aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, RequestCancelled):
                error = Unavailable(f"prefill instance gave the request up: {error}")
            waits = (entry, attempt.number) in self._waiting
            if waits and isinstance(error, Unavailable) and error.retry_after_s is not None:
                # It drains, and has not begun the request: nothing is wrong with it.
                error = NoCapacity("prefill", error.retry_after_s, error.reason)
            has_ended_it = is_unsent(rpc_error) or not isinstance(error, Unavailable | DeadlineExceeded)
            is_broken = isinstance(error, Unavailable) and not is_unsent(rpc_error) and not is_answer(rpc_error)
            return PrefillEnded(error, was_reached=not is_unsent(rpc_error)), has_ended_it, is_broken
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the attempt is over, the instance is silent, or it has left.
            why = steps.fault or "it has left the cluster"
            error = Unavailable(f"prefill instance {steps.record.instance_id}: {why}")
            if steps.fault:
                self._watch.suspected(steps.record)
            has_reached = self._watch.has_reached(steps)
            return PrefillEnded(error, was_reached=has_reached), not has_reached, has_reached and bool(steps.fault)
        finally:
            self._watch.end(steps)
            call.cancel()

    def abort_everywhere(self, request_id: str, ownership: Ownership) -> None:
        """Ends the request at whatever prefill instance has it, up to that owner."""
        for status in self._store.view().instances.values():
            if Phase.PREFILL in phases_now(status):
                self._abort_later(status.record, request_id, ownership)

    def _abort_later(self, record: InstanceRecord, request_id: str, ownership: Ownership) -> None:
        errand = asyncio.create_task(self._abort(record, request_id, ownership))
        self._errands[errand] = None
        errand.add_done_callback(self._errands.pop)

    async def _abort(self, record: InstanceRecord, request_id: str, ownership: Ownership) -> None:
        message = prefill_pb2.AbortPrefillRequest(attempts=[ownership_to_proto(request_id, ownership)])
        with contextlib.suppress(aio.AioRpcError):
            await self._channels.stub(PrefillServiceStub, record.address).AbortPrefill(message, timeout=CALL_TIMEOUT_S)

    def _confirm(self, entry: RequestEntry, attempt: Attempt) -> None:
        self._waiting.remove(entry, attempt)
        self.unconfirmed.remove((entry.request_id, attempt.number), attempt.prefill.instance_id)
        self._has_begun()

    def _take(self, entry: RequestEntry, attempt: Attempt, kind: str, response: prefill_pb2.PrefillResponse) -> None:
        timing, now_s = entry.timing, time.monotonic()
        match kind:
            case "started":
                self._confirm(entry, attempt)
                timing.prefill_queue_s = response.started.queue_s
                entry.has_begun = True
                entry.wake()
            case "placed":
                placed = response.placed
                life = InstanceLife(placed.decode_instance_id, placed.decode_incarnation)
                if not _has_begun_elsewhere(entry.state, life):
                    entry.note_owner(attempt.prefill, life)
                entry.handle(DecodeNamed(life), now_s)
                entry.note_holder()
            case "prompt_logprobs":
                entry.take_prompt_logprobs(response.prompt_logprobs.first, response.prompt_logprobs.logprobs)
            case "first_token":
                first = response.first_token
                timing.prefill_s = first.prefill_s
                logprobs = (first.logprobs,) if first.HasField("logprobs") else ()
                entry.handle(
                    FirstTokenReported((first.token_id,), logprobs, finish_from_proto(first.finish_reason)), now_s
                )
            case "handed_over":
                timing.kv_bytes = response.handed_over.kv_bytes
                timing.kv_transfer_s = response.handed_over.kv_transfer_s
                timing.kv_tail_s = response.handed_over.kv_tail_s
                timing.kv_transport = response.handed_over.kv_transport
                entry.handle(HandOverReported(), now_s)


def _has_begun_elsewhere(state: State, named: InstanceLife) -> bool:
    """Whether tokens have come of another instance than prefill names, as when it did not hear that its push was
    accepted. A later session must not look for the request there."""
    return isinstance(state, Finishing) or (isinstance(state, Decoding) and state.decode != named)
