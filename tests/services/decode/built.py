"""Builds requests and their owners for a decode instance without an engine."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.engine.contract import EngineKey, EngineRequest, TokenStep
from kaveri.feeds.feed import RouterFeed, RouterFeeds
from kaveri.lives.decoding import InLine, RequestTimes, State
from kaveri.policy.growth import BatchMember
from services.decode.metrics import DecodeMetrics
from services.decode.owners import RequestOwners
from services.decode.requests import AnswerLog, DecodeRequest, GainedTokens

WAIT_S = 60.0
PROMPT = tuple(range(1, 11))
SERIALS = itertools.count(1)
ROUTERS = Ownership(Term(0, 1), "router")


def built_request(
    request_id: str = "r", ownership: Ownership = ROUTERS, state: State | None = None, **params: Any
) -> DecodeRequest:
    engine_request = EngineRequest(EngineKey(request_id, next(SERIALS)), PROMPT, 0, ResolvedParams(**params))
    state, log = state or InLine(stays=False), AnswerLog(1, 1)
    return DecodeRequest(request_id, engine_request, ownership, 0.0, 60.0, BatchMember(10), state, log)


def built_owners(
    *requests: DecodeRequest, grace_s: float = 10.0, gone: Callable[[str], None] = lambda name: None
) -> RequestOwners:
    owners = RequestOwners(grace_s, gone, DecodeMetrics(CollectorRegistry()), None, RouterFeeds(grace_s))
    for request in requests:
        owners.add(request)
    return owners


def token(request: DecodeRequest, index: int, finish: FinishReason | None = None) -> TokenStep:
    return TokenStep(request.engine_request.key, index, 100 + index, None, finish)


def gain(owners: RequestOwners, request: DecodeRequest, index: int, finish: FinishReason | None = None) -> None:
    times = RequestTimes(0.1, 0.2, 0) if finish is not None else None
    owners.gain(request, token(request, index, finish), times)


async def next_batch(feed: RouterFeed, beat_s: float = 2 * WAIT_S) -> list[GainedTokens]:
    news = await asyncio.wait_for(feed.take(beat_s), WAIT_S)
    requests: list[Any] = [each for each in news if isinstance(each, DecodeRequest)]
    taken = {each: each.log.take(each.request_id, each.ownership.term, each.reader is not None) for each in requests}
    return [taken.get(each, each) for each in news]
