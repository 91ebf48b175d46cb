"""Finds the instances that have a request from an earlier session, and attaches it to this router.

Hints say where to look first: the one of the cluster store, then the client's. They name lives of instances, and only
lives in the view are asked. Without a hint that holds, all instances are asked: in batches, at most 256 of each phase,
and for a few requests at a time. Where a hint names the holder of a replica, and the owner does not answer, the holder
is to resume the request before others are asked.
"""

import asyncio
import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kaveri.cluster.store import ClusterStore
from kaveri.domain.attachment import Attached
from kaveri.domain.view import InstanceRecord, Phase, phases_now
from kaveri.errors import RequestNotFound, Unavailable
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import ATTACH_SOON_S, CALL_TIMEOUT_S
from services.router.accepted_request import OwnerHint
from services.router.lifecycle_values import NO_LIFE, InstanceLife
from services.router.requests import RequestEntry
from services.router.subscriptions import PromptTie
from services.router.token_feeds import TokenFeeds

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
    tie: PromptTie | None
    """Through which prefill reports, if the request is there."""


class Missing(enum.Enum):
    """Why a request was not found."""

    NOWHERE = enum.auto()
    """No instance that could be asked has it."""
    OWNER_LOST = enum.auto()
    """The hinted owner does not answer; the others were not asked."""


class TakeOver:
    """The search of one router. For one event loop."""

    def __init__(self, store: ClusterStore, feeds: TokenFeeds, stream_id: str) -> None:
        self._store = store
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
        attachment = entry.attachment(number, self._stream_id, at_prefill=True)

        async def ask(record: InstanceRecord) -> Found:
            # Reports may come before the answer.
            tie = self._feeds.expect_reports(entry, number, record)
            try:
                attached = await self._feeds.attach(record, attachment, _timeout_s(entry))
            except BaseException:
                self._feeds.drop(tie)
                raise
            tie.is_there = True
            return Found(attached, _life(record), None, tie)

        outcomes = await asyncio.gather(*map(ask, records), return_exceptions=True)
        found = None
        try:
            found = _first_of_owners(entry, records, Phase.PREFILL, outcomes)
        finally:
            for outcome in outcomes:
                if isinstance(outcome, Found) and outcome is not found and outcome.tie is not None:
                    self._feeds.drop(outcome.tie)
        return found


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
