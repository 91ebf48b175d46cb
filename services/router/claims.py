"""The request ids that this router has in flight, as the store knows them: one router at a time has a request id.

An id that a caller has chosen is claimed before its request goes anywhere. One that this router made, or a client drew
together with the request's secret, nobody else can send: it is claimed a moment later, unless its request has ended by
then. Claims are closed in batches, a moment after their requests have ended.
"""

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from kaveri.cluster.store import ClusterStore, RequestClaim
from kaveri.domain.view import ClusterView
from kaveri.errors import InvalidArgument, RequestAlreadyExists
from kaveri.wire.attempts import wrong_secret
from services.router.accepted_request import OwnerHint
from services.router.owner_hints import hint_to_proto

_CLAIM_WAIT_S = 5.0
"""Longest wait for a sign of life from the router that holds a request id: more than the lease of most clusters."""
_CLAIM_AGAIN_S = 0.1
_FLUSH_AFTER_S = 0.05
"""Claims that are opened and closed within this time go to the store together."""
_MOST_AT_ONCE = 500
_MOST_UNCLOSED = 65_536


class RequestClaims:
    """For one event loop. end() ends what runs in the background."""

    def __init__(self, store: ClusterStore, router_id: str, router_incarnation: int) -> None:
        self._store = store
        self._router_id = router_id
        self._router_incarnation = router_incarnation
        self._view_changed = asyncio.Event()
        self._opening: dict[RequestClaim, tuple[float, Callable[[], None]]] = {}
        """To be claimed, with their time to live and what is called when another holds the id."""
        self._hinted: dict[RequestClaim, OwnerHint] = {}
        """Hints that are to be entered."""
        self._ended: dict[RequestClaim, None] = {}
        """Of ended requests, to be closed."""
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[None] | None = None

    def update(self, view: ClusterView) -> None:
        """Wakes those that wait for the holder of an id; closes claims that were left open while the store was away."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        if view.store_connected:
            self._flush_later()

    async def open(self, claim: RequestClaim, ttl_s: float) -> bytes:
        """Claims an id. Returns the hint of the earlier session of the same request; empty where there is none.

        Raises RequestAlreadyExists when a router that lives holds the id, InvalidArgument when a later session finds
        another secret there, or a session that is not earlier. A router that died holds its requests until its lease
        ends: so the holder has to show one more heartbeat, for which this waits.
        """
        request_id, hint = claim.request_id, b""
        if claim in self._ended:
            # The caller uses an id again before the store has heard that its former request ended.
            if self._flushing is not None:
                await asyncio.wait({self._flushing})
            self._ended.pop(claim, None)
        if claim.session:
            former = await self._store.find_request(request_id)
            if former is not None and former.secret_hash == claim.secret_hash:
                hint = former.hint
        asked_s = time.monotonic()
        while (holder := await self._store.claim_request(claim, ttl_s)) is not None:
            if holder == claim or holder in self._ended:
                # Left behind: a request of this router that is in flight is in its own table.
                await self._store.close_requests([holder])
                continue
            if holder.secret_hash and holder.secret_hash == claim.secret_hash:
                raise InvalidArgument("session", claim.session, f"above {holder.session}, the present one")
            waited_s = time.monotonic() - asked_s
            # Its request may have ended just now: the holder closes claims a moment later.
            if (waited_s > 2 * _FLUSH_AFTER_S and self._was_heard(holder, asked_s)) or waited_s > _CLAIM_WAIT_S:
                raise wrong_secret() if claim.session and holder.secret_hash else RequestAlreadyExists(request_id)
            changed = self._view_changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLAIM_AGAIN_S):
                    await changed.wait()
        return hint

    def open_later(self, claim: RequestClaim, ttl_s: float, held: Callable[[], None]) -> None:
        """Claims an id that nobody else can send, without making anyone wait. held: called when a later session of the
        request has claimed it first."""
        self._opening[claim] = ttl_s, held
        self._flush_later()

    def note(self, claim: RequestClaim, owner: OwnerHint) -> None:
        """Enters the hint of a claim soon, without making anyone wait."""
        self._hinted[claim] = owner
        self._flush_later()

    def close(self, claim: RequestClaim) -> None:
        """Ends this router's claim of an ended request soon, without making anyone wait. Other claims stay."""
        self._hinted.pop(claim, None)
        if self._opening.pop(claim, None) is not None:
            return
        self._ended[claim] = None
        if len(self._ended) > _MOST_UNCLOSED:
            # It ends with the request's deadline.
            del self._ended[next(iter(self._ended))]
        self._flush_later()

    async def close_all(self) -> None:
        """Closes the claims of all ended requests now, unless the store is away: then they end with their time."""
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (self._opening or self._ended) and await self._flush():
            pass

    async def end(self) -> None:
        """close_all(), and nothing runs in the background any more."""
        self._has_ended = True
        await self.close_all()

    def check_integrity(self) -> None:
        """Asserts, while no request is in flight and the store is there, that no claim is left."""
        assert not self._opening, self._opening
        assert not self._hinted, self._hinted
        assert not self._ended, self._ended

    def _flush_later(self) -> None:
        is_under_way = self._timer is not None or self._flushing is not None
        is_due = self._opening or self._hinted or self._ended
        if is_due and not is_under_way and not self._has_ended:
            self._timer = asyncio.get_running_loop().call_later(_FLUSH_AFTER_S, self._start_flush)

    def _start_flush(self) -> None:
        self._timer = None
        self._flushing = asyncio.create_task(self._flush_again(), name="claims of request ids")

    async def _flush_again(self) -> None:
        is_away = False
        try:
            is_away = not await self._flush()
        finally:
            self._flushing = None
            if not is_away:
                # Otherwise the next view that has the store tries again.
                self._flush_later()

    async def _flush(self) -> bool:
        """Opens, notes and closes some claims. False: the store is away."""
        opening = tuple(itertools.islice(self._opening.items(), _MOST_AT_ONCE))
        ended = tuple(itertools.islice(self._ended, _MOST_AT_ONCE))
        for claim, _ in opening:
            del self._opening[claim]
        # Behind their claims.
        hinted = [each for each in self._hinted.items() if each[0] not in self._opening][:_MOST_AT_ONCE]
        for claim, _ in hinted:
            del self._hinted[claim]
        holders = await asyncio.gather(*(self._store.claim_request(claim, ttl_s) for claim, (ttl_s, _) in opening))
        for (claim, (_, held)), holder in zip(opening, holders, strict=True):
            if holder is not None and holder.session > claim.session:
                held()
        if hinted:
            await self._store.update_requests([_with_hint(claim, owner) for claim, owner in hinted])
        if ended and not await self._store.close_requests(ended):
            return False
        for claim in ended:
            self._ended.pop(claim, None)
        return True

    def claim_of(self, request_id: str, session: int, secret: bytes) -> RequestClaim:
        """The claim of a session for this router. The secret itself stays here."""
        secret_hash = hashlib.sha256(secret).hexdigest() if secret else ""
        return RequestClaim(request_id, self._router_id, self._router_incarnation, session, secret_hash)

    def _was_heard(self, holder: RequestClaim, since_s: float) -> bool:
        """Whether the holder's router has sent a heartbeat since then."""
        status = self._store.view().instances.get(holder.router_id)
        if status is None or status.record.incarnation != holder.router_incarnation:
            return False
        return time.monotonic() - status.heartbeat_age_s >= since_s


def _with_hint(claim: RequestClaim, owner: OwnerHint) -> RequestClaim:
    return replace(claim, hint=hint_to_proto(owner).SerializeToString())
