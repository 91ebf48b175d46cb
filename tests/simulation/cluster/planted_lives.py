"""Planted bugs of fields that guard identity or order: each leaves one comparison out. See planted.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kaveri.lives import request as request_life
from services.router.token_feeds import TokenFeeds
from tests.simulation.cluster.planting import planted, replaced


class _AnyOther(int):
    """A number that `!=` finds different from none."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return False


def _unguarded(record: Any) -> Any:
    return replace(record, incarnation=_AnyOther(record.incarnation))


@planted
def stream_of_any_life() -> Iterator[None]:
    """The router reads a token stream without regard to which life of the instance has answered."""

    def make(original: Any) -> Any:
        async def read(self: Any, subscription: Any, record: Any) -> None:
            await original(self, subscription, _unguarded(record))

        return read

    with replaced(TokenFeeds, "_read", make):
        yield


@planted
def attached_at_any_life() -> Iterator[None]:
    """The router takes an answer to Attach without regard to which life of the instance has answered."""

    def make(original: Any) -> Any:
        async def attach(self: Any, record: Any, *args: Any, **named: Any) -> Any:
            return await original(self, _unguarded(record), *args, **named)

        return attach

    with replaced(TokenFeeds, "attach", make):
        yield


@planted
def overlap_appended_twice() -> Iterator[None]:
    """The router appends the last token that it has once more when tokens come that overlap with the answer."""

    def make(original: Any) -> Any:
        def taken(state: Any, event: Any, now_s: float) -> Any:
            seen = min(state.next_index - event.first_index, len(event.token_ids))
            if seen > 0:
                kept = slice(seen - 1, None)
                logprobs, first_index = event.logprobs[kept], state.next_index
                event = event._replace(token_ids=event.token_ids[kept], logprobs=logprobs, first_index=first_index)
            return original(state, event, now_s)

        return taken

    with replaced(request_life, "_taken", make):
        yield
