"""Decides when a request asks which decode instance for KV blocks, and where it queues. Pure: no clock, no I/O."""

import enum
import random
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple

from kaveri.domain.view import ClusterView, Phase, ViewedInstance, takes_pushes
from kaveri.errors import InvalidArgument, KaveriError, LayoutMismatch
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.demand import Demand
from kaveri.policy.placement import AnyDecodePlacement, blocks_there, choose_decode, choose_line, largest_prompt
from kaveri.policy.unconfirmed import KeyT, UnconfirmedWork


class PlaceSearch(enum.Enum):
    """When a prefill instance starts to search a decode instance for a prompt."""

    AT_START = enum.auto()
    """At the first chunk, as soon as the length prediction has arrived or is known to be late."""
    AFTER_FIRST_CHUNK = enum.auto()
    AFTER_FIRST_TOKEN = enum.auto()


def place_search(token_count: int, chunk_tokens: int, draws_more: bool, at_first_token: bool) -> PlaceSearch:
    """Return when to start the search for a decode instance. token_count, chunk_tokens: tokens to compute, in total and
    per chunk. An earlier search than at the first token gains nothing if decode has no tokens to sample (draws_more is
    False) or no KV will be pushed (at_first_token)."""
    if at_first_token or not draws_more:
        return PlaceSearch.AFTER_FIRST_TOKEN
    # A prompt of one chunk has no second chunk to overlap the push with. With its place found during its computation,
    # the push can begin with the first layer instead of after the last.
    return PlaceSearch.AT_START if token_count <= chunk_tokens else PlaceSearch.AFTER_FIRST_CHUNK


def draws_more(token_count: int, generated_count: int, max_tokens: int, max_model_len: int) -> bool:
    """Return True if more tokens may follow the next one. token_count: prompt plus `generated_count` answer tokens so
    far. max_tokens: limit of the whole answer."""
    return generated_count + 1 < max_tokens and token_count + 1 < max_model_len


class Seeker(NamedTuple, Generic[KeyT]):
    """Request that searches for KV blocks on a decode instance, and the state of its search."""

    key: KeyT
    token_count: int
    """Number of tokens whose KV is pushed."""
    predicted_tokens: int = 0
    """Lower bound of the predicted final length, prompt plus answer. 0: unknown."""
    heavy: bool = False
    waits_at: str | None = None
    """Id of the decode instance in whose queue the request waits."""
    unfit: Mapping[str, KaveriError] = MappingProxyType({})
    """Instances that can never take the request: errors by instance id."""
    silent: Set[str] = frozenset()
    """Ids of instances that may be dead; used only to wait at, as a last resort."""


class Ask(NamedTuple):
    """Search result: ask `target` to reserve KV blocks."""

    target: ViewedInstance
    waits: bool
    """True to wait in the target's queue. A request waits at one instance, and keeps its position there while it asks
    others."""
    shows_room: bool
    """True if the target's last heartbeat shows enough free blocks."""


_NONE: Set[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StopWaiting:
    """Search result: leave the queue of a decode instance, which accepts no requests now."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Search result: no instance can ever take the request."""

    error: KaveriError


@dataclass(frozen=True, slots=True)
class NoInstance:
    """Search result: the cluster has no decode instance that can receive KV of this layout."""

    reason: str


class RoomSearch(Generic[KeyT]):
    """Chooses decode instances for the requests of one prefill instance.

    A request asks an instance whose heartbeat shows enough free KV blocks; if there is none, it waits in the queue of
    one chosen by choose_line(). While it waits it asks others that show free blocks, one at a time; the first to grant
    wins.
    """

    def __init__(self, model: str, layout: KvLayout, policy: AnyDecodePlacement, rng: random.Random) -> None:
        """layout: KV layout of the pool from which KV is pushed."""
        self._model = model
        self._layout = layout
        self._policy = policy
        self._rng = rng
        self._turn = 0
        # Amounts are blocks.
        self._unconfirmed: UnconfirmedWork[KeyT] = UnconfirmedWork()
        self._resting_until_s: dict[str, float] = {}

    def look(
        self, seeker: Seeker[KeyT], view: ClusterView, now_s: float
    ) -> Ask | StopWaiting | Hopeless | NoInstance | None:
        """Return the request's next action; None if there is none before the view changes or a backoff ends.

        The blocks of an Ask count as taken until a heartbeat shows them or forget() is called, so that no two requests
        count on the same blocks.
        """
        if seeker.waits_at is not None and not self._is_ready(view, seeker.waits_at):
            return StopWaiting()
        if self._resting_until_s:
            resting = self._resting_until_s.items()
            self._resting_until_s = {name: until_s for name, until_s in resting if until_s > now_s}
        avoid: Set[str] = _NONE
        if seeker.unfit or self._resting_until_s or seeker.waits_at is not None:
            here = () if seeker.waits_at is None else (seeker.waits_at,)
            avoid = {*seeker.unfit, *self._resting_until_s, *here}
        demand = Demand(seeker.token_count + 1, seeker.predicted_tokens, seeker.heavy, self._layout)
        shunned = avoid | seeker.silent if seeker.silent else avoid
        target = choose_decode(
            view, self._model, demand, self._unconfirmed, self._policy, self._rng, self._turn, shunned
        )
        shows_room = target is not None and target.record.instance_id not in shunned
        if not shows_room:
            if seeker.waits_at is not None:
                return None
            target = choose_line(view, self._model, demand, self._unconfirmed, shunned)
            if target is None and seeker.silent:
                target = choose_line(view, self._model, demand, self._unconfirmed, avoid)
        if target is None:
            return self._why_none(seeker, view)
        self._unconfirmed.add(seeker.key, target, blocks_there(target, seeker.token_count + 1), seeker.heavy)
        self._turn += 1
        return Ask(target, waits=seeker.waits_at is None, shows_room=shows_room)

    def forget(self, key: KeyT, instance_id: str) -> None:
        """Stop counting the KV blocks of a request's Ask at an instance as taken. Idempotent."""
        self._unconfirmed.remove(key, instance_id)

    def retain(self, view: ClusterView) -> None:
        """Forget the Asks at instances that have left the cluster."""
        self._unconfirmed.retain(view)

    def rest(self, instance_id: str, until_s: float) -> None:
        """Avoid the instance until `until_s`, on the clock of look()."""
        self._resting_until_s[instance_id] = until_s

    def next_rest_ends_s(self) -> float | None:
        """Return the time when the next backoff of an instance (see rest()) ends; None if there is none."""
        return min(self._resting_until_s.values(), default=None)

    def _is_ready(self, view: ClusterView, instance_id: str) -> bool:
        instance = view.instances.get(instance_id)
        return instance is not None and takes_pushes(instance) and instance in view.ready(Phase.DECODE, self._model)

    def _why_none(self, seeker: Seeker[KeyT], view: ClusterView) -> Hopeless | NoInstance | None:
        ready = [one for one in view.ready(Phase.DECODE, self._model) if takes_pushes(one)]
        fitting = {one.record.instance_id for one in ready if self._layout.is_mappable(one.record.layout)}
        if fitting and fitting.issubset(seeker.unfit):
            return Hopeless(seeker.unfit[min(fitting)])
        largest = largest_prompt(view, self._model, self._layout)
        if largest is not None and seeker.token_count > largest:
            limit = f"at most {largest} tokens: no decode instance holds more"
            return Hopeless(InvalidArgument("token_ids", f"{seeker.token_count} tokens", limit))
        return None if fitting else NoInstance(self._why_not_mappable(ready))

    def _why_not_mappable(self, ready: Collection[ViewedInstance]) -> str:
        for status in ready:
            try:
                if status.record.layout is not None:
                    self._layout.require_mappable(status.record.layout)
            except LayoutMismatch as error:
                return f"there is no decode instance that takes this one's KV: {status.record.instance_id}: {error}"
        return "there is no decode instance"
