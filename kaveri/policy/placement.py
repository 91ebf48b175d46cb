"""Chooses instances for requests: where to prefill, where to decode. Pure: no clock, no I/O.

The cost of a choice does not grow with the cluster as long as a few percent of the instances accept the request. Only
least-loaded scans all of them.

Power of two choices: draw two candidates at random and take the less loaded one (TetriInfer, arXiv 2401.11181, sections
3.2 and 3.3.4). Unlike least-loaded it tolerates old heartbeats: not all choosers pick the instance that looked idle.
"""

import enum
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kaveri.domain.length import TokenRange
from kaveri.domain.view import ClusterView, Phase, ViewedInstance, once_per_view, phases_now, takes_pushes
from kaveri.kv.layout.layout import KvLayout
from kaveri.policy.demand import Demand
from kaveri.policy.plugins import DecodePlacement, Guarded, PrefillPlacement, chosen_by
from kaveri.policy.unconfirmed import KeyT, UnconfirmedWork

_MOST_DRAWS = 48
"""Max random draws before a scan of the whole cluster; bounds the cost while most instances are full."""
_DRAWS_OF_EACH = 4
"""Max draws per instance. Scanning a small cluster costs less than many draws."""

LoadKey = tuple[float, ...]
Load = Callable[[ViewedInstance], LoadKey]
Takes = Callable[[ViewedInstance], bool]
# Named here because an annotation inside a function is evaluated at every call.


@dataclass(slots=True)
class Candidates:
    """Instances of `ready` that accept a request, according to `takes`. Those with ids in `avoid` are candidates only
    if there are no others.

    Random draws are uniform over the candidates, by rejection sampling from all ready instances.
    """

    ready: Sequence[ViewedInstance]
    takes: Takes
    avoid: Collection[str] = ()

    def all(self) -> list[ViewedInstance]:
        """Return all instances that accept the request; those in `avoid` only if there are no others."""
        taking = [instance for instance in self.ready if self.takes(instance)]
        if not self.avoid:
            return taking
        return [instance for instance in taking if instance.record.instance_id not in self.avoid] or taking

    def first(self) -> ViewedInstance | None:
        """Return the first instance that accepts the request; None if there is none."""
        found = next(filter(self._is_preferred, self.ready), None)
        return found or next(iter(self.all()), None)

    def in_turn(self, turn: int) -> ViewedInstance | None:
        """Return an accepting instance, round-robin; None if there is none. turn: number of this choice."""
        if not self.ready:
            return None
        found = self.ready[turn % len(self.ready)]
        if self._is_preferred(found):
            return found
        candidates = self.all()
        return candidates[turn % len(candidates)] if candidates else None

    def any(self, rng: random.Random) -> ViewedInstance | None:
        """Return a random instance that accepts the request; None if there is none."""
        for _ in range(_draws(len(self.ready))):
            found = self.ready[int(rng.random() * len(self.ready))]
            if self._is_preferred(found):
                return found
        candidates = self.all()
        return rng.choice(candidates) if candidates else None

    def better_of_two(self, load: Load, rng: random.Random, wanted: Takes | None = None) -> ViewedInstance | None:
        """Return the less loaded of two random accepting instances; None if there is none. wanted: stricter condition
        than `takes`; if any instance meets it, both are drawn from those that do."""
        ready, avoid, fits = self.ready, self.avoid, wanted or self.takes
        first: ViewedInstance | None = None
        count, draw = len(ready), rng.random
        for _ in range(_draws(count) if count > 1 else 0):
            found = ready[int(draw() * count)]
            if found is first or (avoid and found.record.instance_id in avoid) or not fits(found):
                continue
            if first is None:
                first = found
            else:
                # The pair is in random order, so ties are broken evenly.
                return found if load(found) < load(first) else first
        candidates = self.all()
        if wanted is not None:
            candidates = list(filter(wanted, candidates)) or candidates
        return min(rng.sample(candidates, min(2, len(candidates))), key=load, default=None)

    def _is_preferred(self, instance: ViewedInstance) -> bool:
        return instance.record.instance_id not in self.avoid and self.takes(instance)


def _draws(ready_count: int) -> int:
    return min(_MOST_DRAWS, _DRAWS_OF_EACH * ready_count)


class PlacementPolicy(enum.StrEnum):
    """Policy for choosing the prefill instance of a request."""

    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class DecodePlacementPolicy(enum.StrEnum):
    """Policy for choosing among decode instances with enough free KV blocks."""

    POWER_OF_TWO = "power-of-two"
    """Draws two random instances and takes the one with fewer requests."""
    HEAVY_LIGHT = "heavy-light"
    """Draws two random instances with free blocks for the predicted answer: a heavy request takes the one with the
    lower ratio of heavy to light requests, a light request the one with fewer requests."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    IMBALANCE = "imbalance"
    """Sends all heavy requests to the first instance: the worst case, for comparison."""


AnyPrefillPlacement = PlacementPolicy | Guarded[PrefillPlacement]
AnyDecodePlacement = DecodePlacementPolicy | Guarded[DecodePlacement]
"""Built-in policy or plug-in. A plug-in receives every instance that accepts the request, so its cost grows with the
cluster. If it fails, power of two choices decides."""


@dataclass(frozen=True, slots=True)
class HeavyThresholds:
    """Limits, in tokens, above which a request is heavy: costly to decode (TetriInfer, section 5.1)."""

    output_tokens: int = 128
    prompt_tokens: int = 512

    def is_heavy(self, predicted_length: TokenRange | None, prompt_tokens: int) -> bool:
        """Return True if the lower bound of the predicted answer length exceeds self.output_tokens. Without a
        prediction: True if the prompt, whose KV every decode step reads, exceeds self.prompt_tokens."""
        if predicted_length is not None:
            return predicted_length.low > self.output_tokens
        return prompt_tokens > self.prompt_tokens


DEFAULT_THRESHOLDS = HeavyThresholds()


def choose_prefill(
    view: ClusterView,
    model: str,
    unconfirmed: UnconfirmedWork[KeyT],
    policy: AnyPrefillPlacement,
    rng: random.Random,
    turn: int = 0,
    avoid: Collection[str] = (),
    exclude: Collection[str] = (),
) -> ViewedInstance | None:
    """Choose the ready prefill instance of `model` to send a request to; None if none accepts one now.

    Load is the prompt tokens queued there: those in its last heartbeat, plus those sent since (`unconfirmed`).
    Instances with a full queue are skipped. turn: number of this choice, for round-robin. avoid: ids of instances used
    only as a last resort. exclude: ids of instances never used.
    """

    def load(instance: ViewedInstance) -> LoadKey:
        load = instance.load
        waiting_tokens = load.queued_prefill_tokens + unconfirmed.at(instance).amount
        # The request count breaks ties, so that a burst of short prompts spreads as well.
        return waiting_tokens, load.running_requests + load.waiting_requests

    def takes_one_more(instance: ViewedInstance) -> bool:
        if exclude and instance.record.instance_id in exclude:
            return False
        room = instance.load.queue_room
        return room is None or room > unconfirmed.at(instance).count

    candidates = Candidates(prompt_takers(view, model), takes_one_more, avoid)
    match policy:
        case PlacementPolicy.POWER_OF_TWO:
            return candidates.better_of_two(load, rng)
        case PlacementPolicy.LEAST_LOADED:
            return min(candidates.all(), key=load, default=None)
        case PlacementPolicy.ROUND_ROBIN:
            return candidates.in_turn(turn)
        case PlacementPolicy.RANDOM:
            return candidates.any(rng)
        case Guarded():
            found = chosen_by(
                policy, candidates.all(), unconfirmed, lambda plugin, options: plugin.choose(options, rng)
            )
            return found or candidates.better_of_two(load, rng)


@once_per_view
def missing_phases(view: ClusterView, model: str) -> tuple[Phase, ...]:
    """Return the phases (prefill, decode) for which `model` has no ready instance."""
    return tuple(phase for phase in Phase if not view.ready(phase, model))


def choose_decode(
    view: ClusterView,
    model: str,
    demand: Demand,
    unconfirmed: UnconfirmedWork[KeyT],
    policy: AnyDecodePlacement,
    rng: random.Random,
    turn: int = 0,
    avoid: Collection[str] = (),
) -> ViewedInstance | None:
    """Choose the ready decode instance of `model` to reserve KV blocks on; None if none has enough free.

    Load is the number of requests there, then their context tokens. `unconfirmed` holds placements that no heartbeat
    shows yet; they count as requests and as taken blocks. turn: number of this choice, for round-robin. avoid: ids of
    instances used only if no other has room.

    Heavy-light is TetriInfer's algorithm (section 3.3.4): it draws two instances with room for the predicted tokens, if
    any, else for the needed ones. A heavy request (HeavyThresholds) takes the one with the lower ratio of heavy to
    light requests, load breaking ties; a light one takes the less loaded.
    """

    def load(instance: ViewedInstance) -> LoadKey:
        load, sent = instance.load, unconfirmed.at(instance)
        return load.running_requests + load.waiting_requests + sent.count, load.context_tokens

    def heavy_share(instance: ViewedInstance) -> LoadKey:
        # heavy / all orders instances as heavy / light does, and is 0 where there is nothing.
        load, sent = instance.load, unconfirmed.at(instance)
        heavy_requests = load.heavy_requests + sent.heavy_count
        requests = load.heavy_requests + load.light_requests + sent.count
        share = heavy_requests / requests if requests else 0.0
        return share, load.running_requests + load.waiting_requests + sent.count, load.context_tokens

    def has_room(token_count: int, instance: ViewedInstance) -> bool:
        return instance.load.free_blocks - unconfirmed.at(instance).amount >= blocks_there(instance, token_count)

    candidates = Candidates(_takers_of_pushes(view, model, demand), partial(has_room, demand.tokens), avoid)
    match policy:
        case DecodePlacementPolicy.POWER_OF_TWO:
            return candidates.better_of_two(load, rng)
        case DecodePlacementPolicy.HEAVY_LIGHT:
            # Light requests go by load. By the heavy share, which each of them lowers, all would go to one instance.
            wanted = partial(has_room, max(demand.tokens, demand.predicted))
            return candidates.better_of_two(heavy_share if demand.heavy else load, rng, wanted)
        case DecodePlacementPolicy.LEAST_LOADED:
            return min(candidates.all(), key=load, default=None)
        case DecodePlacementPolicy.ROUND_ROBIN:
            return candidates.in_turn(turn)
        case DecodePlacementPolicy.RANDOM:
            return candidates.any(rng)
        case DecodePlacementPolicy.IMBALANCE:
            return candidates.first() if demand.heavy else candidates.any(rng)
        case Guarded():
            taking = candidates.all()
            found = chosen_by(policy, taking, unconfirmed, lambda plugin, options: plugin.choose(options, demand, rng))
            return found or candidates.better_of_two(load, rng)


def choose_line(
    view: ClusterView,
    model: str,
    demand: Demand,
    unconfirmed: UnconfirmedWork[KeyT],
    avoid: Collection[str] = (),
) -> ViewedInstance | None:
    """Choose the ready decode instance of `model` in whose queue to wait when none has enough free blocks; None if no
    pool is large enough. Prefers the fewest waiting requests, `unconfirmed` ones included, then the most free blocks.
    Parameters as in choose_decode(), but instances in `avoid` are never chosen."""
    candidates = [
        instance
        for instance in _takers_of_pushes(view, model, demand)
        if instance.record.instance_id not in avoid
        and instance.load.total_blocks >= blocks_there(instance, demand.tokens)
    ]

    def attraction(instance: ViewedInstance) -> tuple[int, int]:
        load, sent = instance.load, unconfirmed.at(instance)
        return -(load.waiting_requests + sent.count), load.free_blocks - sent.amount

    return max(candidates, key=attraction, default=None)


@once_per_view
def largest_prompt(view: ClusterView, model: str, layout: KvLayout | None = None) -> int | None:
    """Return the longest prompt, in tokens, that some decode instance's whole KV pool holds with one more token; None
    if unknown or there is no instance. Counts instances that drain or now serve prefill only: they may come back.
    layout: count only instances that can receive KV of this layout."""
    largest: int | None = None
    for instance in view.instances.values():
        record, total_blocks = instance.record, instance.load.total_blocks
        if Phase.DECODE not in phases_now(instance) or record.model != model:
            continue
        if layout is not None and not (takes_pushes(instance) and layout.is_mappable(record.layout)):
            continue
        if record.layout is None or not total_blocks:
            return None
        most_tokens = total_blocks * record.layout.block_tokens
        if record.max_model_len:
            most_tokens = min(most_tokens, record.max_model_len)
        largest = max(largest or 0, most_tokens - 1)
    return largest


@once_per_view
def max_model_len(view: ClusterView, model: str) -> int:
    """Return the max tokens of prompt plus answer that every instance of `model` accepts; 0 without instances."""
    lengths = (
        instance.record.max_model_len
        for instance in view.instances.values()
        if instance.record.phases and instance.record.model == model
    )
    return min(lengths, default=0)


def blocks_there(instance: ViewedInstance, token_count: int) -> int:
    """Return the KV blocks that the tokens take on an instance; token_count if its block size is unknown."""
    layout = instance.record.layout
    return token_count if layout is None else -(-token_count // layout.block_tokens)


@once_per_view
def prompt_takers(view: ClusterView, model: str) -> tuple[ViewedInstance, ...]:
    """The ready prefill instances; while no decode instance accepts KV pushes, only those that decode as well."""
    ready = view.ready(Phase.PREFILL, model)
    if any(takes_pushes(instance) for instance in view.ready(Phase.DECODE, model)):
        return ready
    return tuple(instance for instance in ready if Phase.DECODE in phases_now(instance)) or ready


def _takers_of_pushes(view: ClusterView, model: str, demand: Demand) -> tuple[ViewedInstance, ...]:
    """The ready decode instances whose pools can receive KV of the demand's layout."""
    layout = demand.layout
    takers = (
        instance
        for instance in view.ready(Phase.DECODE, model)
        if takes_pushes(instance) and (layout is None or layout.is_mappable(instance.record.layout))
    )
    # The key has the layout's id, as hashing it would be slow: all requests of an instance share one object. The cached
    # value references it, so that its id is not reused.
    return view.derive(("takers of pushes", model, id(layout)), lambda: (layout, tuple(takers)))[1]
