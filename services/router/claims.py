"""Claims of request ids in the cluster store, so that one router at a time serves an id.

An id chosen by the caller is claimed before its request is placed. An id generated here, or derived from the request's
secret, cannot be sent by another client: it is claimed shortly after, unless the request has ended by then. Claims are
closed in batches, shortly after their requests have ended."""

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
from services.router.accepted_request import OwnerHint, hint_to_proto

_CLAIM_WAIT_S = 5.0
"""Max seconds to wait for a heartbeat of the router with the claim: more than the lease of most clusters."""
_CLAIM_AGAIN_S = 0.1
_FLUSH_AFTER_S = 0.05
"""Seconds for which changes of claims are collected into one batch."""
_MOST_AT_ONCE = 500
_MOST_UNCLOSED = 65_536


class RequestClaims:
    """A router's claims in the cluster store: records that it alone serves a request id. Not thread-safe."""

    def __init__(self, store: ClusterStore, router_id: str, router_incarnation: int) -> None:
        self._store = store
        self._router_id = router_id
        self._router_incarnation = router_incarnation
        self._view_changed = asyncio.Event()
        self._opening: dict[RequestClaim, tuple[float, Callable[[], None]]] = {}
        """Claims to open: time to live in seconds, and the callback if a later session has claimed the id."""
        self._hinted: dict[RequestClaim, OwnerHint] = {}
        self._ended: dict[RequestClaim, None] = {}
        """Claims of ended requests, to be closed."""
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Task[bool] | None = None

    def update(self, view: ClusterView) -> None:
        """Apply a cluster view: wake open() calls that wait for another claim's end, and retry closing claims."""
        self._view_changed.set()
        self._view_changed = asyncio.Event()
        if view.store_connected:
            self._flush_later()

    async def open(self, claim: RequestClaim, ttl_s: float) -> bytes:
        """Claim a request id. Returns the serialized OwnerHint (instances that have the request) that a session before
        the client's re-attach has stored; else b"".

        Raises RequestAlreadyExists if another live router has the id, InvalidArgument for a session with another secret
        or not above the stored one. Waits at most 5 s for a heartbeat of the claim's router, which may be dead."""
        request_id, hint = claim.request_id, b""
        if claim in self._ended:
            # The caller reuses an id before the store has the end of its former request.
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
                # A leftover claim: requests in flight are in this router's own table.
                await self._store.close_requests([holder])
                continue
            if holder.secret_hash and holder.secret_hash == claim.secret_hash:
                raise InvalidArgument("session", claim.session, f"above {holder.session}, the present one")
            waited_s = time.monotonic() - asked_s
            # If its request has just ended, the holder closes the claim a moment later.
            if (waited_s > 2 * _FLUSH_AFTER_S and self._was_heard(holder, asked_s)) or waited_s > _CLAIM_WAIT_S:
                raise wrong_secret() if claim.session and holder.secret_hash else RequestAlreadyExists(request_id)
            changed = self._view_changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLAIM_AGAIN_S):
                    await changed.wait()
        return hint

    def open_later(self, claim: RequestClaim, ttl_s: float, held: Callable[[], None]) -> None:
        """Claim an id that no other client can know, in the background. held: called if a later session has it."""
        self._opening[claim] = ttl_s, held
        self._flush_later()

    def note(self, claim: RequestClaim, owner: OwnerHint) -> None:
        """Store with an existing claim which instances have the request, in the background."""
        self._hinted[claim] = owner
        self._flush_later()

    def close(self, claim: RequestClaim) -> None:
        """Delete the claim of an ended request in the background, unless another router has claimed the id since."""
        self._hinted.pop(claim, None)
        if self._opening.pop(claim, None) is not None:
            return
        self._ended[claim] = None
        if len(self._ended) > _MOST_UNCLOSED:
            # The claim expires with the request's deadline.
            del self._ended[next(iter(self._ended))]
        self._flush_later()

    async def close_all(self) -> None:
        """Close the claims of all ended requests now. If the store is unreachable, they are left to expire."""
        if self._flushing is not None:
            await asyncio.wait({self._flushing})
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (self._opening or self._ended) and await self._flush():
            pass

    async def end(self) -> None:
        """Close all claims and stop the background work."""
        self._has_ended = True
        await self.close_all()

    def check_integrity(self) -> None:
        """Assert that no claim is left. Only for when no request is in flight and the store is reachable."""
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
        self._flushing = asyncio.create_task(self._flush(), name="claims of request ids")

    async def _flush(self) -> bool:
        """Open, update and close one batch of claims. Returns False if the store is unreachable."""
        opening = tuple(itertools.islice(self._opening.items(), _MOST_AT_ONCE))
        ended = tuple(itertools.islice(self._ended, _MOST_AT_ONCE))
        for claim, _ in opening:
            del self._opening[claim]
        # A hint is stored only after its claim.
        hinted = [each for each in self._hinted.items() if each[0] not in self._opening][:_MOST_AT_ONCE]
        for claim, _ in hinted:
            del self._hinted[claim]
        is_away = False
        try:
            holders = await asyncio.gather(*(self._store.claim_request(claim, ttl_s) for claim, (ttl_s, _) in opening))
            for (claim, (_, held)), holder in zip(opening, holders, strict=True):
                if holder is not None and holder.session > claim.session:
                    held()
            if hinted:
                hints = [replace(claim, hint=hint_to_proto(owner).SerializeToString()) for claim, owner in hinted]
                await self._store.update_requests(hints)
            if ended:
                is_away = not await self._store.close_requests(ended)
                if not is_away:
                    for claim in ended:
                        self._ended.pop(claim, None)
        finally:
            self._flushing = None
            if not is_away:
                # Otherwise the next view that has the store tries again.
                self._flush_later()
        return not is_away

    def claim_of(self, request_id: str, session: int, secret: bytes) -> RequestClaim:
        """Build this router's claim of a request id for one session. It contains only a hash of the secret."""
        secret_hash = hashlib.sha256(secret).hexdigest() if secret else ""
        return RequestClaim(request_id, self._router_id, self._router_incarnation, session, secret_hash)

    def _was_heard(self, holder: RequestClaim, since_s: float) -> bool:
        status = self._store.view().instances.get(holder.router_id)
        if status is None or status.record.incarnation != holder.router_incarnation:
            return False
        return time.monotonic() - status.heartbeat_age_s >= since_s
