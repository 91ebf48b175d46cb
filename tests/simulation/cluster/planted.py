"""Tests of the tests: bugs that the simulation must find. Each changes one decision of a service or of the engine.

A planted bug is a context manager around a whole run; nothing of it is left afterwards. To add one: write a function
below that yields within `replaced`, and decorate it with `planted`. Bugs of copies: planted_replicas.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kaveri.cluster import memory_store
from kaveri.cluster.membership import Membership
from kaveri.cluster.monitored_membership import MonitoredMembership
from kaveri.domain import owner as owners
from kaveri.engine.stepwise import residency as stepwise_residency
from kaveri.engine.stepwise.lifecycle import Lifecycle
from kaveri.engine.token_rules import TokenRules
from kaveri.feeds import feed as feeds
from kaveri.lives import decoding, prompt
from kaveri.lives import request as request_life
from kaveri.lives import request_values as lives
from kaveri.policy.retry import Setback
from kaveri.text import answer as router_answer
from kaveri.text import detokenizer as router_detokenizer
from services.decode import instance as decode_instance
from services.prefill import decode_placer
from services.prefill import role as prefill_role
from services.router import claims, prefill_attempts, subscriptions, token_feeds
from services.router import requests as router_requests
from tests.simulation.cluster.planting import nothing, nothing_async, planted, replaced
from tests.simulation.cluster.store import SimulatedStore


def _step_changed(change: Callable[[Any, Any], tuple[Any, Any]]) -> AbstractContextManager[None]:
    """The router takes change(state, event) into account, not what happened."""

    def make(original: Any) -> Any:
        def step(state: Any, event: Any, now_s: float) -> Any:
            return original(*change(state, event), now_s)

        return step

    return replaced(router_requests, "step", make)


_OWNED = (lives.Placed, lives.Decoding)


def _from_its_decode(state: Any, event: Any) -> Any:
    """The event as if the decode instance that the attempt is placed on had sent it."""
    return event._replace(source=state.decode) if isinstance(state, _OWNED) else event


def _moved(state: Any, event: Any) -> Any:
    """The state as if decode had begun on the instance that is named now."""
    if isinstance(state, lives.Decoding) and isinstance(event, lives.DecodeNamed):
        return lives.Decoding(state.attempt, state.next_index, event.decode, state.leg)
    return state


# The router: attempts and tokens.


@planted
def attempt_check_removed() -> Iterator[None]:
    """The router takes the tokens of former attempts, wherever they were placed."""

    def change(state: Any, event: Any) -> Any:
        if isinstance(event, lives.TokensReceived) and isinstance(state, _OWNED):
            event = _from_its_decode(state, event._replace(attempt=state.attempt.number))
        return _moved(state, event), event

    with _step_changed(change):
        yield


@planted
def index_ignored() -> Iterator[None]:
    """The router appends tokens in the order in which they come, wherever they belong."""

    def change(state: Any, event: Any) -> Any:
        if isinstance(event, lives.TokensReceived) and isinstance(state, _OWNED):
            event = event._replace(first_index=state.next_index)
        return state, event

    with _step_changed(change):
        yield


@planted
def aborts_never_sent() -> Iterator[None]:
    """The router does not tell decode that a request has ended."""
    with replaced(token_feeds.TokenFeeds, "_send_aborts", lambda _: nothing_async):
        yield


@planted
def broken_stream_waited_for_in_vain() -> Iterator[None]:
    """The router keeps waiting for attempts of a decode instance that left the cluster or has restarted."""

    def make(original: Any) -> Any:
        def stop(self: Any, *args: Any) -> Any:
            self.ties = {}
            return original(self, *args)

        return stop

    with replaced(subscriptions.Subscription, "stop", make):
        yield


@planted
def stream_goes_on_where_it_broke() -> Iterator[None]:
    """A new token stream does not name its requests: what was on its way over the broken one is not repeated."""

    def make(original: Any) -> Any:
        def open_stream(self: Any) -> list[Any]:
            original(self)
            return []

        return open_stream

    with replaced(subscriptions.Subscription, "open", make):
        yield


@planted
def end_wakes_no_client() -> Iterator[None]:
    """Lost wake-up: the client's RPC does not hear that the request has ended."""

    def make(original: Any) -> Any:
        def wake(self: Any) -> None:
            if not isinstance(self.state, lives.Ended):
                original(self)

        return wake

    with replaced(router_requests.RequestEntry, "wake", make):
        yield


@planted
def early_tokens_dropped() -> Iterator[None]:
    """The router forgets tokens of decode that come before the first token of prefill."""

    def change(state: Any, event: Any) -> Any:
        if isinstance(event, lives.FirstTokenReported) and isinstance(state, lives.Prefilling | lives.Placed):
            state = replace(state, held=lives.NOTHING_HELD)
        return state, event

    with _step_changed(change):
        yield


@planted
def retry_draws_another_seed() -> Iterator[None]:
    """The second attempt of a request samples with another seed."""

    def make(original: Any) -> Any:
        async def prefill(self: Any, entry: Any, attempt: Any, *args: Any) -> None:
            if attempt.number > 1:
                params = replace(entry.accepted.params, seed=(entry.accepted.params.seed + 1) % 2**64)
                entry.accepted = replace(entry.accepted, params=params)
            await original(self, entry, attempt, *args)

        return prefill

    with replaced(prefill_attempts.PrefillAttempts, "send", make):
        yield


@planted
def retry_forgets_generated_tokens() -> Iterator[None]:
    """The second attempt of a request is computed on the prompt alone, without the tokens that the client has."""

    def make(messages: Any) -> Any:
        def prefill_request(*, token_ids: Any, generated_count: int, **fields: Any) -> Any:
            prompt = token_ids[: len(token_ids) - generated_count]
            return messages.SubmitRequest(token_ids=prompt, generated_count=generated_count, **fields)

        return SimpleNamespace(**vars(messages) | {"SubmitRequest": prefill_request})

    with replaced(prefill_attempts, "prefill_pb2", make):
        yield


@planted
def ended_request_keeps_its_claim() -> Iterator[None]:
    """The router leaves ended requests in the store's table."""
    with replaced(claims.RequestClaims, "close", lambda _: nothing):
        yield


@planted
def held_text_dropped_at_the_end() -> Iterator[None]:
    """The text that waits for a stop text to complete is dropped when the answer ends."""
    with replaced(router_detokenizer.Detokenizer, "flush", lambda _: lambda self: ""):
        yield


# Prefill.


@planted
def failed_push_unnoticed() -> Iterator[None]:
    """Prefill does not look for another place when a push has failed."""
    with replaced(decode_placer.DecodePlacer, "push_failed", lambda _: nothing):
        yield


@planted
def ended_life_keeps_its_place() -> Iterator[None]:
    """Prefill does not end the hand-over of a request that has ended."""

    def make(original: Any) -> Any:
        def step(*args: Any) -> Any:
            state, actions = original(*args)
            return state, [action for action in actions if not isinstance(action, prompt.EndHandOver)]

        return step

    with replaced(prefill_role, "step", make):
        yield


# Decode.


@planted
def reservation_never_expires() -> Iterator[None]:
    """Room for KV that never comes is kept until the request's deadline."""

    def make(original: Any) -> Any:
        def reserve(self: Any, *args: Any, **named: Any) -> Any:
            self._terms = replace(self._terms, reservation_ttl_s=86_400.0)
            return original(self, *args, **named)

        return reserve

    with replaced(decode_instance.DecodeInstance, "reserve", make):
        yield


@planted
def orphans_never_end() -> Iterator[None]:
    """Decode goes on for a router whose token stream is gone, whatever the grace."""
    with replaced(decode_instance.DecodeInstance, "_router_gone", lambda _: nothing):
        yield


@planted
def prompts_die_with_their_router() -> Iterator[None]:
    """Prefill cancels a request when its router is gone, although the client may re-attach."""

    def make(original: Any) -> Any:
        def close(self: Any, feed: Any) -> None:
            original(self, feed)
            for phase in self._phases:
                if isinstance(phase.router_gone.__self__, prefill_role.PrefillRole):
                    phase.router_gone(feed.router_id)

        return close

    with replaced(feeds.RouterFeeds, "close", make):
        yield


@planted
def text_offset_forgotten() -> Iterator[None]:
    """A router that takes a request over sends text that the client has."""

    def make(original: Any) -> Any:
        async def go_on_after(self: Any, token_ids: Any, characters: int, *args: Any) -> int:
            return int(await original(self, token_ids, 0, *args))

        return go_on_after

    with replaced(router_answer.Answer, "go_on_after", make):
        yield


@planted
def later_session_draws_another_seed() -> Iterator[None]:
    """A request that is placed again in a later session samples with another seed."""

    def make(original: Any) -> Any:
        async def prefill(self: Any, entry: Any, attempt: Any, *args: Any) -> None:
            if entry.accepted.session:
                params = replace(entry.accepted.params, seed=(entry.accepted.params.seed + 1) % 2**64)
                entry.accepted = replace(entry.accepted, params=params)
            await original(self, entry, attempt, *args)

        return prefill

    with replaced(prefill_attempts.PrefillAttempts, "send", make):
        yield


@planted
def abort_ignores_sessions() -> Iterator[None]:
    """A late Abort of an earlier session ends what a later one has attached."""

    def make(original: Any) -> Any:
        def comparable(self: Any, held: Any) -> Any:
            owner = original(self, held)
            return owner and owner._replace(session=held.term.session)

        return comparable

    with replaced(owners.Ownership, "comparable", make):
        yield


@planted
def freed_seat_stays_empty() -> Iterator[None]:
    """A landed request is not admitted when an aborted one leaves its seat in the batch."""

    def make(original: Any) -> Any:
        def follow(self: Any, *args: Any, **named: Any) -> None:
            self._admit = nothing
            try:
                original(self, *args, **named)
            finally:
                del self._admit

        return follow

    with replaced(decode_instance.DecodeInstance, "_follow", make):
        yield


# Bugs that the simulation, or attacks, have found: each undoes its fix.


@planted
def abort_of_a_running_request_unanswered() -> Iterator[None]:
    """Decode ends a request that prefill gives up after its landing, and does not tell the router."""

    def make(original: Any) -> Any:
        def ended(state: Any, outcome: Any, *args: Any, **named: Any) -> Any:
            if outcome is decoding.Outcome.ABORTED:
                named["tell"] = None
            return original(state, outcome, *args, **named)

        return ended

    with replaced(decoding, "_ended", make):
        yield


@planted
def replaced_owner_not_told() -> Iterator[None]:
    """Decode ends a request for another router's request with the same id, and does not tell the former router."""

    def make(original: Any) -> Any:
        def ended(state: Any, outcome: Any, *args: Any, **named: Any) -> Any:
            if outcome is decoding.Outcome.REPLACED:
                named["tell"] = None
            return original(state, outcome, *args, **named)

        return ended

    with replaced(decoding, "_ended", make):
        yield


@planted
def late_placement_not_attached() -> Iterator[None]:
    """The router waits for tokens that were on their way over a stream that broke before it heard of the placement."""
    with replaced(token_feeds.TokenFeeds, "_attach_if_due", lambda _: nothing):
        yield


@planted
def hint_trusted_without_incarnation() -> Iterator[None]:
    """The router waits for a request at whichever life of the named instance there is, and does not ask it."""

    def make(original: Any) -> Any:
        def tie(self: Any, tie: Any) -> None:
            original(self, tie)
            tie.needs_attach = False

        return tie

    with (
        replaced(subscriptions.Subscription, "is_of_life", lambda _: lambda subscription, tie: True),
        replaced(subscriptions.Subscription, "tie", make),
    ):
        yield


@planted
def two_instances_in_one_attempt() -> Iterator[None]:
    """The router takes the tokens of two decode instances that both have the KV of one attempt."""

    def change(state: Any, event: Any) -> Any:
        if isinstance(event, lives.TokensReceived):
            event = _from_its_decode(state, event)
        return _moved(state, event), event

    with _step_changed(change):
        yield


@planted
def claims_of_dead_routers_kept() -> Iterator[None]:
    """The ids of a dead router's requests stay taken until their deadline."""
    with replaced(memory_store.MemoryCluster, "is_registered", lambda _: lambda *_: True):
        yield


@planted
def refused_writes_end_leases() -> Iterator[None]:
    """A store that answers, and refuses heartbeats, does not count as lost."""

    def make(_: Any) -> Any:
        def tick(self: Any) -> None:
            self._membership.tick()

        return tick

    with (
        replaced(SimulatedStore, "_tick", make),
        replaced(Membership, "store_lost", lambda _: nothing),
        replaced(MonitoredMembership, "store_lost", lambda _: nothing),
    ):
        yield


@planted
def refused_connections_cost_attempts() -> Iterator[None]:
    """Attempts run out while the only prefill instance is away, or its queue is full."""
    with replaced(request_life, "_setback", lambda _: lambda *_: Setback.LOST):
        yield


@planted
def loss_of_the_first_token_ignored() -> Iterator[None]:
    """The router takes the end of a prefill stream for no loss once decode has drawn, first token or not."""

    def make(original: Any) -> Any:
        def step(state: Any, event: Any, now_s: float) -> Any:
            waits = isinstance(state, lives.Prefilling | lives.Placed) and state.held.events
            if waits and isinstance(event, lives.PrefillEnded):
                return state, ()
            return original(state, event, now_s)

        return step

    with replaced(router_requests, "step", make):
        yield


# Engine and KV.


@planted
def quarantine_skipped() -> Iterator[None]:
    """Blocks of an ended request are free although a transfer can still write to them."""

    def make(_: Any) -> Any:
        def settle(self: Any, sequence: Any) -> None:
            if sequence.in_step:
                self._quarantined.add(sequence)
                return
            self._quarantined.discard(sequence)
            self.residency.allocator.release(sequence)
            self._on_work()

        return settle

    with replaced(Lifecycle, "_settle", make):
        yield


@planted
def preempted_kv_counts_as_computed() -> Iterator[None]:
    """A preempted request goes on as if its KV were still there."""

    def make(original: Any) -> Any:
        def give_up_blocks(self: Any, victim: Any, preempted: Any) -> None:
            computed = victim.computed
            original(self, victim, preempted)
            victim.computed = computed

        return give_up_blocks

    with replaced(stepwise_residency.Residency, "_give_up_blocks", make):
        yield


# What a request asks of its tokens.


def _forgetting(is_wanted: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Rules that know nothing of the answer before their first draw."""

    def make(original: Any) -> Any:
        def changes(self: Any, index: int) -> Any:
            if self._seen < 0 and is_wanted(self._params):
                self._begin()
                self._seen = index
            return original(self, index)

        return changes

    return replaced(TokenRules, "changes", make)


@planted
def penalties_count_from_the_resume_on() -> Iterator[None]:
    """An engine that goes on with a request penalizes only the tokens that it draws itself."""
    with _forgetting(lambda params: params.grammar is None):
        yield


@planted
def grammar_begins_anew_at_a_resume() -> Iterator[None]:
    """An engine that goes on with a request has its grammar begin anew."""
    with _forgetting(lambda params: params.grammar is not None):
        yield
