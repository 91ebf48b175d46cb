"""Requests in flight on a router, and what is kept of the last ones: accounts, and the workload."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import NamedTuple

from kaveri.domain.sampling import FinishReason
from kaveri.errors import InvalidArgument, KaveriError, NoCapacity, RequestAlreadyExists, RequestNotFound
from kaveri.feeds.expiring import ExpiringMap
from kaveri.lives.request_values import Ended
from kaveri.v1 import cluster_pb2
from kaveri.wire.attempts import is_made_from, wrong_secret
from services.router.request_account import OwnerChange
from services.router.requests import Interrupted, RequestEntry, SentAway

SENT_AWAY_GRACE_S = 2.0
"""Seconds for which instances are not told to abort a request whose client was sent to another router, and for which an
interrupted request keeps its slot. Clients re-attach at once."""
RETRY_AFTER_S = 0.5
"""Retry delay for clients when the router is full, in seconds: about a short answer's time."""
_MOST_ENDED = 1024
_MOST_OUTCOME_CHARACTERS = 500
_MOST_ARRIVALS = 4096
"""Max recorded arrivals: 40 s of 100 requests per second."""
_MOST_ENDS = 4096
"""Max recorded ends; with the arrivals, less than a MiB."""


@dataclass(eq=False, slots=True)
class Slot:
    """Place of one session of a request in a RequestTable, from before its input is validated."""

    request_id: str
    session: int
    secret: bytes
    task: asyncio.Task[object]
    """Runs the session's RPC."""
    entry: RequestEntry | None = None
    interruption: FinishReason | KaveriError | None = None
    """Outcome with which stop() has cancelled the task, before there was an entry."""
    owner_change: OwnerChange | None = None
    """Unfinished OwnerChange of the request's former session."""

    def stop(self, outcome: FinishReason | KaveriError) -> None:
        """End the request with this outcome: through its entry or, before there is one, by cancelling the RPC."""
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
    """Slot reserved for the next session of a request whose client lost its decode instance and re-attaches."""

    session: int
    secret: bytes
    owner_change: OwnerChange | None


class RequestTable:
    """Requests in flight on a router by id, at most `max_requests` of them."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._slots: dict[str, Slot] = {}
        self._entries: dict[str, RequestEntry] = {}
        self._sends_away = False
        self._sent_away: ExpiringMap[str, bool] = ExpiringMap(SENT_AWAY_GRACE_S, max_count=max_requests)
        """Requests whose clients were sent to other routers, and which are not aborted meanwhile."""
        self._returning: ExpiringMap[str, KeptPlace] = ExpiringMap(SENT_AWAY_GRACE_S, max_count=max_requests)
        """Slots of interrupted requests, kept until their clients re-attach."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.slot_of: Callable[[str], Slot | None] = self._slots.get
        self.get: Callable[[str], RequestEntry | None] = self._entries.get

    def __len__(self) -> int:
        return len(self._slots)

    def reserve(self, request_id: str, session: int, secret: bytes, task: asyncio.Task[object]) -> Slot:
        """Reserve a slot for the RPC that runs in `task`. A later session ends the earlier one and takes its slot.
        Raises RequestAlreadyExists, NoCapacity, and InvalidArgument for an earlier session or another secret."""
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
        """Put a validated request into its slot, so that get() finds it, unless a later session has taken the slot."""
        slot.entry, entry.account.owner_change = entry, slot.owner_change
        if self._slots.get(slot.request_id) is slot:
            self._entries[slot.request_id] = entry
            if self._sends_away:
                self._send_away(entry)

    def release(self, slot: Slot) -> None:
        """Free the slot, unless a later session has taken it."""
        if self._slots.get(slot.request_id) is slot:
            del self._slots[slot.request_id]
            self._entries.pop(slot.request_id, None)
            if slot.entry is not None and isinstance(slot.entry.error, Interrupted):
                kept = KeptPlace(slot.session, slot.secret, slot.entry.account.owner_change)
                self._returning.put(slot.request_id, kept, time.monotonic())
        if not self._slots:
            self._empty.set()

    def entries(self) -> tuple[RequestEntry, ...]:
        """Entries of all requests in flight whose input was validated."""
        return tuple(self._entries.values())

    def send_away(self) -> None:
        """Until stay(), end every session whose client can re-attach at another router; its instances continue.
        Requests that are still being validated follow."""
        self._sends_away = True
        for entry in self.entries():
            self._send_away(entry)

    def stay(self) -> None:
        """Undo send_away() for later requests."""
        self._sends_away = False

    def is_left_to_a_later_session(self, request_id: str, session: int) -> bool:
        """True if instances must not abort this session: a later one is validated here, or its client was sent away."""
        slot = self._slots.get(request_id)
        if slot is not None and slot.session > session:
            return True
        return self._sent_away.get(request_id, time.monotonic()) is not None

    def _take_returned(self, request_id: str, session: int, secret: bytes) -> KeptPlace | None:
        kept = self._returning.get(request_id, time.monotonic())
        if kept is None or session <= kept.session or not compare_digest(kept.secret, secret):
            return None
        self._returning.pop(request_id)
        return kept

    def _send_away(self, entry: RequestEntry) -> None:
        entry.send_away()
        if isinstance(entry.error, SentAway):
            self._sent_away.put(entry.request_id, True, time.monotonic())

    def fail_all(self, error: KaveriError) -> None:
        for slot in tuple(self._slots.values()):
            slot.stop(error)

    async def wait_until_empty(self) -> None:
        await self._empty.wait()


class _EndedRequest(NamedTuple):
    arrived_s: float
    ended_s: float
    account: cluster_pb2.GetRequestAccountResponse
    """Without ago_s."""


class _RecentEnd(NamedTuple):
    ended_s: float
    prompt_tokens: int
    answer_tokens: int
    is_whole: bool
    """False: it was cancelled, failed or lost its client, so the full length is unknown."""


class RecentRequests:
    """Accounts of requests in flight and of the last that ended, and the recent workload. Not thread-safe.

    The workload is a window, not a random sample over the router's life: planning needs the present load, as in
    DistServe's section 4.3 (arXiv 2401.09670), and rate and bursts are in the gaps between neighbours, which a sample
    loses.

    Arrivals and lengths are two windows, as an answer's length is known only at its end. Of the last arrivals only the
    short ones have ended, while the last ends have as many long requests as a steady stream. Until a stream has run for
    as long as its long answers take, lengths are still too short; the requests in flight show it."""

    def __init__(self, instance_id: str, table: RequestTable, started_s: float) -> None:
        """instance_id: the router's. started_s: time.monotonic() since which arrivals are recorded."""
        self._instance_id = instance_id
        self._table = table
        self._since_s = started_s
        self._arrivals: deque[float] = deque()
        self._ends: deque[_RecentEnd] = deque(maxlen=_MOST_ENDS)
        self._ended: ExpiringMap[str, _EndedRequest] = ExpiringMap(max_count=_MOST_ENDED)

    def note_arrival(self, arrived_s: float) -> None:
        """Record an accepted request; once per request, not per session. Arrivals may be out of order."""
        self._arrivals.append(arrived_s)
        if len(self._arrivals) > _MOST_ARRIVALS:
            self._since_s = max(self._since_s, self._arrivals.popleft())

    def add(self, entry: RequestEntry, outcome: str) -> None:
        """Record a request whose call has ended. outcome: finish reason or error, for its account."""
        accepted, finish, now_s = entry.accepted, entry.finish, time.monotonic()
        known = self._ended.get(entry.request_id)
        # The call of an early session may end after that of a later one.
        if known is None or known.arrived_s <= accepted.arrived_s:
            ended = _EndedRequest(accepted.arrived_s, now_s, self._account(entry, outcome))
            self._ended.put(entry.request_id, ended)
        # If superseded, a later session goes on.
        if finish is not None or not entry.is_superseded:
            is_whole = finish in (FinishReason.STOP, FinishReason.LENGTH)
            lengths = len(accepted.prompt_token_ids), len(entry.answer.token_ids)
            self._ends.append(_RecentEnd(now_s, *lengths, is_whole))

    def account_of(self, request_id: str) -> cluster_pb2.GetRequestAccountResponse:
        """Timing and steps of a request, or of the newest whose id a gateway made of this. Raises RequestNotFound."""
        ids = (*self._ended.keys(), *(entry.request_id for entry in self._table.entries()))
        if request_id not in ids:
            request_id = next((each for each in reversed(ids) if is_made_from(each, request_id)), request_id)
        if (entry := self._table.get(request_id)) is not None:
            account, since_s = self._account(entry, ""), entry.accepted.arrived_s
        elif (ended := self._ended.get(request_id)) is not None:
            account, since_s = ended.account, ended.ended_s
        else:
            raise RequestNotFound(request_id)
        account.ago_s = time.monotonic() - since_s
        return account

    def workload(self, now_s: float) -> cluster_pb2.GetWorkloadResponse:
        """Recent arrivals, and the lengths of ended and running requests. now_s: time.monotonic()."""
        running = [entry for entry in self._table.entries() if not isinstance(entry.state, Ended)]
        return cluster_pb2.GetWorkloadResponse(
            router_instance_id=self._instance_id,
            observed_s=now_s - self._since_s,
            arrived_ago_s=[now_s - arrived_s for arrived_s in self._arrivals],
            answered=_sampled([end for end in self._ends if end.is_whole], now_s),
            cut_short=_sampled([end for end in self._ends if not end.is_whole], now_s),
            running=cluster_pb2.SampledRequests(
                prompt_tokens=[len(entry.accepted.prompt_token_ids) for entry in running],
                answer_tokens=[len(entry.answer.token_ids) for entry in running],
            ),
        )

    def _account(self, entry: RequestEntry, outcome: str) -> cluster_pb2.GetRequestAccountResponse:
        accepted, answer, account = entry.accepted, entry.answer, entry.account
        arrived_s = accepted.arrived_s
        response = cluster_pb2.GetRequestAccountResponse(
            router_instance_id=self._instance_id,
            session=accepted.session,
            outcome=outcome[:_MOST_OUTCOME_CHARACTERS],
            prompt_tokens=len(accepted.prompt_token_ids),
            completion_tokens=len(answer.token_ids),
            timing=account.timing,
            steps=[cluster_pb2.RequestStep(at_s=at_s - arrived_s, event=event) for at_s, event in account.steps],
            trace_id=account.span.trace_id if account.span is not None else "",
        )
        if answer.first_token_s is not None:
            response.timing.ttft_s = answer.first_token_s - arrived_s
            response.timing.e2e_s = answer.last_token_s - arrived_s
        return response


def _sampled(ends: Sequence[_RecentEnd], now_s: float) -> cluster_pb2.SampledRequests:
    return cluster_pb2.SampledRequests(
        ended_ago_s=[now_s - end.ended_s for end in ends],
        prompt_tokens=[end.prompt_tokens for end in ends],
        answer_tokens=[end.answer_tokens for end in ends],
    )
