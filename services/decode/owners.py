"""Ownership of a decode instance's requests: streams to routers, takeovers by other routers or later sessions, and
answers kept after their end. The DecodeInstance owns the requests' states."""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kaveri.domain.attachment import Attached, Attachment, check_received
from kaveri.domain.owner import Ownership, Term
from kaveri.domain.replica import ReplicaLocation
from kaveri.engine.contract import TokenStep
from kaveri.errors import InvalidArgument, KaveriError, RequestAlreadyExists, RequestNotFound
from kaveri.feeds.expiring import MAX_ANSWER_BYTES, ExpiringMap, answer_bytes
from kaveri.feeds.feed import RouterFeeds
from kaveri.lives.decoding import Ended, InLine, Landed, RequestTimes, Reserved, Reserving
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import STRAGGLER_S
from kaveri.wire.attempts import wrong_secret
from services.decode.answer_readers import AnswerReaders, AnswerTokenizer
from services.decode.metrics import DecodeMetrics
from services.decode.requests import DecodeRequest, End, GainedTokens

_OWNERS_REMEMBERED_COUNT = 65_536


class Awaited(NamedTuple):
    request_id: str
    term: Term
    next_index: int
    """Index of the first token that the router lacks."""


class RequestOwners:
    """Requests of one decode instance, by router, and their unsent tokens. Not thread-safe. Each request's log keeps
    sent and unsent tokens, so a broken stream to a router loses nothing."""

    def __init__(
        self,
        orphan_grace_s: float,
        router_gone: Callable[[str], None],
        metrics: DecodeMetrics,
        tokenizer: AnswerTokenizer | None,
        feeds: RouterFeeds,
    ) -> None:
        """orphan_grace_s: seconds for which ended answers are kept. router_gone: called with the id of a router that
        had no stream for the grace time of `feeds`. tokenizer: for clients that read answers here; None disables that.
        feeds: streams to routers, shared with the prefill side."""
        self.by_serial: dict[int, DecodeRequest] = {}
        """Present requests, by the serials of their engine keys."""
        self.by_id: dict[str, DecodeRequest] = {}
        """The present attempt of each request, by request id."""
        # Ordered: requests of a lost router end in the order of their arrival.
        self._by_router: dict[str, dict[DecodeRequest, None]] = {}
        self.feeds = feeds
        feeds.join(router_gone, self._unsent_of)
        self.readers = AnswerReaders(self.by_id.get, self._reader_changed, tokenizer, metrics.read_tokens.inc)
        # Refuses late messages after a request's end. Keyed by request id and secret, and by router id, because a
        # router's attempt numbers grow even when a request id is reused.
        self._newest: ExpiringMap[tuple[str, str | bytes], Term] = ExpiringMap(
            STRAGGLER_S, max_count=_OWNERS_REMEMBERED_COUNT
        )
        self._kept: ExpiringMap[str, DecodeRequest] = ExpiringMap(orphan_grace_s, max_bytes=MAX_ANSWER_BYTES)
        self._metrics = metrics
        metrics.here.orphans.set_function(self._orphan_count)
        metrics.here.kept.set_function(lambda: len(self._kept))

    def add(self, request: DecodeRequest) -> None:
        """Add a request whose id is not in use."""
        assert request.request_id not in self.by_id
        self.by_serial[request.engine_request.key.serial] = request
        self.by_id[request.request_id] = request
        self._by_router.setdefault(request.ownership.router_id, {})[request] = None

    def remove(self, request: DecodeRequest) -> None:
        del self.by_serial[request.engine_request.key.serial]
        del self.by_id[request.request_id]
        self._leave_router(request)

    def of_router(self, router_id: str) -> tuple[DecodeRequest, ...]:
        return tuple(self._by_router.get(router_id, ()))

    def has_requests_of(self, router_id: str) -> bool:
        return router_id in self._by_router

    def gain(self, request: DecodeRequest, step: TokenStep, times: RequestTimes | None) -> None:
        """Add one sampled token to the request's log, and queue the request for its router. times: with the last
        one."""
        request.log.gain(step, times)
        if request.reader is not None:
            request.reader.changed()
            if not request.log.is_due:
                return
        self.feeds.add(request.ownership.router_id, request)

    def announce(self, request: DecodeRequest) -> None:
        """Send the request's router an entry without tokens: its KV has arrived, and it waits to join the batch. A
        router that has given the request up meanwhile answers with an abort."""
        self.feeds.add(request.ownership.router_id, request)

    def announce_replica(self, request: DecodeRequest, replica: ReplicaLocation) -> None:
        """Send the request's router the new location of its KV copy, at the latest with the next tokens."""
        request.log.note_replica(replica)
        if isinstance(request.state, Landed):
            # A running request's next token carries the location.
            self.announce(request)

    def fail(self, request: DecodeRequest, end: End) -> None:
        """Send the request's router the error that ends the request here, after its tokens."""
        request.log.end = end
        if request.reader is not None:
            request.reader.changed()
        self._send(request)

    def drop(self, request: DecodeRequest) -> None:
        """Stop sending a request's tokens to its router, and to a client that reads the answer from this instance."""
        if request.reader is not None:
            request.reader.leave()
        self.feeds.discard(request.ownership.router_id, request)

    def keep(self, request: DecodeRequest, now_s: float) -> None:
        """Keep the answer of an ended request for a while, for a router that attaches to it later."""
        token_count = len(request.engine_request.token_ids) + len(request.log.token_ids)
        self._kept.put(request.request_id, request, now_s, answer_bytes(token_count, request.log.logprobs))

    def prune(self) -> None:
        self._kept.prune(time.monotonic())

    def attach(self, attachment: Attachment) -> Attached:
        """Make another router, or a later session of the client, the owner of a present or kept request. Its router
        receives the tokens from index generated_count on; the former router gets an error. Raises RequestNotFound
        (also: the request was given up, and its client has all its tokens), InvalidArgument (another secret, prompt or
        answer, or a session number that does not grow), StaleAttempt and RequestAlreadyExists (a newer attempt or
        session is known). Nothing changes on errors."""
        request_id, ownership, now_s = attachment.request_id, attachment.ownership, time.monotonic()
        term = ownership.term
        request = self._find(request_id, now_s)
        if request is None:
            raise RequestNotFound(request_id)
        if not ownership.is_same_request(request.ownership):
            if isinstance(request.state, Ended):
                # An earlier request had the same id.
                raise RequestNotFound(request_id)
            raise wrong_secret()
        if ownership.router_id != request.ownership.router_id and term.session == request.ownership.term.session:
            raise InvalidArgument("session", term.session, f"above {request.ownership.term.session}, the present one")
        if term < request.ownership.term:
            raise term.stale(request_id, request.ownership.term)
        attached, next_index = _attached(request, attachment)
        self._note_newest(request_id, ownership, now_s)
        if term != request.ownership.term:
            self._change_owner(request, ownership)
        # A first token that the log lacks comes from prefill.
        request.log.send_from(max(next_index, request.log.first_index))
        self._send(request)
        if isinstance(request.state, Ended):
            self.keep(request, now_s)
        get_logger().info(
            "request_attached",
            request_id=request_id,
            attempt=term.attempt,
            session=term.session,
            next_index=attachment.generated_count,
            drawn=request.log.next_index,
        )
        return attached

    def repeat(self, router_id: str, awaited: Iterable[Awaited]) -> list[GainedTokens]:
        """Resume sending requests' tokens at the positions that their router names on a new stream. Returns error
        entries for requests that the router does not own here."""
        now_s = time.monotonic()
        unknown: list[GainedTokens] = []
        for named in awaited:
            request = self._find(named.request_id, now_s)
            if request is None or (request.ownership.router_id, request.ownership.term) != (router_id, named.term):
                reason = "it is not here, or belongs to another owner"
                unknown.append(GainedTokens(named.request_id, named.term, named.next_index, end=End(error=reason)))
            else:
                request.log.send_from(min(max(named.next_index, request.log.first_index), request.log.next_index))
        return unknown

    def resumed(self, request_id: str, ownership: Ownership) -> DecodeRequest | None:
        """Return the present or kept request that this session and attempt resumed here from a KV copy; else None."""
        request = self._find(request_id, time.monotonic())
        is_owners = request is not None and request.resumed is not None and request.ownership == ownership
        return request if is_owners else None

    def begin(self, request_id: str, ownership: Ownership) -> None:
        """Record the session and attempt of a new request. Raises StaleAttempt or RequestAlreadyExists if a newer one
        is known."""
        self._note_newest(request_id, ownership, time.monotonic())
        self._kept.pop(request_id)

    def note_owner(self, request_id: str, ownership: Ownership) -> None:
        """Record a session and attempt of a request that another instance runs. Raises StaleAttempt or
        RequestAlreadyExists if a newer one is known."""
        request = self.by_id.get(request_id)
        term = ownership.comparable(request.ownership) if request is not None else None
        if request is not None and term is not None and term < request.ownership.term:
            raise term.stale(request_id, request.ownership.term)
        self._note_newest(request_id, ownership, time.monotonic())

    def note_loss(self, request: DecodeRequest, error: KaveriError) -> None:
        """Send the request's router the error that another instance runs a newer attempt or session."""
        self._notify(request, End(error=str(error), replaced=isinstance(error, RequestAlreadyExists)))

    def _note_newest(self, request_id: str, ownership: Ownership, now_s: float) -> None:
        """Record the newest attempt of a request. Raises StaleAttempt or RequestAlreadyExists if a newer one is known:
        among those with the same secret, or without a secret of the same router."""
        term = ownership.term
        names: list[tuple[str | bytes, Term]] = [(ownership.router_id, Term(0, term.attempt))]
        if ownership.secret:
            names.append((ownership.secret, term))
        for name, named_term in names:
            newest = self._newest.get((request_id, name), now_s)
            if newest is not None and named_term < newest:
                raise named_term.stale(request_id, newest)
            self._newest.put((request_id, name), named_term, now_s)

    def _change_owner(self, request: DecodeRequest, ownership: Ownership) -> None:
        self.drop(request)
        if ownership.router_id != request.ownership.router_id:
            reason = f"session {ownership.term.session} of the request was attached through another router"
            self._notify(request, End(error=reason, replaced=True))
        if isinstance(request.state, Ended):
            request.ownership = ownership
        else:
            self._leave_router(request)
            request.ownership = ownership
            self._by_router.setdefault(ownership.router_id, {})[request] = None
        self._metrics.attaches.inc()

    def _leave_router(self, request: DecodeRequest) -> None:
        of_router = self._by_router[request.ownership.router_id]
        del of_router[request]
        if not of_router:
            del self._by_router[request.ownership.router_id]

    def _notify(self, request: DecodeRequest, end: End) -> None:
        """Send the router an end that is not in the request's log. Dropped if the router has no stream."""
        self.feeds.add(
            request.ownership.router_id, GainedTokens(request.request_id, request.ownership.term, 0, end=end)
        )

    def _send(self, request: DecodeRequest) -> None:
        self.feeds.expect(request.ownership.router_id)
        if request.log.has_unsent:
            self.feeds.add(request.ownership.router_id, request)

    def _reader_changed(self, request: DecodeRequest) -> None:
        """Send the router unsent tokens, or that a client starts or stops reading the answer here."""
        if request.log.has_unsent or not request.log.has_ended:
            self.announce(request)

    def _find(self, request_id: str, now_s: float) -> DecodeRequest | None:
        return self.by_id.get(request_id) or self._kept.get(request_id, now_s)

    def _unsent_of(self, router_id: str) -> list[DecodeRequest]:
        kept = (request for request in self._kept.values() if request.ownership.router_id == router_id)
        return [request for request in (*self.of_router(router_id), *kept) if request.log.has_unsent]

    def _orphan_count(self) -> int:
        return sum(len(self.of_router(router_id)) for router_id in self.feeds.missing_routers)


def _attached(request: DecodeRequest, attachment: Attachment) -> tuple[Attached, int]:
    """Return the response to a new owner, and the index of its first token. Raises RequestNotFound, InvalidArgument."""
    log, engine_request = request.log, request.engine_request
    generated_count, params = engine_request.generated_count, engine_request.params
    is_from_elsewhere = attachment.placed_by != request.placed_by and attachment.placed_by and request.placed_by
    if is_from_elsewhere:
        # The router has prefill results of another computation than the one whose KV came here.
        raise RequestNotFound(request.request_id, f"{request.placed_by} has placed it here, not {attachment.placed_by}")
    if attachment.landed and isinstance(request.state, InLine | Reserving | Reserved):
        raise RequestNotFound(request.request_id, "its KV has not landed")
    prompt_tokens = engine_request.prompt_tokens
    prompt, generated = engine_request.token_ids[:prompt_tokens], engine_request.token_ids[prompt_tokens:]
    unknown = [None] * (log.first_index - generated_count)
    try:
        check_received(attachment, prompt, [*generated, *unknown, *log.token_ids], is_all=True)
    except InvalidArgument as refusal:
        if log.end.error and refusal.field.startswith("received."):
            # The request was given up or moved and continued elsewhere, so its client has newer tokens.
            reason = f"it ended before its client's last tokens: {log.end.error}"
            raise RequestNotFound(request.request_id, reason) from refusal
        raise
    if log.end.error and not (log.end.moved or log.end.is_final) and attachment.generated_count >= log.next_index:
        # A takeover would only waste an attempt.
        raise RequestNotFound(request.request_id, f"it ended, and its client has all of its tokens: {log.end.error}")
    next_index = max(attachment.generated_count, generated_count)
    if attachment.landed and next_index < log.first_index:
        raise RequestNotFound(request.request_id, "its first token is known to prefill alone")
    missing = generated[attachment.generated_count :]
    if missing and params.logprobs is not None:
        raise RequestNotFound(request.request_id, "the log-probabilities of earlier placements are not known here")
    return Attached(params, generated_count, missing), next_index
