"""Finds the instances that have a request from an earlier session, and attaches it to this router.

Hints say where to look first: the one of the cluster store, then the client's. They name lives of instances, and only
lives in the view are asked. Without a hint that holds, all instances are asked: in batches, at most 256 of each phase,
and for a few requests at a time. Where a hint names the holder of a replica, and the owner does not answer, the holder
is to resume the request before others are asked.
"""

import asyncio
import contextlib
import enum
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from kaveri.cluster.store import ClusterStore
from kaveri.domain.attachment import Attached, Attachment
from kaveri.domain.running_clock import RunningClock
from kaveri.domain.view import InstanceRecord, Phase, phases_now
from kaveri.errors import KaveriError, RequestCancelled, RequestNotFound, Unavailable
from kaveri.rpc.channels import Channels
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import ATTACH_SOON_S, CALL_TIMEOUT_S, REOPEN_GRACE_S, TICK_S
from kaveri.v1 import prefill_pb2
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.attempts import attached_from_proto, attachment_to_proto
from kaveri.wire.status import error_of, is_connection_lost
from services.router.accepted_request import OwnerHint
from services.router.lifecycle_values import NO_LIFE, InstanceLife
from services.router.prefill_watch import PrefillSteps
from services.router.requests import RequestEntry
from services.router.token_feeds import TokenFeeds

_REOPEN_TIMEOUT_S = 0.5
_DYING_CONNECTIONS = 2
"""Calls to one instance in a row that may be sent on connections that have just broken."""
_ASKED_TOGETHER = 16
_MOST_ASKED = 256
"""Instances of a phase that are asked for a request of which no hint holds."""
_SEARCHES = 8
"""Requests that are looked for at all instances at a time; others wait."""


@dataclass(frozen=True, slots=True)
class Found:
    """Who has the request, and goes on for this router."""

    attached: Attached
    prefill: InstanceLife
    decode: InstanceLife | None
    """The decode instance, if the request is there already."""
    steps: PrefillSteps | None
    """What prefill reports, if the request is there."""


class _ConnectionLost(Unavailable):
    """The connection broke under a call."""


class Missing(enum.Enum):
    """Why a request was not found."""

    NOWHERE = enum.auto()
    """No instance that could be asked has it."""
    OWNER_LOST = enum.auto()
    """The hinted owner does not answer; the others were not asked."""


class TakeOver:
    """The search of one router. For one event loop."""

    def __init__(self, store: ClusterStore, channels: Channels, feeds: TokenFeeds, stream_id: str) -> None:
        self._store = store
        self._channels = channels
        self._feeds = feeds
        self._stream_id = stream_id
        self._searches = asyncio.Semaphore(_SEARCHES)

    async def find(self, entry: RequestEntry, number: int, can_resume: bool = False) -> Found | Missing:
        """Attaches the request as attempt `number`, where it is. can_resume: whether there is a holder that would go on
        in place of an owner that does not answer.

        Raises InvalidArgument, StaleAttempt and RequestAlreadyExists as the instance that has it.
        """
        hint = entry.accepted.received.owner
        prefills, decodes = self._records(Phase.PREFILL), self._records(Phase.DECODE)
        hinted_decodes = self._hinted(hint.decode, decodes)
        hinted_prefills = self._hinted(hint.prefill, prefills)
        # Where the KV has landed prefill has nothing more to say.
        outcomes = await self._ask_decodes(entry, number, hinted_decodes, hint)
        found = _first_of_owners(entry, hinted_decodes, Phase.DECODE, outcomes)
        owner_is_silent = all(isinstance(outcome, Unavailable) for outcome in outcomes)
        if can_resume and hint.decode is not None and owner_is_silent:
            return Missing.OWNER_LOST
        # What prefill keeps of a request whose owner is lost names that owner. Another one may have resumed it since.
        owner_is_lost = hint.decode is not None and owner_is_silent
        if not owner_is_lost:
            found = found or await self._at_prefill(entry, number, hinted_prefills)
        if found is not None:
            return found
        async with self._searches:
            for some in self._batches(decodes, hinted_decodes):
                outcomes = await self._ask_decodes(entry, number, some, OwnerHint())
                found = found or _first_of_owners(entry, some, Phase.DECODE, outcomes)
            if owner_is_lost:
                found = found or await self._at_prefill(entry, number, hinted_prefills)
            for some in self._batches(prefills, hinted_prefills):
                found = found or await self._at_prefill(entry, number, some)
            return found or Missing.NOWHERE

    async def reopen(self, entry: RequestEntry, number: int, broken: PrefillSteps) -> PrefillSteps | None:
        """Another stream of the reports of an attempt whose stream has broken; it repeats them. None: the instance does
        not answer, or does not have the request any more."""
        record, timeout_s = broken.record, REOPEN_GRACE_S if broken.fault else _REOPEN_TIMEOUT_S
        if not entry.accepted.secret:
            # The request has ended with its call.
            return None
        log = get_logger().bind(request_id=entry.request_id, attempt=number, prefill_instance_id=record.instance_id)
        try:
            attachment = entry.attachment(number, self._stream_id, same_owner=True)
            found = await self._attach_at_prefill(entry, attachment, record, timeout_s)
        except KaveriError as error:
            log.info("prefill_stream_lost", reason=str(error))
            return None
        log.info("prefill_stream_reopened")
        return found.steps

    def _records(self, phase: Phase) -> list[InstanceRecord]:
        instances = self._store.view().instances.values()
        return [status.record for status in instances if phase in phases_now(status)]

    def _hinted(self, life: InstanceLife | None, serving: list[InstanceRecord]) -> list[InstanceRecord]:
        """The life that a hint names, if it is there. One that was switched to the other phase still has what it keeps
        of the former one; a router without a token stream from there could not take it."""
        status = self._store.view().instances.get(life.instance_id) if life is not None else None
        if life is None or status is None or _life(status.record) != life:
            return []
        return [status.record] if status.record in serving or self._feeds.is_connected(life) else []

    def _batches(self, records: list[InstanceRecord], asked: list[InstanceRecord]) -> list[list[InstanceRecord]]:
        """Those that are asked without a hint, together. One that is silent would let all others wait."""
        silent = self._feeds.silent_ids
        left = [record for record in records if record not in asked and record.instance_id not in silent]
        left = left[:_MOST_ASKED]
        return [left[first : first + _ASKED_TOGETHER] for first in range(0, len(left), _ASKED_TOGETHER)]

    async def _ask_decodes(
        self, entry: RequestEntry, number: int, records: Iterable[InstanceRecord], hint: OwnerHint
    ) -> list[Found | BaseException]:
        attachment = entry.attachment(number, self._stream_id, landed=True)
        timeout_s = _timeout_s(entry)

        async def ask(record: InstanceRecord) -> Found:
            attached = await self._feeds.attach(record, attachment, timeout_s)
            return Found(attached, hint.prefill or NO_LIFE, _life(record), None)

        return await asyncio.gather(*map(ask, records), return_exceptions=True)

    async def _at_prefill(self, entry: RequestEntry, number: int, records: list[InstanceRecord]) -> Found | None:
        attachment = entry.attachment(number, self._stream_id)

        async def ask(record: InstanceRecord) -> Found:
            return await self._attach_at_prefill(entry, attachment, record, _timeout_s(entry))

        outcomes = await asyncio.gather(*map(ask, records), return_exceptions=True)
        return _first_of_owners(entry, records, Phase.PREFILL, outcomes)

    async def _attach_at_prefill(
        self, entry: RequestEntry, attachment: Attachment, record: InstanceRecord, timeout_s: float
    ) -> Found:
        for _ in range(_DYING_CONNECTIONS):
            # gRPC sends calls on a connection that has just broken until it notices. A later one finds another.
            with contextlib.suppress(_ConnectionLost):
                return await self._try_attach_at_prefill(entry, attachment, record, timeout_s)
        return await self._try_attach_at_prefill(entry, attachment, record, timeout_s)

    async def _try_attach_at_prefill(
        self, entry: RequestEntry, attachment: Attachment, record: InstanceRecord, timeout_s: float
    ) -> Found:
        call = self._channels.stub(PrefillServiceStub, record.address).AttachPrefill(
            prefill_pb2.AttachPrefillRequest(attach=attachment_to_proto(attachment)),
            timeout=entry.accepted.deadline_s - time.monotonic(),
        )
        try:
            first = await _within(call.read(), timeout_s)
        except aio.AioRpcError as rpc_error:
            if is_connection_lost(rpc_error):
                raise _ConnectionLost(str(error_of(rpc_error))) from rpc_error
            error = error_of(rpc_error)
            raise Unavailable(str(error)) if isinstance(error, RequestCancelled) else error from rpc_error
        except TimeoutError as error:
            call.cancel()
            raise Unavailable(f"prefill instance {record.instance_id} does not answer") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled: the channel was closed.
            raise Unavailable(f"prefill instance {record.instance_id} has left the cluster") from None
        if not isinstance(first, prefill_pb2.AttachPrefillResponse) or not first.progress.HasField("attached"):
            call.cancel()
            raise Unavailable(f"prefill instance {record.instance_id} ended its stream")
        steps = PrefillSteps(call, record)
        return Found(attached_from_proto(first.progress.attached), _life(record), None, steps)


async def _within(reading: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """What is read. Raises TimeoutError after so long, counted while this process runs."""
    clock = RunningClock(time.monotonic(), 2 * TICK_S)
    task = asyncio.ensure_future(reading)
    try:
        while not task.done():
            if clock.elapsed_s >= limit_s:
                raise TimeoutError
            await asyncio.wait((task,), timeout=TICK_S)
            clock.tick(time.monotonic())
        return task.result()
    finally:
        task.cancel()


def _timeout_s(entry: RequestEntry) -> float:
    return CALL_TIMEOUT_S if entry.accepted.received.owner.holder is None else ATTACH_SOON_S


def _first_of_owners(
    entry: RequestEntry, records: list[InstanceRecord], phase: Phase, outcomes: list[Found | BaseException]
) -> Found | None:
    """_first(), without what former owners refuse."""
    received = entry.accepted.received
    asked = zip(records, outcomes, strict=True)
    return _first(
        entry,
        [
            outcome
            for record, outcome in asked
            if isinstance(outcome, Found) or not received.excuses(outcome, _life(record), phase)
        ],
    )


def _first(entry: RequestEntry, outcomes: list[Found | BaseException]) -> Found | None:
    """The first that was found. Raises the first refusal of an instance that has the request."""
    for outcome in outcomes:
        if isinstance(outcome, Found):
            return outcome
    for outcome in outcomes:
        match outcome:
            case RequestNotFound() | Unavailable():
                get_logger().debug("attach_refused", request_id=entry.request_id, reason=str(outcome))
            case BaseException():
                raise outcome
    return None


def _life(record: InstanceRecord) -> InstanceLife:
    return InstanceLife(record.instance_id, record.incarnation)
