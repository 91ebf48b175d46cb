"""One answer of a decode leg: from a hold of a prefill instance, or from a prompt that is computed here."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from kaveri.domain.owner import Owner, Ownership
from kaveri.domain.sampling import FinishReason, Logprobs, ResolvedParams
from kaveri.engine.contract import EngineInfo
from kaveri.engine.stopping import barred_token_ids, finish_reason
from kaveri.errors import (
    InvalidArgument,
    KaveriError,
    LayoutMismatch,
    RequestAlreadyExists,
    RequestCancelled,
    RequestNotFound,
    Unavailable,
)
from kaveri.telemetry.logs import get_logger
from services.decode.instance import DecodeInstance
from services.decode.token_streams import TokenStream
from services.instance.hold_params import HoldAt
from services.instance.hold_peers import HoldPeers, PeerHold
from services.instance.leg_metrics import LegMetrics
from services.prefill.requests import Destination, FirstTokenDrawn, PrefillRequest
from services.prefill.role import PrefillRole


@dataclass(frozen=True, slots=True)
class LegRequest:
    """A checked request of a decode leg, with max_tokens and seed set."""

    request_id: str
    token_ids: tuple[int, ...]
    params: ResolvedParams
    deadline_s: float
    """time.monotonic()'s."""
    hold: HoldAt | None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_s - time.monotonic()


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Some tokens of the answer, in order."""

    token_ids: list[int]
    logprobs: list[Logprobs]
    finish: FinishReason | None
    """Set with the last token."""


class _HoldOfNoUse(Exception):
    """The prompt must be computed here."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class DecodeLegs:
    """The decode legs of one instance. For one event loop."""

    def __init__(
        self, info: EngineInfo, prefill: PrefillRole, decode: DecodeInstance, peers: HoldPeers, metrics: LegMetrics
    ) -> None:
        """prefill: of the same engine; it computes what no hold brings."""
        self._info = info
        self._prefill = prefill
        self._decode = decode
        self._peers = peers
        self._metrics = metrics

    async def answer(self, request: LegRequest) -> AsyncGenerator[DrawnTokens, None]:
        """The tokens of the answer from index 0 on, as they are drawn. Closed early, it frees all that the request has,
        here and at the prefill instance.

        Raises RequestCancelled (another caller has given the hold up), InvalidArgument, NoCapacity, Unavailable,
        DeadlineExceeded and RequestAlreadyExists.
        """
        # Before the hold is asked for: it stays for the leg that comes in place of this one.
        self._decode.require_taking()
        ownership = Ownership(Owner(0, 1), f"leg-{secrets.token_hex(16)}")
        # Each answer has a stream of its own: its tokens go to this call and to no other.
        stream = self._decode.owners.streams.open_for_call(ownership.router_id)
        try:
            first = await self._begin(request, ownership, stream)
            yield first
            if first.finish is None:
                async for drawn in _rest(stream):
                    yield drawn
        finally:
            self._decode.abort(request.request_id, ownership, by_router=True)
            self._decode.owners.streams.close(stream)

    async def _begin(self, request: LegRequest, ownership: Ownership, stream: TokenStream) -> DrawnTokens:
        cause, reason = "no_hold", None
        if request.hold is not None:
            try:
                async with self._peers.using(self._peers.located(request.hold)) as peer:
                    return await self._land(request, ownership, peer, stream)
            except _HoldOfNoUse as error:
                cause, reason = error.cause, str(error)
        # Room that was reserved for the hold's KV is free again before room for the prompt is looked for.
        self._decode.abort(request.request_id, ownership, by_router=True)
        # What came of the hold's KV is no part of the other answer.
        stream.unsent.clear()
        self._metrics.recomputes.labels(cause).inc()
        if reason is not None:
            get_logger().info("hold_lost", request_id=request.request_id, cause=cause, reason=reason)
        return await self._compute(request, ownership)

    async def _land(
        self, request: LegRequest, ownership: Ownership, peer: PeerHold, stream: TokenStream
    ) -> DrawnTokens:
        """The first token, with the KV of the prompt here unless the answer ends with it."""
        with _asking():
            held = await peer.resolve(request.token_ids, request.left_s)
        token_id, logprobs = held.first_token
        if token_id in barred_token_ids(request.params, self._info.eos_token_ids, 0):
            raise _HoldOfNoUse("barred_token", "the held token would end the answer before min_tokens")
        if request.params.logprobs is not None and logprobs is None:
            raise _HoldOfNoUse("barred_token", "the held token has no log-probabilities")
        finish = finish_reason(
            request.params, self._info.eos_token_ids, token_id, 0, len(request.token_ids) + 1, self._info.max_model_len
        )
        first = DrawnTokens([token_id], [logprobs] if logprobs is not None else [], finish)
        if finish is not None:
            return first
        try:
            ticket = await self._decode.reserve(
                request.request_id,
                ownership,
                request.token_ids,
                0,
                request.params,
                request.left_s,
                held.layout,
                waits=True,
            )
        except LayoutMismatch as error:
            raise _HoldOfNoUse("push_failed", str(error)) from error
        try:
            with _asking("push_failed"):
                await peer.push(ticket, request.left_s)
        except _HoldOfNoUse:
            if not self._has_landed(ownership, stream):
                raise
            # Only the answer to the push was lost.
        return first

    def _has_landed(self, ownership: Ownership, stream: TokenStream) -> bool:
        """Whether the hold's KV is here, or the answer has ended with it."""
        has_finished = any(request.log.end.finish is not None for request in stream.unsent)
        return has_finished or any(request.ownership == ownership for request in self._decode.landed())

    async def _compute(self, request: LegRequest, ownership: Ownership) -> DrawnTokens:
        """Computes the prompt on this engine, where the answer goes on."""
        accepted = self._prefill.accept(
            request.request_id,
            ownership,
            request.token_ids,
            0,
            request.params,
            request.left_s,
            destination=Destination.HERE,
        )
        try:
            first = await first_token(accepted)
        finally:
            self._prefill.cancel(accepted)
        logprobs = [first.logprobs] if first.logprobs is not None else []
        return DrawnTokens([first.token_id], logprobs, first.finish)


async def first_token(request: PrefillRequest) -> FirstTokenDrawn:
    """Waits until the prompt is computed and, unless it is held, decode has it. Raises the error that it ended with."""
    outbox = request.outbox
    is_held = request.destination is Destination.HOLD
    while await outbox.take():
        if is_held and outbox.first_token is not None:
            break
    first = outbox.first_token
    if first is None:
        raise Unavailable("the prompt's computation has ended without a token")
    return first


async def _rest(stream: TokenStream) -> AsyncGenerator[DrawnTokens, None]:
    while not stream.has_ended:
        for gained in await stream.next_batch():
            end = gained.end
            if end.error:
                raise RequestAlreadyExists(gained.request_id) if end.replaced else end.fault or Unavailable(end.error)
            if gained.token_ids or end.finish is not None:
                yield DrawnTokens(gained.token_ids, gained.logprobs, end.finish)
            if end.finish is not None:
                return
    raise Unavailable("the instance is stopping")


@contextlib.contextmanager
def _asking(failure: str = "unreachable") -> Iterator[None]:
    """What a prefill instance answers about a hold: whether the prompt is to be computed here, or the request fails."""
    try:
        yield
    except RequestNotFound as error:
        raise _HoldOfNoUse("hold_gone", str(error)) from error
    except RequestCancelled:
        raise
    except KaveriError as error:
        if isinstance(error, InvalidArgument) and failure != "push_failed":
            # The hold is another prompt's.
            raise
        raise _HoldOfNoUse(failure, str(error)) from error
