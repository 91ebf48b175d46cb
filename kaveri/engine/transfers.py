"""KV transfers of an engine's requests: maps transfers to requests, makes tickets, and handles the ends of transfers.

Leaves bytes to the plane (kv_plane.py), and blocks and requests to the engine's account. Calls neither the plane nor a
future with the engine's lock held.

    push_to ── plane.open_push ── PushAccepted: the request ends, KvPushed | PushFailed: KvPushFailed
    reserve ── grant ── plane.grant ── Granted: the ticket ── TransferLanded: Landed | TransferReleased: LandingFailed

A request may end while its transfer is open. Its blocks are free once the transfer has ended, too.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kaveri.engine.contract import (
    EngineInfo,
    EngineKey,
    EngineRequest,
    KvPushed,
    KvPushFailed,
    Landed,
    LandingFailed,
    RequestFailed,
)
from kaveri.engine.copier import Owner
from kaveri.engine.kv_plane import Granted, KvPlane, PlaneEvent, first_token_of
from kaveri.engine.shared import Shared
from kaveri.errors import EngineError, InvalidArgument, KaveriError, NoCapacity, RequestCancelled
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.transfer.flow import KvFlow
from kaveri.kv.transfer.receiver import TransferLanded, TransferMarked, TransferReleased
from kaveri.kv.transfer.sender import PushAccepted, PushExtended, PushFailed, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket, require_pushable, ticket_parts
from kaveri.seconds import require_seconds


class TransferOwner(Owner, Protocol):
    """A request whose KV can be pushed or received."""

    @property
    def transfer_id(self) -> bytes | None:
        """Id of the open transfer that may touch the request's blocks; None if there is none."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def held_tokens(self) -> int | None:
        """Tokens whose KV is received, if the request resumes from a replica; None if the whole prompt's is."""

    @property
    def kept_as(self) -> ReplicaKey | None:
        """Key of the replica to make of the request's full blocks once its push is accepted; None: free them."""

    @property
    def source(self) -> Any:
        """Handle by which the KV data path (KvPlane) pushes the request's blocks."""


OwnerT = TypeVar("OwnerT", bound=TransferOwner)


class TransferAccount(Protocol[OwnerT]):
    """Transfers' view of the engine's requests and their blocks. The caller holds the engine's lock."""

    prefills: dict[EngineKey, OwnerT]
    """Live requests of the prefill side."""

    def open_decode(self, request: EngineRequest, held_tokens: int | None) -> OwnerT:
        """Add a request to decode. held_tokens: those with KV in a replica. Raises RequestAlreadyExists, NoCapacity."""

    def touch(self, owner: OwnerT, transfer_id: bytes | None) -> None:
        """Record the transfer that may touch the request's blocks; None after it has ended, so that blocks of an ended
        request may be reused."""

    def land(self, owner: OwnerT, first_token_id: int | None) -> str | None:
        """Record that all KV of a request has arrived. Returns why it cannot be decoded; None if it can.

        first_token_id: drawn by the prefill engine; None for a resumed request.
        """

    def end(self, owner: OwnerT) -> None:
        """End a request. Its blocks are freed once no transfer can touch them."""

    def keep(self, owner: OwnerT) -> int:
        """Make the replica `owner.kept_as` of a request's full blocks. Returns its tokens; 0 if there is no room."""

    def abort(self, key: EngineKey) -> tuple[OwnerT | None, OwnerT | None]:
        """End a request on the prefill and the decode side. Returns the two, each None if it was not live there."""


@dataclass(frozen=True, slots=True)
class _AwaitedTicket:
    future: "Future[Ticket]"
    expires_at_s: float
    source: KvLayout
    """KV layout of the engine that will push."""


class Transfers(Generic[OwnerT]):
    """Pushes and landings (incoming pushes) of one engine's requests. Thread-safe.

    info: of the engine; its endpoints are not read. now_s, token_bytes: clock and randomness, replaced in simulations.
    """

    def __init__(
        self,
        info: EngineInfo,
        shared: Shared,
        account: TransferAccount[OwnerT],
        *,
        now_s: Callable[[], float] = time.monotonic,
        token_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._info = info
        self._shared = shared
        self._account = account
        self._now_s = now_s
        self._token_bytes = token_bytes
        self._pushes: dict[bytes, OwnerT] = {}
        self._landings: dict[bytes, tuple[OwnerT, Ticket]] = {}
        self._awaited: dict[OwnerT, _AwaitedTicket] = {}
        self._plane: KvPlane

    def attach(self, plane: KvPlane) -> None:
        """Set the KvPlane, which moves the KV and reports to hear(). Called before any other method."""
        self._plane = plane

    @property
    def endpoints(self) -> tuple[KvEndpoint, ...]:
        """Addresses that accept pushes: rank 0's in order of preference, then rank 1's, and so on."""
        return tuple(endpoint for of_rank in self._plane.endpoints for endpoint in of_rank)

    def flow(self) -> KvFlow:
        return self._plane.flow()

    def close(self) -> None:
        """End all transfers; futures of tickets that are still awaited fail. Idempotent."""
        self._plane.close()
        self._shared.fail_promises("it is closed")

    def forget(self) -> None:
        """Remove all records of transfers, which have ended. The caller holds the lock."""
        self._pushes.clear()
        self._landings.clear()
        self._awaited.clear()

    def abort(self, key: EngineKey) -> None:
        awaited: _AwaitedTicket | None = None
        with self._shared.lock:
            if self._shared.closing:
                return
            prefill, decode = self._account.abort(key)
            push_id = prefill.transfer_id if prefill is not None else None
            landing_id = decode.transfer_id if decode is not None else None
            if decode is not None:
                awaited = self._take_awaited(decode)
        if awaited is not None:
            awaited.future.set_exception(RequestCancelled(key.request_id))
        if push_id is not None:
            self._plane.abort_push(push_id)
        if landing_id is not None:
            self._plane.revoke(landing_id)

    # Pushes.

    def push_to(self, key: EngineKey, ticket: Ticket) -> None:
        require_pushable(self._info.layout, ticket)
        with self._shared.lock:
            self._shared.require_alive()
            owner = self._account.prefills.get(key)
            if owner is None:
                return
            if owner.transfer_id is not None:
                raise InvalidArgument("ticket", ticket.transfer_id.hex(), "given after the push before it has failed")
            refusal = None
            pushed_count = ticket.layout.block_count(owner.prompt_tokens) - ticket.first_block
            if ticket.transfer_id in self._pushes:
                refusal = "the ticket is in use by another push"
            elif (ticket.token_count, len(ticket.block_ids)) != (owner.prompt_tokens, pushed_count):
                refusal = f"the ticket is for {ticket.token_count} tokens, the request has {owner.prompt_tokens}"
            if refusal is not None:
                self._shared.put(KvPushFailed(key, refusal))
            else:
                self._account.touch(owner, ticket.transfer_id)
                self._pushes[ticket.transfer_id] = owner
        if refusal is None:
            self._plane.open_push(owner.source, ticket)
            with self._shared.lock:
                ended = owner.done
            # The abort came before the plane knew of the push, and was ignored there.
            if ended:
                self._plane.abort_push(ticket.transfer_id)
        self._shared.publish()

    # Landings.

    def reserve(
        self,
        request: EngineRequest,
        expires_in_s: float,
        source: KvLayout | None = None,
        held_tokens: int | None = None,
    ) -> "tuple[OwnerT | None, Future[Ticket]]":
        """Add a request to decode, as DecodeEngine.reserve(); return it and the future of the ticket for pushing its
        KV.

        The request is None if the future has failed; otherwise the caller must call grant() or refuse().
        """
        try:
            self._info.require_servable(request)
            if held_tokens is not None:
                self._info.require_held_tokens(request, held_tokens)
            require_seconds("expires_in_s", expires_in_s)
            if not self._plane.endpoints:
                raise EngineError("this engine takes no pushes")
            source = source or self._info.layout
            self._info.layout.require_mappable(source)
            with self._shared.lock:
                self._shared.require_alive()
                owner = self._account.open_decode(request, held_tokens)
                awaited = _AwaitedTicket(self._shared.promise(), self._now_s() + expires_in_s, source)
                self._awaited[owner] = awaited
        except KaveriError as error:
            failed: Future[Ticket] = Future()
            failed.set_exception(error)
            return None, failed
        return owner, awaited.future

    def grant(self, owner: OwnerT, block_ids: Sequence[int], first_block: int = 0) -> None:
        """Lease blocks to the incoming transfer of a reserved request, and make the ticket that reserve() promised.

        block_ids: from the request's block first_block on; those that receive no KV are left out of the ticket.
        """
        endpoints = self._plane.endpoints
        with self._shared.lock:
            awaited = self._awaited.get(owner)
            if owner.done or awaited is None:
                return
            layout, token_count = self._info.layout, owner.held_tokens or owner.prompt_tokens
            parts = ticket_parts(awaited.source, layout, endpoints)
            ticket = Ticket(
                transfer_id=self._token_bytes(16),
                secret=self._token_bytes(16),
                epoch=self._info.epoch,
                endpoints=() if parts else endpoints[0],
                block_ids=tuple(block_ids[: layout.block_count(token_count) - first_block]),
                token_count=token_count,
                expires_in_s=max(0.0, awaited.expires_at_s - self._now_s()),
                layout=layout,
                first_block=first_block,
                parts=parts,
            )
            self._account.touch(owner, ticket.transfer_id)
            self._landings[ticket.transfer_id] = owner, ticket
        self._plane.grant(ticket)
        with self._shared.lock:
            ended = owner.done
        # The abort came before the plane knew of the transfer, and was ignored there.
        if ended:
            self._plane.revoke(ticket.transfer_id)

    def refuse(self, owner: OwnerT, error: KaveriError) -> None:
        """End a live request with `error`: its reserve() fails if pending, else RequestFailed is sent."""
        with self._shared.lock:
            if owner.done:
                return
            awaited = self._take_awaited(owner)
            if awaited is None:
                self._shared.put(RequestFailed(owner.key, str(error), is_final=not isinstance(error, NoCapacity)))
            self._account.end(owner)
        if awaited is not None:
            awaited.future.set_exception(error)
        self._shared.publish()

    # Events of the plane.

    def hear(self, event: PlaneEvent) -> None:
        match event:
            case Granted(transfer_id):
                with self._shared.lock:
                    owner, ticket = self._landings.get(transfer_id, (None, None))
                    awaited = self._take_awaited(owner) if owner is not None else None
                if awaited is not None and ticket is not None:
                    awaited.future.set_result(ticket)
            case PushAccepted() | PushFailed():
                self._on_push(event)
            case TransferLanded() | TransferReleased():
                self._on_landing(event)
            case PushMarked() | PushExtended() | TransferMarked():
                pass  # only transfers of replicas have marks
        self._shared.publish()

    def _on_push(self, event: PushAccepted | PushFailed) -> None:
        with self._shared.lock:
            owner = self._pushes.pop(event.transfer_id, None)
            if owner is None:
                return
            self._account.touch(owner, None)
            if owner.done:
                return
            if isinstance(event, PushAccepted):
                kept_tokens = self._account.keep(owner) if owner.kept_as is not None else 0
                kept_as = owner.kept_as if kept_tokens else None
                self._account.end(owner)
                self._shared.put(KvPushed(owner.key, event.kv_bytes, event.transport, kept_as, kept_tokens))
            else:
                self._shared.put(KvPushFailed(owner.key, event.reason))

    def _on_landing(self, event: TransferLanded | TransferReleased) -> None:
        with self._shared.lock:
            owner, _ = self._landings.pop(event.transfer_id, (None, None))
            if owner is None:
                return
            self._account.touch(owner, None)
            if owner.done:
                return
            awaited = self._take_awaited(owner)
            outcome: Landed | LandingFailed | RequestFailed
            if isinstance(event, TransferReleased):
                outcome = LandingFailed(owner.key, event.reason)
            else:
                first_token_id, problem = None, None
                if owner.held_tokens is None:
                    first_token_id = first_token_of(event.note)
                    # The sender counts it as accepted, so only this side can report the loss.
                    if first_token_id is None or first_token_id >= self._info.vocab_size:
                        problem = "the hand-over names no token of this model"
                problem = problem or self._account.land(owner, first_token_id)
                outcome = Landed(owner.key, event.kv_bytes, first_token_id)
                if problem is not None:
                    outcome = RequestFailed(owner.key, problem)
            if awaited is not None or not isinstance(outcome, Landed):
                self._account.end(owner)
            if awaited is None:
                self._shared.put(outcome)
        if awaited is not None:
            # The ticket was never passed on.
            reason = event.reason if isinstance(event, TransferReleased) else "it landed before it was granted"
            awaited.future.set_exception(EngineError(f"no ticket could be granted: {reason}"))

    def _take_awaited(self, owner: OwnerT) -> _AwaitedTicket | None:
        """Remove and return a request's pending ticket for the caller to resolve; None if absent. Needs the lock."""
        awaited = self._awaited.pop(owner, None)
        if awaited is None or awaited.future not in self._shared.promises:
            return None
        self._shared.promises.remove(awaited.future)
        return awaited
