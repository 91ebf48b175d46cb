"""The holders of replicas: whether one is to resume a request, and the attempt that it then makes."""

import asyncio
import time
from typing import Any

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.replica import ReplicaLocation, Resumed, Resumption
from kaveri.errors import DeadlineExceeded, KaveriError, NoCapacity, RequestCancelled, RequestNotFound, Unavailable
from kaveri.policy.replication import is_worth_a_resume
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.wire.replicas import resumed_from_proto, resumption_to_proto
from kaveri.wire.status import error_of, is_answer
from services.router import metrics
from services.router.lifecycle_values import (
    NO_LIFE,
    Attempt,
    Decoding,
    InstanceLife,
    Lost,
    Placed,
    ResumeAccepted,
    ResumeAsked,
    ResumeRefused,
    Resuming,
    Unplaced,
)
from services.router.requests import RequestEntry


class Holders:
    """Of one router."""

    def __init__(self, store: ClusterStore, channels: Channels, stream_id: str, model: str) -> None:
        """stream_id: the router_id of the decode protocol."""
        self._store = store
        self._channels = channels
        self._stream_id = stream_id
        self._model = model

    def replica_of(self, entry: RequestEntry) -> ReplicaLocation | None:
        """The replica from which the request should be resumed when its present instance is lost, if there is one."""
        context_tokens = len(entry.accepted.prompt_token_ids) + len(entry.answer.token_ids)
        match entry.state:
            case Placed() | Decoding() | Lost():
                replica = entry.state.replica
            case Unplaced() if (holder := entry.accepted.received.owner.holder) is not None:
                # A hint does not say how much it has.
                replica = ReplicaLocation(*holder, context_tokens)
            case _:
                return None
        if replica is None or not is_worth_a_resume(replica, context_tokens, self._store.view(), self._model):
            return None
        return replica

    def does_not_wait(self, entry: RequestEntry) -> bool:
        """Whether a request whose instance has gone silent, or cannot be reached, is to leave it at once: another one
        has a replica, or the instance was only asked to resume it."""
        return isinstance(entry.state, Resuming) or self.replica_of(entry) is not None

    async def resume(self, entry: RequestEntry, number: int, replica: ReplicaLocation) -> None:
        """Runs attempt `number` at the holder until it is over, or the holder has refused it.

        replica: as replica_of() returned it just now."""
        holder = InstanceLife(replica.holder_id, replica.holder_incarnation)
        if entry.owner_change is None:
            entry.note_loss("it was lost with the request's router", entry.accepted.received.owner.decode or NO_LIFE)
        first_index = len(entry.answer.token_ids)
        attempt = Attempt(number, NO_LIFE, first_index, entry.accepted.most_tokens, suspect_until=entry.suspect_until)
        over = entry.begin(ResumeAsked(attempt, holder))
        if over.done():
            return
        call = self._ask(entry, number, replica)

        def stop_waiting(_: object) -> None:
            call.cancel()

        over.add_done_callback(stop_waiting)
        answer: Resumed | ResumeRefused
        try:
            answer = resumed_from_proto(await call)
        except aio.AioRpcError as rpc_error:
            answer = _refusal(rpc_error, holder.instance_id)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the attempt is over, or the channel was closed.
            gone = Unavailable(f"decode instance {holder.instance_id} has left the cluster")
            answer = ResumeRefused(gone, may_have_begun=True)
        finally:
            call.cancel()
        if not over.done():
            _take(entry, holder, first_index, answer)
        await over

    def _ask(self, entry: RequestEntry, number: int, replica: ReplicaLocation) -> "aio.UnaryUnaryCall[Any, Any]":
        left_s = entry.accepted.deadline_s - time.monotonic()
        context_tokens = len(entry.accepted.prompt_token_ids) + len(entry.answer.token_ids)
        resumption = Resumption(
            request_id=entry.request_id,
            ownership=entry.ownership(number, self._stream_id),
            token_ids=(*entry.accepted.prompt_token_ids, *entry.answer.token_ids),
            generated_count=len(entry.answer.token_ids),
            params=entry.accepted.params,
            timeout_s=left_s,
            predicted_length=None,
            holder_incarnation=replica.holder_incarnation,
            # That many is what stands for a hint.
            replica_tokens=replica.token_count if replica.token_count < context_tokens else 0,
            traceparent=entry.traceparent,
            suspect_until=entry.suspect_until,
        )
        address = self._store.view().instances[replica.holder_id].record.address
        stub = self._channels.stub(DecodeServiceStub, address)
        call: aio.UnaryUnaryCall[Any, Any] = stub.Resume(
            resumption_to_proto(resumption), timeout=min(CALL_TIMEOUT_S, left_s)
        )
        return call


def _take(entry: RequestEntry, holder: InstanceLife, first_index: int, answer: Resumed | ResumeRefused) -> None:
    """Takes in the holder's answer."""
    if isinstance(answer, Resumed) and answer.incarnation != holder.incarnation:
        restarted = Unavailable(f"decode instance {holder.instance_id} has restarted")
        answer = ResumeRefused(restarted, may_have_begun=False)
    if isinstance(answer, ResumeRefused):
        outcome = _outcome_of(answer.error)
        metrics.RESUMES.labels(outcome=outcome).inc()
        get_logger().info(
            "resume_refused",
            request_id=entry.request_id,
            attempt=entry.attempt_number,
            decode_instance_id=holder.instance_id,
            outcome=outcome,
            error=str(answer.error),
        )
        entry.handle(answer, time.monotonic())
        return
    metrics.RESUMES.labels(outcome="resumed").inc()
    entry.note_resumed(holder, first_index, answer.held_tokens)
    entry.handle(ResumeAccepted(), time.monotonic())


def _refusal(rpc_error: aio.AioRpcError, holder_id: str) -> ResumeRefused:
    error = error_of(rpc_error)
    if isinstance(error, DeadlineExceeded | RequestCancelled):
        error = Unavailable(f"decode instance {holder_id} does not answer")
    return ResumeRefused(error, may_have_begun=not is_answer(rpc_error))


def _outcome_of(error: KaveriError) -> str:
    """How the metric names a refusal."""
    match error:
        case RequestNotFound():
            return "not_found"
        case NoCapacity():
            return "no_room"
        case Unavailable():
            return "unavailable"
        case _:
            return "refused"
