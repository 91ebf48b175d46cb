"""Planted bugs of fields that guard identity or order: each leaves one comparison out. See planted.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kaveri.client.received import Received
from kaveri.cluster.membership import Membership
from kaveri.cluster.memory_store import MemoryCluster
from kaveri.lives import request as request_life
from kaveri.text.answer import Answer
from services.decode.requests import AnswerLog
from services.router.token_feeds import TokenFeeds
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.planting import nothing, planted, replaced


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
    """The router does not name the life of the instance that it attaches to."""

    def make(original: Any) -> Any:
        async def attach(self: Any, record: Any, *args: Any, **named: Any) -> Any:
            return await original(self, replace(record, incarnation=0), *args, **named)

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


@planted
def new_life_unnoticed() -> Iterator[None]:
    """A process treats heartbeats of an instance's new life as those of its former one."""

    def make(original: Any) -> Any:
        def learn(self: Any, record: Any, *args: Any, **named: Any) -> None:
            member = self._members.get(record.instance_id)
            original(self, record if member is None else member.record, *args, **named)

        return learn

    with replaced(Membership, "learn", make):
        yield


@planted
def claims_of_former_lives_kept() -> Iterator[None]:
    """The store keeps the claims of a router's former life while a later life of it is registered."""

    def make(original: Any) -> Any:
        def is_registered(self: Any, instance_id: str, incarnation: int) -> bool:
            held = self._held.get(instance_id)
            return bool(original(self, instance_id, incarnation if held is None else held.record.incarnation))

        return is_registered

    with replaced(MemoryCluster, "is_registered", make):
        yield


@planted
def repeated_tokens_kept() -> Iterator[None]:
    """A client that reads at a decode instance keeps tokens that it has already, as if they came next."""

    def make(original: Any) -> Any:
        def rest_of(self: Any, response: Any) -> Any:
            response.index = len(self.token_ids)
            return original(self, response)

        return rest_of

    with replaced(Received, "rest_of", make):
        yield


@planted
def repeated_text_kept() -> Iterator[None]:
    """A client that reads at a decode instance keeps text that it has already, as if it came next."""

    def make(original: Any) -> Any:
        def rest_of(self: Any, response: Any) -> Any:
            response.first_character = self.characters
            return original(self, response)

        return rest_of

    with replaced(Received, "rest_of", make):
        yield


@planted
def prompt_positions_ignored() -> Iterator[None]:
    """The router appends what is said of a prompt in the order in which it comes, wherever it belongs."""

    def make(original: Any) -> Any:
        def append_prompt(self: Any, first: int, entries: Any) -> None:
            original(self, self._prompt.reported_count, entries)

        return append_prompt

    with replaced(Answer, "append_prompt", make):
        yield


@planted
def answer_goes_on_where_it_stopped() -> Iterator[None]:
    """Decode sends a router that asks for an answer only what none was sent, whatever index it names."""
    with replaced(AnswerLog, "send_from", lambda _: nothing):
        yield


@planted
def landed_before_its_digest() -> Iterator[None]:
    """Decode goes on with the KV of a prompt without a look at its digest."""

    def make(original: Any) -> Any:
        def problem(self: Any, landing: Any, *args: Any) -> str | None:
            found: str | None = original(self, landing, *args)
            is_digest = found is not None and found.startswith("wrong digest")
            return None if is_digest and not landing.ticket.is_open else found

        return problem

    with replaced(SimulatedReceiver, "_problem", make):
        yield
