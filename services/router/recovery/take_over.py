"""Finds requests of earlier sessions at their instances, and has them continue for this router."""

import asyncio
import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kaveri.cluster.store import ClusterStore
from kaveri.domain.attachment import Attached
from kaveri.domain.view import InstanceRecord, Phase, phases_now
from kaveri.errors import RequestNotFound, Unavailable
from kaveri.lives.request_values import NO_LIFE, InstanceLife
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import ATTACH_SOON_S, CALL_TIMEOUT_S
from services.router import metrics
from services.router.accepted_request import OwnerHint
from services.router.requests import RequestEntry
from services.router.subscriptions import PromptTie
from services.router.token_feeds import TokenFeeds

_ATTACH_AGAIN_S = 0.05
"""Seconds before a prefill instance without an open stream is asked again for its reports."""
_ASKED_TOGETHER = 16
_MOST_ASKED = 256
"""Max instances per phase that are asked without a hint."""
_SEARCHES = 8
"""Max requests that are searched at all instances at a time."""


@dataclass(frozen=True, slots=True)
class Found:
    """An instance that has the request of a re-attached client, and now continues it for this router."""

    attached: Attached
    prefill: InstanceLife
    decode: InstanceLife | None
    """The decode instance, if it has the request already."""
    tie: PromptTie | None
    """Receives prefill's reports; set if a prefill instance has the request."""


class Missing(enum.Enum):
    """Outcome of an unsuccessful search for the instances that have a re-attached request."""

    NOWHERE = enum.auto()
    """No instance asked has it."""
    OWNER_LOST = enum.auto()
    """The instance that the hint names does not answer; others were not asked."""


class TakeOver:
    """Finds the instances that have the request of a re-attached client, and makes them continue it for this router.

    Asks the instances of a hint first: the cluster store's, or else the client's. If they have restarted or do not have
    the request, up to 256 others per phase are asked, in small batches and for few requests at a time. If the decode
    instance of the hint does not answer, the holder of its replica, if named, resumes the request before that."""

    def __init__(self, store: ClusterStore, feeds: TokenFeeds, stream_id: str) -> None:
        self._store = store
        self._feeds = feeds
        self._stream_id = stream_id
        self._searches = asyncio.Semaphore(_SEARCHES)

    async def find(self, entry: RequestEntry, number: int, can_resume: bool = False) -> Found | Missing:
        """Find the instance with the request, which then sends its tokens to this router as attempt `number`.
        can_resume: True if a replica's holder can replace an instance that does not answer.

        Raises InvalidArgument, StaleAttempt or RequestAlreadyExists if the instance with the request refuses so."""
        hint = entry.accepted.received.owner
        prefills, decodes = self._records(Phase.PREFILL), self._records(Phase.DECODE)
        hinted_decodes = self._hinted(hint.decode, decodes)
        hinted_prefills = self._hinted(hint.prefill, prefills)
        # Decode first: once the KV has landed, prefill has nothing to report.
        outcomes = await self._ask_decodes(entry, number, hinted_decodes, hint)
        found = _first_of_owners(entry, hinted_decodes, Phase.DECODE, outcomes)
        owner_is_silent = all(isinstance(outcome, Unavailable) for outcome in outcomes)
        if can_resume and hint.decode is not None and owner_is_silent:
            return Missing.OWNER_LOST
        # A prefill instance names the lost owner again, but another instance may have resumed the request since.
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

    def _records(self, phase: Phase) -> list[InstanceRecord]:
        instances = self._store.view().instances.values()
        return [status.record for status in instances if phase in phases_now(status)]

    def _hinted(self, life: InstanceLife | None, serving: list[InstanceRecord]) -> list[InstanceRecord]:
        """Record of the hinted instance, in a list, if the view has it. After a switch to the other phase it still has
        requests of the former one, but is of use only with a stream."""
        status = self._store.view().instances.get(life.instance_id) if life is not None else None
        if life is None or status is None or _life_of(status.record) != life:
            return []
        return [status.record] if status.record in serving or self._feeds.is_connected(life) else []

    def _batches(self, records: list[InstanceRecord], asked: list[InstanceRecord]) -> list[list[InstanceRecord]]:
        """Batches of instances to ask without a hint; no silent ones, which would delay the others."""
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
            return Found(attached, hint.prefill or NO_LIFE, _life_of(record), None)

        return await asyncio.gather(*map(ask, records), return_exceptions=True)

    async def _at_prefill(self, entry: RequestEntry, number: int, records: list[InstanceRecord]) -> Found | None:
        attachment = entry.attachment(number, self._stream_id, at_prefill=True)
        ties: list[PromptTie] = []

        async def ask(record: InstanceRecord) -> Found:
            # Reports may come before the answer.
            tie = self._feeds.expect_reports(entry, number, record)
            ties.append(tie)
            until_s = time.monotonic() + CALL_TIMEOUT_S
            try:
                while True:
                    has_stream, sent_s = self._feeds.is_connected(tie.life), time.monotonic()
                    attached = await self._feeds.attach(record, attachment, _timeout_s(entry))
                    tie.is_there = True
                    if (has_stream and not self._feeds.may_lack_reports(tie, sent_s)) or sent_s >= until_s:
                        return Found(attached, tie.life, None, tie)
                    # The reports may have gone over a former stream, and the next may be open without this request.
                    await asyncio.sleep(_ATTACH_AGAIN_S)
            except BaseException:
                # At once: an idle instance that has answered sends nothing, and would be suspected.
                self._feeds.drop(tie)
                raise

        found = None
        try:
            outcomes = await asyncio.gather(*map(ask, records), return_exceptions=True)
            found = _first_of_owners(entry, records, Phase.PREFILL, outcomes)
        finally:
            for tie in ties:
                if found is None or tie is not found.tie:
                    self._feeds.drop(tie)
        return found


def _life_of(record: InstanceRecord) -> InstanceLife:
    return InstanceLife(record.instance_id, record.incarnation)


def _timeout_s(entry: RequestEntry) -> float:
    return CALL_TIMEOUT_S if entry.accepted.received.owner.holder is None else ATTACH_SOON_S


def _first_of_owners(
    entry: RequestEntry, records: list[InstanceRecord], phase: Phase, outcomes: list[Found | BaseException]
) -> Found | None:
    """Return the first Found, if any. Raises an instance's refusal, unless it is that of a former owner."""
    if found := next((outcome for outcome in outcomes if isinstance(outcome, Found)), None):
        return found
    for record, outcome in zip(records, outcomes, strict=True):
        match outcome:
            case RequestNotFound() | Unavailable():
                get_logger().debug("attach_refused", request_id=entry.request_id, reason=str(outcome))
            case BaseException() if not entry.accepted.received.excuses(outcome, _life_of(record), phase):
                raise outcome
    return None


def note_search(entry: RequestEntry, found: Found | Missing) -> None:
    match found:
        case Found(_, prefill, decode):
            outcome = "taken_over"
        case Missing.OWNER_LOST:
            outcome, prefill, decode = "owner_lost", NO_LIFE, None
        case Missing.NOWHERE:
            outcome, prefill, decode = "placed_again", NO_LIFE, None
    metrics.REATTACHES.labels(outcome=outcome).inc()
    get_logger().info(
        "request_reattached",
        request_id=entry.request_id,
        session=entry.accepted.session,
        received_tokens=len(entry.answer.token_ids),
        outcome=outcome,
        prefill_instance_id=prefill.instance_id,
        decode_instance_id="" if decode is None else decode.instance_id,
    )
