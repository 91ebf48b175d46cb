"""The requests in flight on this router, from before their input is checked until their clients' calls are over."""

import asyncio
import time
from collections.abc import Callable
from hmac import compare_digest
from typing import NamedTuple

from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestAlreadyExists
from kaveri.feeds.expiring import ExpiringMap
from kaveri.wire.attempts import wrong_secret
from services.router.request_account import OwnerChange
from services.router.requests import Interrupted, RequestEntry

SENT_AWAY_GRACE_S = 2.0
"""So long a request whose client was sent to another router is not aborted by this one, and one whose reader was
interrupted keeps its slot. Clients re-attach at once."""
RETRY_AFTER_S = 0.5
"""Told to clients that found the router full: about a short answer's time."""


class Slot:
    """One request of the table, from before its input is checked until its client's RPC is over."""

    def __init__(self, request_id: str, session: int, secret: bytes, task: asyncio.Task[object]) -> None:
        self.request_id = request_id
        self.session = session
        self.secret = secret
        self.entry: RequestEntry | None = None
        self.cancelled = False
        """Whether cancel() came before there was an entry, and has interrupted the task."""
        self.error: KaveriError | None = None
        """What fail() was given before there was an entry; it has interrupted the task."""
        self.owner_change: OwnerChange | None = None
        """That has begun in the former session, and goes on in this one."""
        self._task = task

    def cancel(self) -> None:
        """Ends the request with FINISH_REASON_CANCELLED, in whatever phase it is."""
        if self.entry is not None:
            self.entry.cancel()
        elif not self.interrupted:
            self.cancelled = True
            self._task.cancel()

    def fail(self, error: KaveriError) -> None:
        """Ends the request with an error, in whatever phase it is."""
        if self.entry is not None:
            self.entry.fail(error)
        elif not self.interrupted:
            self.error = error
            self._task.cancel()

    def supersede(self) -> None:
        """Ends this session for a later one of the same request."""
        if self.entry is not None:
            self.entry.supersede()
        else:
            self.fail(RequestAlreadyExists(self.request_id))

    @property
    def interrupted(self) -> bool:
        """Whether cancel() or fail() has cancelled the task."""
        return self.cancelled or self.error is not None


class KeptPlace(NamedTuple):
    """What the router keeps of an interrupted request for its next session."""

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
        """The requests that were sent away, whose instances are left alone for a while."""
        self._returning: ExpiringMap[str, KeptPlace] = ExpiringMap(SENT_AWAY_GRACE_S, max_count=max_requests)
        """Slots of interrupted requests, kept until their clients re-attach."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.get: Callable[[str], RequestEntry | None] = self._entries.get
        """The entry of a request id, or None."""

    def __len__(self) -> int:
        return len(self._slots)

    def slot_of(self, request_id: str) -> Slot | None:
        """The slot of a request in flight."""
        return self._slots.get(request_id)

    def reserve(self, request_id: str, session: int, secret: bytes, task: asyncio.Task[object]) -> Slot:
        """Takes a slot for the RPC that runs in `task`. A later session ends an earlier one, and takes its slot.

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
        """Fills a slot: tokens find the entry from now on, unless a later session has taken its slot."""
        slot.entry, entry.account.owner_change = entry, slot.owner_change
        if self._slots.get(slot.request_id) is slot:
            self._entries[slot.request_id] = entry
            if self._sends_away:
                self._send_away(entry)

    def release(self, slot: Slot) -> None:
        """Frees the slot, unless a later session has it."""
        if self._slots.get(slot.request_id) is slot:
            del self._slots[slot.request_id]
            self._entries.pop(slot.request_id, None)
            if slot.entry is not None and isinstance(slot.entry.error, Interrupted):
                kept = KeptPlace(slot.session, slot.secret, slot.entry.account.owner_change)
                self._returning.put(slot.request_id, kept, time.monotonic())
        if not self._slots:
            self._empty.set()

    def entries(self) -> tuple[RequestEntry, ...]:
        """Of all requests whose input was checked."""
        return tuple(self._entries.values())

    def send_away(self) -> None:
        """Ends every request whose client can re-attach, and leaves its instances to the router that the client finds
        next; also those whose input is checked now, as soon as it was. Until stay()."""
        self._sends_away = True
        for entry in self.entries():
            self._send_away(entry)

    def stay(self) -> None:
        """Requests stay here again."""
        self._sends_away = False

    def is_left_to_a_later_session(self, request_id: str, session: int) -> bool:
        """Return True if an instance that answers this session of the request must not be told to abort it.

        A later session is being checked here, or the client is looking for another router, as far as known.
        """
        slot = self._slots.get(request_id)
        if slot is not None and slot.session > session:
            return True
        return self._sent_away.get(request_id, time.monotonic()) is not None

    def _take_returned(self, request_id: str, session: int, secret: bytes) -> KeptPlace | None:
        """The place that the request has kept, if this is its next session."""
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
        """Ends every request with the error."""
        for slot in tuple(self._slots.values()):
            slot.fail(error)

    async def wait_until_empty(self) -> None:
        """Returns when no request is in flight."""
        await self._empty.wait()
