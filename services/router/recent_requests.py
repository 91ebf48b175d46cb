"""Recent requests: the account of each, and the workload."""

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from kaveri.errors import RequestNotFound
from kaveri.feeds.expiring import ExpiringMap
from kaveri.v1 import cluster_pb2, inference_pb2
from kaveri.wire.attempts import is_made_from
from services.router.request_account import RequestTiming
from services.router.request_table import RequestTable
from services.router.requests import RequestEntry

_MOST = 1024
_MOST_OUTCOME_CHARACTERS = 500
MOST_ARRIVALS = 4096
"""Max recorded arrivals: 40 s of 100 requests per second."""
MOST_ENDS = 4096
"""Max recorded ends; with the arrivals, less than a MiB."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Account of a request. Times are time.monotonic()'s."""

    session: int
    prompt_tokens: int
    completion_tokens: int
    arrived_s: float
    first_token_s: float | None
    last_token_s: float
    timing: RequestTiming
    steps: deque[tuple[float, str]]
    trace_id: str
    outcome: str = ""
    ended_s: float | None = None

    @classmethod
    def of(cls, entry: RequestEntry, outcome: str = "", ended_s: float | None = None) -> "RequestSummary":
        """Summary of a request at present. outcome: empty: it has not ended."""
        accepted, answer = entry.accepted, entry.answer
        return cls(
            accepted.session,
            len(accepted.prompt_token_ids),
            len(answer.token_ids),
            accepted.arrived_s,
            answer.first_token_s,
            answer.last_token_s,
            entry.account.timing,
            entry.account.steps,
            entry.account.span.trace_id if entry.account.span is not None else "",
            outcome[:_MOST_OUTCOME_CHARACTERS],
            ended_s,
        )

    def to_proto(self, router_instance_id: str) -> cluster_pb2.GetRequestAccountResponse:
        timing = inference_pb2.Timing(**self.timing.known())
        if self.first_token_s is not None:
            timing.ttft_s = self.first_token_s - self.arrived_s
            timing.e2e_s = self.last_token_s - self.arrived_s
        since_s = self.arrived_s if self.ended_s is None else self.ended_s
        return cluster_pb2.GetRequestAccountResponse(
            router_instance_id=router_instance_id,
            session=self.session,
            outcome=self.outcome,
            ago_s=time.monotonic() - since_s,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            timing=timing,
            steps=[cluster_pb2.RequestStep(at_s=at_s - self.arrived_s, event=event) for at_s, event in self.steps],
            trace_id=self.trace_id,
        )


class RecentRequests:
    """Accounts of the requests in flight and of the last that ended. Not thread-safe."""

    def __init__(self, instance_id: str, table: RequestTable) -> None:
        """instance_id: the router's. table: the requests in flight."""
        self._instance_id = instance_id
        self._table = table
        self._ended: ExpiringMap[str, RequestSummary] = ExpiringMap(max_count=_MOST)
        """Summaries by request id."""

    def add(self, entry: RequestEntry, outcome: str) -> None:
        """Record a request whose call has ended."""
        known = self._ended.get(entry.request_id)
        if known is not None and known.arrived_s > entry.accepted.arrived_s:
            # The call of an early session may end after that of a later one.
            return
        self._ended.put(entry.request_id, RequestSummary.of(entry, outcome, time.monotonic()))

    def account_of(self, request_id: str) -> cluster_pb2.GetRequestAccountResponse:
        """Account of a request. A gateway extends its client's ids: the last such request counts. Raises
        RequestNotFound."""
        request_id = self._known_as(request_id)
        entry = self._table.get(request_id)
        summary = RequestSummary.of(entry) if entry is not None else self._ended.get(request_id)
        if summary is None:
            raise RequestNotFound(request_id)
        return summary.to_proto(self._instance_id)

    def _known_as(self, request_id: str) -> str:
        ids = (*self._ended.keys(), *(entry.request_id for entry in self._table.entries()))
        if request_id in ids:
            return request_id
        return next((each for each in reversed(ids) if is_made_from(each, request_id)), request_id)


class RecentEnd(NamedTuple):
    """A request that has ended."""

    ended_s: float
    """time.monotonic()."""
    prompt_tokens: int
    answer_tokens: int
    is_whole: bool
    """False: it was cancelled, failed, or lost its client, and its answer would have been longer."""


class RecentWorkload:
    """The last arrivals and the last ends of requests. Not thread-safe.

    A window, not a reservoir over the router's life: a plan is for the present load, as in DistServe's section 4.3
    (arXiv 2401.09670), and the rate and the bursts are in the gaps between neighbours, which a random sample loses.

    Arrivals and lengths are two windows, because the length of an answer is known at its end only. Of the last arrivals
    only the short requests have ended: their lengths would be too short. The last ends have as many long requests as
    come in a steady stream. While a stream has run for less time than its long answers take, lengths are too short all
    the same; the requests that still run show it.
    """

    def __init__(self, started_s: float, most_arrivals: int = MOST_ARRIVALS, most_ends: int = MOST_ENDS) -> None:
        """started_s: time.monotonic(); no request came before."""
        self._since_s = started_s
        self._most_arrivals = most_arrivals
        self._arrivals: deque[float] = deque()
        self._ends: deque[RecentEnd] = deque(maxlen=most_ends)

    def note_arrival(self, arrived_s: float) -> None:
        """Record an accepted request, once over all its sessions. Arrivals may be out of order."""
        self._arrivals.append(arrived_s)
        if len(self._arrivals) > self._most_arrivals:
            self._since_s = max(self._since_s, self._arrivals.popleft())

    def note_end(self, ended_s: float, prompt_tokens: int, answer_tokens: int, is_whole: bool) -> None:
        """Record the end of a request that was not left to another router."""
        self._ends.append(RecentEnd(ended_s, prompt_tokens, answer_tokens, is_whole))

    def observed_s(self, now_s: float) -> float:
        """Length of the observation window in seconds."""
        return now_s - self._since_s

    def arrived_ago_s(self, now_s: float) -> list[float]:
        """Seconds since each arrival in the window, in the order of acceptance."""
        return [now_s - arrived_s for arrived_s in self._arrivals]

    def ends(self, is_whole: bool) -> list[RecentEnd]:
        """Ends with a whole answer, or the others, the oldest first."""
        return [end for end in self._ends if end.is_whole is is_whole]
