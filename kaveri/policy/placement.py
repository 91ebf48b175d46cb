"""Chooses instances for requests: where to prefill, where to decode. Pure: no clock, no I/O.

Power of two choices: draw two candidates at random and take the less loaded one (TetriInfer, arXiv 2401.11181, sections
3.2 and 3.3.4). It needs no fresher loads than heartbeats bring, because many choosers do not all run to the one
instance that looked idle.
"""

import enum
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kaveri.domain.length import TokenRange
from kaveri.domain.view import ClusterView, InstanceStatus, Role
from kaveri.kv.layout.layout import KvLayout

KeyT = TypeVar("KeyT")


class PlacementPolicy(enum.StrEnum):
    """How a prefill instance is chosen."""

    POWER_OF_TWO = "power-of-two"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class DecodePlacementPolicy(enum.StrEnum):
    """How a decode instance is chosen among those with room."""

    POWER_OF_TWO = "power-of-two"
    """Of two at random the one with fewer requests."""
    HEAVY_LIGHT = "heavy-light"
    """Of two at random, with room for the predicted answer: a heavy request goes to the one with fewer heavy requests
    to each light one, a light request to the one with fewer requests."""
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    IMBALANCE = "imbalance"
    """All heavy requests to the first one: the worst case, to compare with."""


@dataclass(frozen=True, slots=True)
class HeavyThresholds:
    """What makes a request heavy in decode; TetriInfer's limits (section 5.1)."""

    output_tokens: int = 128
    prompt_tokens: int = 512

    def is_heavy(self, predicted_length: TokenRange | None, prompt_tokens: int) -> bool:
        """Whether it is predicted to draw more than `output_tokens`, counted at the range's lower end.

        Where nothing is predicted, whether the KV that every step reads for it is long from the beginning.
        """
        if predicted_length is not None:
            return predicted_length.low > self.output_tokens
        return prompt_tokens > self.prompt_tokens


DEFAULT_THRESHOLDS = HeavyThresholds()


@dataclass(frozen=True, slots=True)
class _Sent:
    incarnation: int
    sequence_number: int
    amount: int


class UnconfirmedWork(Generic[KeyT]):
    """What one chooser has sent to instances and their heartbeats cannot show yet: tokens of prompts, or blocks.

    A piece counts until it is settled, until the second heartbeat after it was sent (the first may have been made while
    the piece was on its way), or until the instance starts a new life. Pieces are named by keys of the caller's choice.
    """

    def __init__(self) -> None:
        self._sent: dict[str, dict[KeyT, _Sent]] = {}

    def add(self, key: KeyT, target: InstanceStatus, amount: int) -> None:
        """Counts `amount` for `target` from now on. `target` is the snapshot that the choice was made from."""
        sent = _Sent(target.record.incarnation, target.load.sequence_number, amount)
        self._sent.setdefault(target.record.instance_id, {})[key] = sent

    def settle(self, key: KeyT, instance_id: str) -> None:
        """Stops counting a piece: it was begun, refused or dropped. Unknown pieces are ignored."""
        pieces = self._sent.get(instance_id)
        if pieces is not None:
            pieces.pop(key, None)
            if not pieces:
                del self._sent[instance_id]

    def __len__(self) -> int:
        """Pieces that were neither settled nor found confirmed."""
        return sum(len(pieces) for pieces in self._sent.values())

    def count(self, status: InstanceStatus) -> int:
        """How many pieces the heartbeat in `status` does not show yet."""
        return len(self._pending(status))

    def amount(self, status: InstanceStatus) -> int:
        """The sum of the pieces that the heartbeat in `status` does not show yet."""
        return sum(piece.amount for piece in self._pending(status).values())

    def _pending(self, status: InstanceStatus) -> dict[KeyT, _Sent]:
        pieces = self._sent.get(status.record.instance_id)
        if pieces is None:
            return {}
        newest = status.load.sequence_number
        confirmed = [
            key
            for key, piece in pieces.items()
            if piece.incarnation != status.record.incarnation or newest >= piece.sequence_number + 2
        ]
        for key in confirmed:
            del pieces[key]
        return pieces


def choose_prefill(
    view: ClusterView,
    model: str,
    unconfirmed_tokens: UnconfirmedWork[KeyT],
    policy: PlacementPolicy,
    rng: random.Random,
    turn: int = 0,
    avoid: Collection[str] = (),
    exclude: Collection[str] = (),
) -> InstanceStatus | None:
    """The ready prefill or colocated instance of `model` to send a request to, or None when none takes one now.

    Load is the prompt tokens that wait there: as of the last heartbeat, plus `unconfirmed_tokens`. An instance whose
    queue is full, with the requests that no heartbeat shows yet, takes none.
    turn: rises by one with each choice; used by round-robin. avoid: instance ids taken only when nothing else is left.
    exclude: instance ids that are not taken.
    """

    def load(status: InstanceStatus) -> tuple[int, ...]:
        waiting_tokens = status.load.queued_prefill_tokens + unconfirmed_tokens.amount(status)
        # Requests break ties, so that a burst of short prompts spreads as well.
        return waiting_tokens, status.load.running_requests + status.load.waiting_requests

    def takes_one_more(status: InstanceStatus) -> bool:
        room = status.load.queue_room
        return room is None or room > unconfirmed_tokens.count(status)

    candidates = [
        status
        for status in _prompt_takers(view, model)
        if status.record.instance_id not in exclude and takes_one_more(status)
    ]
    candidates = _preferred(candidates, avoid)
    if not candidates:
        return None
    match policy:
        case PlacementPolicy.POWER_OF_TWO:
            return _better_of_two(candidates, load, rng)
        case PlacementPolicy.LEAST_LOADED:
            return min(candidates, key=load)
        case PlacementPolicy.ROUND_ROBIN:
            return candidates[turn % len(candidates)]
        case PlacementPolicy.RANDOM:
            return rng.choice(candidates)


def missing_roles(view: ClusterView, model: str) -> tuple[Role, ...]:
    """The roles for want of which no request for `model` can be served now; a colocated instance needs no other."""
    if next(view.ready(Role.COLOCATED, model), None) is not None:
        return ()
    return tuple(role for role in (Role.PREFILL, Role.DECODE) if next(view.ready(role, model), None) is None)


def choose_decode(
    view: ClusterView,
    model: str,
    needed_tokens: int,
    unconfirmed_blocks: UnconfirmedWork[KeyT],
    rng: random.Random,
    layout: KvLayout | None = None,
    avoid: Collection[str] = (),
    policy: DecodePlacementPolicy = DecodePlacementPolicy.POWER_OF_TWO,
    predicted_tokens: int = 0,
    unconfirmed_heavy: UnconfirmedWork[KeyT] | None = None,
    heavy: bool = False,
    turn: int = 0,
) -> InstanceStatus | None:
    """The ready decode instance of `model` to reserve room for `needed_tokens` on, or None when none has it now.

    Load is the requests there, then their tokens of context. Placements that no heartbeat shows yet count: their blocks
    as taken, themselves as requests.
    layout: when given, only instances onto whose KV layout it can be mapped. avoid: taken only when nothing else has
    room.

    Heavy-light is TetriInfer's algorithm (section 3.3.4): it draws two instances that have room for `predicted_tokens`,
    if there are any, else for `needed_tokens`. A heavy request takes the one with the lower ratio of heavy to light
    requests, load breaking ties, so that heavy ones are spread evenly; a light one takes the less loaded.
    unconfirmed_heavy: the pieces of unconfirmed_blocks again, with amount 1 for heavy ones, else 0.
    heavy: whether this request is; for heavy-light and imbalance. turn: rises by one with each choice; for round-robin.
    """

    def room(status: InstanceStatus) -> int:
        return status.load.free_blocks - unconfirmed_blocks.amount(status)

    def load(status: InstanceStatus) -> tuple[int, ...]:
        requests = status.load.running_requests + status.load.waiting_requests + unconfirmed_blocks.count(status)
        return requests, status.load.context_tokens

    def heavy_share(status: InstanceStatus) -> tuple[float, ...]:
        # The share of heavy ones orders instances as their ratio to light ones does, and is 0 where there is nothing.
        sent = unconfirmed_blocks.count(status)
        heavy_sent = unconfirmed_heavy.amount(status) if unconfirmed_heavy is not None else 0
        heavy_requests = status.load.heavy_requests + heavy_sent
        requests = status.load.heavy_requests + status.load.light_requests + sent
        return (heavy_requests / requests if requests else 0.0), *load(status)

    candidates = [
        status
        for status in view.ready(Role.DECODE, model)
        if (layout is None or layout.is_mappable(status.record.layout))
        and room(status) >= blocks_there(status, needed_tokens)
    ]
    candidates = _preferred(candidates, avoid)
    if not candidates:
        return None
    match policy:
        case DecodePlacementPolicy.POWER_OF_TWO:
            return _better_of_two(candidates, load, rng)
        case DecodePlacementPolicy.HEAVY_LIGHT:
            enough = [status for status in candidates if room(status) >= blocks_there(status, predicted_tokens)]
            # Light ones go by load: by the ratio, each would lower it where it is low, and draw all others there.
            return _better_of_two(enough or candidates, heavy_share if heavy else load, rng)
        case DecodePlacementPolicy.LEAST_LOADED:
            return min(candidates, key=load)
        case DecodePlacementPolicy.ROUND_ROBIN:
            return candidates[turn % len(candidates)]
        case DecodePlacementPolicy.RANDOM:
            return rng.choice(candidates)
        case DecodePlacementPolicy.IMBALANCE:
            return candidates[0] if heavy else rng.choice(candidates)


def choose_line(
    view: ClusterView,
    model: str,
    needed_tokens: int,
    unconfirmed_blocks: UnconfirmedWork[KeyT],
    layout: KvLayout | None = None,
    avoid: Collection[str] = (),
) -> InstanceStatus | None:
    """The ready decode instance of `model` to wait at when none has room for `needed_tokens`: of those whose pool is
    large enough, the one where the fewest requests wait, and of these the one with the most room. None: there is none.

    Parameters as of choose_decode, but that instances to avoid are not taken at all.
    """
    candidates = [
        status
        for status in view.ready(Role.DECODE, model)
        if status.record.instance_id not in avoid
        and (layout is None or layout.is_mappable(status.record.layout))
        and status.load.total_blocks >= blocks_there(status, needed_tokens)
    ]

    def attraction(status: InstanceStatus) -> tuple[int, int]:
        return -status.load.waiting_requests, status.load.free_blocks - unconfirmed_blocks.amount(status)

    return max(candidates, key=attraction, default=None)


def largest_prompt(
    view: ClusterView, model: str, roles: Collection[Role], layout: KvLayout | None = None
) -> int | None:
    """Most tokens that some instance of `roles` can decode a token after, with its whole pool. None: one does not say,
    or there is none.

    Instances that drain count as well: one of their size may be about to come back. layout: when given, only instances
    onto whose KV layout it can be mapped.
    """
    largest: int | None = None
    for status in view.instances.values():
        record, total_blocks = status.record, status.load.total_blocks
        if record.role not in roles or record.model != model:
            continue
        if layout is not None and not layout.is_mappable(record.layout):
            continue
        if record.layout is None or not total_blocks:
            return None
        most_tokens = total_blocks * record.layout.block_tokens
        if record.max_model_len:
            most_tokens = min(most_tokens, record.max_model_len)
        largest = max(largest or 0, most_tokens - 1)
    return largest


def blocks_there(status: InstanceStatus, token_count: int) -> int:
    """Blocks of that instance which so many tokens take; one for each where it has not said how large they are."""
    layout = status.record.layout
    return token_count if layout is None else layout.block_count(token_count)


def _prompt_takers(view: ClusterView, model: str) -> list[InstanceStatus]:
    colocated = list(view.ready(Role.COLOCATED, model))
    if colocated and next(view.ready(Role.DECODE, model), None) is None:
        # What prefill computes could go nowhere: colocated instances take no pushes.
        return colocated
    return [*view.ready(Role.PREFILL, model), *colocated]


def _preferred(candidates: list[InstanceStatus], avoid: Collection[str]) -> list[InstanceStatus]:
    return [status for status in candidates if status.record.instance_id not in avoid] or candidates


def _better_of_two(
    candidates: list[InstanceStatus], load: Callable[[InstanceStatus], tuple[float, ...]], rng: random.Random
) -> InstanceStatus:
    # rng.sample gives the pair in random order and min takes the first of equals, so ties fall evenly.
    return min(rng.sample(candidates, min(2, len(candidates))), key=load)
