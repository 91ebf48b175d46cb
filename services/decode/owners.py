"""Who owns each request here, and what its router is sent: owners, token streams, answers that are kept.

Leaves the lives of requests to the DecodeInstance, and a stream's tokens to the requests' own logs.
"""

import time
from collections.abc import Callable, Iterable

from kaveri.domain.attachment import Attached, Attachment
from kaveri.domain.owner import Ownership
from kaveri.domain.replica import ReplicaLocation
from kaveri.errors import InvalidArgument, KaveriError, RequestAlreadyExists, RequestNotFound
from kaveri.feeds.expiring import MAX_ANSWER_BYTES, ExpiringMap, answer_bytes
from kaveri.feeds.feed import RouterFeeds
from kaveri.telemetry.logs import get_logger
from kaveri.timeouts import STRAGGLER_S
from kaveri.wire.attempts import wrong_secret
from services.decode.answer_log import End, GainedTokens
from services.decode.answer_readers import AnswerReaders, AnswerTokenizer
from services.decode.attaching import Awaited, attached_of
from services.decode.lifecycle import Ready, Released
from services.decode.metrics import DecodeMetrics
from services.decode.requests import DecodeRequest, DecodeRequests, KnownAttempts
from services.decode.token_streams import TokenStreams

_ATTEMPTS_REMEMBERED_COUNT = 65_536


class RequestOwners:
    """Of one decode instance. For one event loop."""

    def __init__(
        self,
        orphan_grace_s: float,
        router_gone: Callable[[str], None],
        metrics: DecodeMetrics,
        tokenizer: AnswerTokenizer | None = None,
        feeds: RouterFeeds | None = None,
    ) -> None:
        """orphan_grace_s: seconds that requests go on without a stream of their router, and ended ones are kept.
        router_gone: told of a router that was away for so long. tokenizer: None: callers cannot read answers here.
        feeds: those of the instance's other phase; None: it has no other phase."""
        self.requests = DecodeRequests()
        self.feeds = RouterFeeds(orphan_grace_s) if feeds is None else feeds
        self.streams = TokenStreams(self.feeds, router_gone, self._requests_of)
        self.readers = AnswerReaders(
            self.requests.by_request_id, self.streams.note_reader, tokenizer, metrics.read_tokens.inc
        )
        self._attempts = KnownAttempts(STRAGGLER_S, _ATTEMPTS_REMEMBERED_COUNT)
        self._kept: ExpiringMap[str, DecodeRequest] = ExpiringMap(orphan_grace_s, max_bytes=MAX_ANSWER_BYTES)
        self._metrics = metrics
        # Read by the threads that serve metrics.
        metrics.orphans.set_function(self._orphan_count)
        metrics.kept.set_function(lambda: len(self._kept))

    def attach(self, attachment: Attachment) -> Attached:
        """Makes another router, or a later session, the owner of a request that is here or kept here: its tokens go to
        that router from index generated_count on. It sends the former owner's router an error.

        Raises RequestNotFound (also: it was given up, and its client has all its tokens), InvalidArgument (another
        secret, prompt or answer, or a session that does not grow),
        StaleAttempt and RequestAlreadyExists (a newer owner is known). Nothing changes then.
        """
        request_id, ownership, now_s = attachment.request_id, attachment.ownership, time.monotonic()
        owner = ownership.owner
        request = self._find(request_id, now_s)
        if request is None:
            raise RequestNotFound(request_id)
        if not ownership.is_same_request(request.ownership):
            if isinstance(request.state, Released):
                # Another request had this id before.
                raise RequestNotFound(request_id)
            raise wrong_secret()
        if ownership.router_id != request.router_id and owner.session == request.owner.session:
            raise InvalidArgument("session", owner.session, f"above {request.owner.session}, the present one")
        if owner < request.owner:
            raise owner.stale(request_id, request.owner)
        attached, next_index = attached_of(request, attachment)
        self._attempts.note(request_id, ownership, now_s)
        if owner != request.owner:
            self._change_owner(request, ownership)
        # A first token that the log lacks comes from prefill.
        request.log.send_from(max(next_index, request.log.first_index))
        self.streams.send(request)
        if isinstance(request.state, Released):
            self.keep(request, now_s)
        get_logger().info(
            "request_attached",
            request_id=request_id,
            attempt=owner.attempt,
            session=owner.session,
            next_index=attachment.generated_count,
            drawn=request.log.next_index,
        )
        return attached

    def repeat(self, router_id: str, awaited: Iterable[Awaited]) -> list[GainedTokens]:
        """Have requests go on where the router is, not where its former stream was. Returns errors for those that are
        not here for it."""
        now_s = time.monotonic()
        unknown: list[GainedTokens] = []
        for named in awaited:
            request = self._find(named.request_id, now_s)
            if request is None or (request.router_id, request.owner) != (router_id, named.owner):
                reason = "it is not here, or belongs to another owner"
                unknown.append(GainedTokens(named.request_id, named.owner, named.next_index, end=End(error=reason)))
            else:
                request.log.send_from(min(max(named.next_index, request.log.first_index), request.log.next_index))
        return unknown

    def resumed(self, request_id: str, ownership: Ownership) -> DecodeRequest | None:
        """The request that this owner has resumed here, also if it has ended less than orphan_grace_s ago."""
        request = self._find(request_id, time.monotonic())
        is_owners = request is not None and request.resumed is not None and request.ownership == ownership
        return request if is_owners else None

    def note_owner(self, request_id: str, ownership: Ownership) -> None:
        """Takes in that the request has this owner, elsewhere. Raises StaleAttempt or RequestAlreadyExists when a newer
        one is known."""
        request = self.requests.by_request_id(request_id)
        owner = ownership.comparable(request.ownership) if request is not None else None
        if request is not None and owner is not None and owner < request.owner:
            raise owner.stale(request_id, request.owner)
        self._attempts.note(request_id, ownership, time.monotonic())

    def note_loss(self, request: DecodeRequest, error: KaveriError) -> None:
        """Sends the request's router that a newer owner is known elsewhere, as `error` says: of its own, or of a later
        session."""
        is_replaced = isinstance(error, RequestAlreadyExists)
        end = End(error=str(error), replaced=is_replaced)
        self.streams.notify(request.router_id, GainedTokens(request.request_id, request.owner, 0, end=end))

    def prune(self) -> None:
        """Forgets answers that were kept for long enough."""
        self._kept.prune(time.monotonic())

    def begin(self, request_id: str, ownership: Ownership) -> None:
        """A request of this owner begins here. Raises StaleAttempt or RequestAlreadyExists when a newer is known."""
        self._attempts.note(request_id, ownership, time.monotonic())
        self._kept.pop(request_id)

    def keep(self, request: DecodeRequest, now_s: float) -> None:
        """Keeps the answer of a request that has ended, for a router that attaches it."""
        token_count = len(request.engine_request.token_ids) + len(request.log.token_ids)
        self._kept.put(request.request_id, request, now_s, answer_bytes(token_count, request.log.logprobs))

    def tell_replica(self, request: DecodeRequest, replica: ReplicaLocation) -> None:
        """Sends the router of a landed request news of its copy, with the next tokens at the latest."""
        request.log.note_replica(replica)
        if isinstance(request.state, Ready):
            # One that runs has tokens with the next step: its news needs no message of its own.
            self.streams.announce(request)

    def _change_owner(self, request: DecodeRequest, ownership: Ownership) -> None:
        self.streams.drop(request)
        if ownership.router_id != request.router_id:
            reason = f"session {ownership.owner.session} of the request was attached through another router"
            notice = GainedTokens(request.request_id, request.owner, 0, end=End(error=reason, replaced=True))
            self.streams.notify(request.router_id, notice)
        if isinstance(request.state, Released):
            request.ownership = ownership
        else:
            self.requests.give(request, ownership)
        self._metrics.attaches.inc()

    def _find(self, request_id: str, now_s: float) -> DecodeRequest | None:
        return self.requests.by_request_id(request_id) or self._kept.get(request_id, now_s)

    def _requests_of(self, router_id: str) -> tuple[DecodeRequest, ...]:
        kept = (request for request in self._kept.values() if request.router_id == router_id)
        return (*self.requests.of_router(router_id), *kept)

    def _orphan_count(self) -> int:
        return sum(len(self.requests.of_router(router_id)) for router_id in self.feeds.missing_routers)
