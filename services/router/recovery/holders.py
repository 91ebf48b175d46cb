"""Resumes requests that lost their decode instance, at instances that hold replicas of their KV cache."""

import asyncio
import time
from typing import Any

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.replica import ReplicaLocation, Resumption
from kaveri.errors import DeadlineExceeded, NoCapacity, RequestCancelled, RequestNotFound, Unavailable
from kaveri.lives import request_values as lives
from kaveri.lives.request_values import NO_LIFE, holder_of
from kaveri.policy.replication import is_worth_a_resume
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.wire.replicas import resumed_from_proto, resumption_to_proto
from kaveri.wire.status import error_of, is_answer
from services.router import metrics
from services.router.requests import RequestEntry

_REFUSALS = ((RequestNotFound, "not_found"), (NoCapacity, "no_room"), (Unavailable, "unavailable"))


class Holders:
    """Resumes requests at the holders of their replicas: instances that keep a copy of the request's KV cache."""

    def __init__(self, store: ClusterStore, channels: Channels, stream_id: str, model: str) -> None:
        """stream_id: this router's id in the decode protocol."""
        self._store = store
        self._channels = channels
        self._stream_id = stream_id
        self._model = model

    def replica_of(self, entry: RequestEntry) -> ReplicaLocation | None:
        """The replica (copy of its KV cache) to resume the request from after a loss; None if none is worth it."""
        context_tokens = entry.context_tokens
        match entry.state:
            case lives.Placed() | lives.Decoding() | lives.Lost():
                replica = entry.state.replica
            case lives.Unplaced() if (holder := entry.accepted.received.owner.holder) is not None:
                # A hint does not name the replica's size.
                replica = ReplicaLocation(*holder, context_tokens)
            case _:
                return None
        if replica is None or not is_worth_a_resume(replica, context_tokens, self._store.view(), self._model):
            return None
        return replica

    def does_not_wait(self, entry: RequestEntry) -> bool:
        """True if a request need not wait for an unreachable instance: a replica exists, or it only resumes there."""
        return isinstance(entry.state, lives.Resuming) or self.replica_of(entry) is not None

    async def resume(self, entry: RequestEntry, number: int, replica: ReplicaLocation) -> None:
        """Resume the request at its replica's holder as attempt (placement) `number`, until that is over or refused.

        replica: a fresh result of replica_of()."""
        holder = holder_of(replica)
        if entry.account.owner_change is None:
            entry.note_loss("it was lost with the request's router", entry.accepted.received.owner.decode or NO_LIFE)
        attempt = entry.attempt_at(number)
        over = entry.begin(lives.ResumeRequested(attempt, holder))
        if over.done():
            return
        call = self._ask(entry, number, replica)
        over.add_done_callback(lambda _: call.cancel())
        held_tokens, answered = 0, lives.ResumeAnswered()
        try:
            resumed = resumed_from_proto(await call)
            held_tokens = resumed.held_tokens
            if resumed.incarnation != holder.incarnation:
                answered = lives.ResumeAnswered(Unavailable(f"decode instance {holder.instance_id} has restarted"))
        except aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, DeadlineExceeded | RequestCancelled):
                error = Unavailable(f"decode instance {holder.instance_id} does not answer")
            answered = lives.ResumeAnswered(error, may_have_begun=not is_answer(rpc_error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the attempt is over, or the channel was closed.
            gone = Unavailable(f"decode instance {holder.instance_id} has left the cluster")
            answered = lives.ResumeAnswered(gone, may_have_begun=True)
        finally:
            call.cancel()
        if not over.done():
            refusal = answered.error
            refused = next((outcome for kind, outcome in _REFUSALS if isinstance(refusal, kind)), "refused")
            outcome = "resumed" if refusal is None else refused
            metrics.RESUMES.labels(outcome=outcome).inc()
            if refusal is None:
                entry.note_resumed(holder, attempt.first_index, held_tokens)
            else:
                get_logger().info(
                    "resume_refused",
                    request_id=entry.request_id,
                    attempt=entry.attempt_number,
                    decode_instance_id=holder.instance_id,
                    outcome=outcome,
                    error=str(refusal),
                )
            entry.handle(answered, time.monotonic())
        await over

    def _ask(self, entry: RequestEntry, number: int, replica: ReplicaLocation) -> "aio.UnaryUnaryCall[Any, Any]":
        left_s = entry.accepted.deadline_s - time.monotonic()
        resumption = Resumption(
            request_id=entry.request_id,
            ownership=entry.ownership(number, self._stream_id),
            token_ids=(*entry.accepted.prompt_token_ids, *entry.answer.token_ids),
            generated_count=len(entry.answer.token_ids),
            params=entry.accepted.params,
            timeout_s=left_s,
            predicted_length=None,
            holder_incarnation=replica.holder_incarnation,
            # From a hint, the size is unknown.
            replica_tokens=replica.token_count if replica.token_count < entry.context_tokens else 0,
            traceparent=entry.account.traceparent,
            suspect_until=entry.suspect_until,
        )
        address = self._store.view().instances[replica.holder_id].record.address
        stub = self._channels.stub(DecodeServiceStub, address)
        call: aio.UnaryUnaryCall[Any, Any] = stub.Resume(
            resumption_to_proto(resumption), timeout=min(CALL_TIMEOUT_S, left_s)
        )
        return call
