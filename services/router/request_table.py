"""The requests in flight on a router, from before their input is checked until the end of their calls."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import NamedTuple

from kaveri.domain.sampling import FinishReason
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestAlreadyExists
from kaveri.feeds.expiring import ExpiringMap
from kaveri.wire.attempts import wrong_secret
from services.router.request_account import OwnerChange
from services.router.requests import Interrupted, RequestEntry

SENT_AWAY_GRACE_S = 2.0
"""How long a request whose client was sent to another router is not aborted by this one, and one whose reader was
interrupted keeps its slot. Clients re-attach at once."""
RETRY_AFTER_S = 0.5
"""Retry delay for clients when the router is full: about a short answer's time."""


@dataclass(eq=False, slots=True)
class Slot:
    """The place of one session of a request in the table."""

    request_id: str
    session: int
    secret: bytes
    task: asyncio.Task[object]
    """Runs the session's RPC."""
    entry: RequestEntry | None = None
    interruption: FinishReason | KaveriError | None = None
    """Outcome for which stop() has cancelled the task, before there was an entry."""
    owner_change: OwnerChange | None = None
    """An unfinished one of the former session."""

    def stop(self, outcome: FinishReason | KaveriError) -> None:
        """End the request, in whatever phase it is."""
        if self.entry is not None:
            self.entry.stop(outcome)
        elif self.interruption is None:
            self.interruption = outcome
            self.task.cancel()

    def supersede(self) -> None:
        """End this session for a later one of the same request."""
        if self.entry is not None:
            self.entry.supersede()
        else:
            self.stop(RequestAlreadyExists(self.request_id))


class KeptPlace(NamedTuple):
    """The place of an interrupted request, kept for its next session."""

    session: int
    secret: bytes
    owner_change: OwnerChange | None


class RequestTable:
    """The requests in flight by request id; at most `max_requests` of them."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._slots: dict[str, Slot] = {}
        self._entries: dict[str, RequestEntry] = {}
        self._sends_away = False
        self._sent_away: ExpiringMap[str, bool] = ExpiringMap(SENT_AWAY_GRACE_S, max_count=max_requests)
        """Requests that were sent away, and are not aborted meanwhile."""
        self._returning: ExpiringMap[str, KeptPlace] = ExpiringMap(SENT_AWAY_GRACE_S, max_count=max_requests)
        """Places of interrupted requests, kept until their clients re-attach."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.slot_of: Callable[[str], Slot | None] = self._slots.get
        """The slot of a request id, or None."""
        self.get: Callable[[str], RequestEntry | None] = self._entries.get
        """The entry of a request id, or None."""

    def __len__(self) -> int:
        return len(self._slots)

    def reserve(self, request_id: str, session: int, secret: bytes, task: asyncio.Task[object]) -> Slot:
        """Take a slot for the RPC that runs in `task`. A later session ends an earlier one, and takes its slot.

        Raises RequestAlreadyExists, NoCapacity, and InvalidArgument (another secret, or a session that does not grow).
        """
        former = self._slots.get(request_id)
        self._returning.prune(time.monotonic())
        returned = self._take_returned(request_id, session, secret) if session else None
        if former is not None:
            if not session:
                raise RequestAlreadyExists(request_id)
            if not former.secret or not compare_digest(former.secret, secret):
                raise wrong_secret()
            if session <= former.session:
                raise InvalidArgument("session", session, f"above {former.session}, the present one")
            former.supersede()
        elif returned is None and len(self._slots) + len(self._returning) >= self._max_requests:
            raise NoCapacity("router", RETRY_AFTER_S, f"{self._max_requests} requests are in flight")
        slot = self._slots[request_id] = Slot(request_id, session, secret, task)
        if former is not None and former.entry is not None:
            slot.owner_change, former.entry.account.owner_change = former.entry.account.owner_change, None
        elif returned is not None:
            slot.owner_change = returned.owner_change
        self._entries.pop(request_id, None)
        self._empty.clear()
        return slot

    def enter(self, slot: Slot, entry: RequestEntry) -> None:
        """Fill a slot. From now on get() finds the entry, unless a later session has taken the slot."""
        slot.entry, entry.account.owner_change = entry, slot.owner_change
        if self._slots.get(slot.request_id) is slot:
            self._entries[slot.request_id] = entry
            if self._sends_away:
                self._send_away(entry)

    def release(self, slot: Slot) -> None:
        """Free the slot, unless a later session has it."""
        if self._slots.get(slot.request_id) is slot:
            del self._slots[slot.request_id]
            self._entries.pop(slot.request_id, None)
            if slot.entry is not None and isinstance(slot.entry.error, Interrupted):
                kept = KeptPlace(slot.session, slot.secret, slot.entry.account.owner_change)
                self._returning.put(slot.request_id, kept, time.monotonic())
        if not self._slots:
            self._empty.set()

    def entries(self) -> tuple[RequestEntry, ...]:
        """Entries of all requests whose input was checked."""
        return tuple(self._entries.values())

    def send_away(self) -> None:
        """Until stay(), end every request whose client can re-attach, and leave its instances to the client's next
        router. Requests whose input is being checked follow once it was."""
        self._sends_away = True
        for entry in self.entries():
            self._send_away(entry)

    def stay(self) -> None:
        """Undo send_away() for the requests that follow."""
        self._sends_away = False

    def is_left_to_a_later_session(self, request_id: str, session: int) -> bool:
        """True if instances must not abort this session: a later one is being checked here, or the client looks for
        another router."""
        slot = self._slots.get(request_id)
        if slot is not None and slot.session > session:
            return True
        return self._sent_away.get(request_id, time.monotonic()) is not None

    def _take_returned(self, request_id: str, session: int, secret: bytes) -> KeptPlace | None:
        """Take the place that was kept for this session, if any."""
        kept = self._returning.get(request_id, time.monotonic())
        if kept is None or session <= kept.session or not compare_digest(kept.secret, secret):
            return None
        self._returning.pop(request_id)
        return kept

    def _send_away(self, entry: RequestEntry) -> None:
        entry.send_away()
        if entry.is_sent_away:
            self._sent_away.put(entry.request_id, True, time.monotonic())

    def fail_all(self, error: KaveriError) -> None:
        """End every request with an error."""
        for slot in tuple(self._slots.values()):
            slot.stop(error)

    async def wait_until_empty(self) -> None:
        """Wait until no request is in flight."""
        await self._empty.wait()
