"""Base classes for policy plug-ins, and their validation. Pure: no clock, no I/O.

A plug-in is a class without arguments that extends one of these, or an instance of it. It runs on the service's event
loop, so it must not block. Its exceptions and invalid answers are reported, and the default policy decides (Guarded).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kaveri.domain.view import InstanceRecord, ViewedInstance
from kaveri.policy.demand import Demand
from kaveri.policy.growth import BatchMember
from kaveri.policy.unconfirmed import KeyT, UnconfirmedWork

_MOST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Option:
    """Instance that a placement plug-in may choose: ready, compatible, and with room for the request."""

    instance: ViewedInstance
    """Record of the instance, with the load of its last heartbeat."""
    sent_count: int
    """Requests that the caller has sent to the instance and that its heartbeat does not show yet."""
    sent_amount: int
    """Size of those requests: prompt tokens, KV blocks or bytes of KV copies, depending on the plug-in."""

    @property
    def instance_id(self) -> str:
        """Id to return in order to choose this option."""
        return self.instance.record.instance_id


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """Snapshot of a decode instance's running batch, for admission plug-ins."""

    request_count: int
    seats: int
    """Number of requests that may join."""
    free_blocks: int
    blocks_to_first_end: int
    """Blocks that the batch still needs until the first of its answers is predicted to end."""
    blocks_to_all_ends: int
    """Blocks that the batch still needs until all of its answers are predicted to end."""


class PrefillPlacement(ABC):
    """Plug-in that chooses the prefill instance for a router's request (--placement-policy)."""

    @abstractmethod
    def choose(self, options: Sequence[Option], rng: random.Random) -> str:
        """Return the instance_id of one of the options (at least one). Their sent_amount: prompt tokens."""


class DecodePlacement(ABC):
    """Plug-in that chooses the decode instance on which to reserve KV blocks (--decode-placement)."""

    @abstractmethod
    def choose(self, options: Sequence[Option], demand: Demand, rng: random.Random) -> str:
        """Return the instance_id of one of the options (at least one). Their sent_amount: KV blocks."""


class PromptOrder(ABC):
    """Plug-in that orders the prompts of one prefill scheduling batch (--prefill-policy)."""

    @abstractmethod
    def order(self, token_counts: Sequence[int]) -> Sequence[int]:
        """Return every index of `token_counts` (lengths of prompts, in order of arrival) once, in order of
        computation."""


class BatchAdmission(ABC):
    """Plug-in that decides how many requests whose KV has arrived join the running batch (--decode-policy)."""

    @abstractmethod
    def admit(self, batch: RunningBatch, landed: Sequence[BatchMember]) -> int:
        """Return how many of `landed` join, counted from the first: 0 to len(landed), and at least 1 when nothing runs.
        landed: 1 to batch.seats requests whose KV has arrived, oldest first."""


class HolderPlacement(ABC):
    """Plug-in that chooses the decode instance to hold a copy of a request's KV (--replication)."""

    @abstractmethod
    def choose(self, options: Sequence[Option], owner: InstanceRecord, needed_bytes: int, rng: random.Random) -> str:
        """Return the instance_id of one of the options (at least one). owner: the instance that decodes the request.
        needed_bytes: size of the copy. Their sent_amount: bytes of copies."""


PluginT = TypeVar("PluginT", PrefillPlacement, DecodePlacement, PromptOrder, BatchAdmission, HolderPlacement)
AnswerT = TypeVar("AnswerT")


class _BadAnswer(Exception):
    """An answer that violates the plug-in's contract."""


@dataclass(frozen=True, eq=False, slots=True)
class Guarded(Generic[PluginT]):
    """Wraps a plug-in policy: reports its exceptions and invalid answers, and never raises them."""

    plugin: PluginT
    report: Callable[[str], None]
    """Called with a description of each fault of the plug-in. Must not raise."""

    def ask(self, question: Callable[[PluginT], object], check: Callable[[object], AnswerT]) -> AnswerT | None:
        """Call `question` with the plug-in and return the answer as validated by `check`. Return None, for the default
        policy, if either raised."""
        try:
            return check(question(self.plugin))
        except _BadAnswer as error:
            self.report(str(error))
        except Exception as error:
            self.report(f"raised {type(error).__name__}: {_shown(error, str)}")
        return None


def chosen_by(
    policy: Guarded[PluginT],
    instances: Sequence[ViewedInstance],
    unconfirmed: UnconfirmedWork[KeyT],
    question: Callable[[PluginT, Sequence[Option]], object],
) -> ViewedInstance | None:
    """Return the instance that a placement plug-in chose; None if `instances` is empty or its answer invalid."""
    if not instances:
        return None
    options = tuple(
        Option(instance, sent.count, sent.amount)
        for instance, sent in ((instance, unconfirmed.at(instance)) for instance in instances)
    )

    def check(answer: object) -> ViewedInstance:
        for instance in instances:
            if type(answer) is str and instance.record.instance_id == answer:
                return instance
        raise _BadAnswer(f"answered {_shown(answer)}, which is the id of none of its {len(options)} options")

    return policy.ask(lambda plugin: question(plugin, options), check)


def order_by(policy: Guarded[PromptOrder], token_counts: Sequence[int]) -> Sequence[int] | None:
    """Return the indexes of `token_counts` in the plug-in's order; None if that is no permutation."""

    def check(answer: object) -> Sequence[int]:
        indexes = list(answer) if isinstance(answer, Sequence) else []
        is_whole = all(type(index) is int for index in indexes) and sorted(indexes) == list(range(len(token_counts)))
        if not is_whole:
            raise _BadAnswer(f"answered {_shown(answer)}, which is not every index of {len(token_counts)} prompts once")
        return indexes

    return policy.ask(lambda plugin: plugin.order(token_counts), check)


def admitted_by(policy: Guarded[BatchAdmission], batch: RunningBatch, landed: Sequence[BatchMember]) -> int | None:
    """Return how many of the first `landed` requests the plug-in admits; None if its answer is invalid."""
    least = 0 if batch.request_count else 1

    def check(answer: object) -> int:
        if type(answer) is not int or not least <= answer <= len(landed):
            raise _BadAnswer(f"answered {_shown(answer)}, which is no number of requests from {least} to {len(landed)}")
        return answer

    return policy.ask(lambda plugin: plugin.admit(batch, landed), check)


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    """Describe a plug-in's object, whose own repr may raise."""
    try:
        return show(value)[:_MOST_SHOWN]
    except Exception:
        return f"a {type(value).__name__}"
