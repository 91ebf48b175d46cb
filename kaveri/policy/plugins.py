"""Policies of other packages: what each is asked, and what it must answer. Pure: no clock, no I/O.

A plug-in is a class without arguments that extends one of these, or an instance of it. It is called on the event loop
of its service, so it must not wait. The service asks it through Guarded, which never raises: what the plug-in raises,
or answers against its contract, is reported, and the default policy decides.
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
    """An instance that takes what is to be placed: it is ready, fits, and has room."""

    instance: ViewedInstance
    """Its record, and its load as of its last heartbeat."""
    sent_count: int
    """Requests that the asker has sent there and the load does not show yet."""
    sent_amount: int
    """What these take: tokens of prompts, blocks of KV, or bytes of copies, as in the question."""

    @property
    def instance_id(self) -> str:
        """What a policy answers to choose this one."""
        return self.instance.record.instance_id


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """What a decode instance runs, when landed requests wait to join. Frozen."""

    request_count: int
    seats: int
    """Requests that may join."""
    free_blocks: int
    blocks_to_first_end: int
    """That the batch will want beyond those that it holds, until the first of its answers is predicted to end."""
    blocks_to_all_ends: int
    """The same, until all of them are."""


class PrefillPlacement(ABC):
    """For --placement-policy: which prefill instance a router sends a request to."""

    @abstractmethod
    def choose(self, options: Sequence[Option], rng: random.Random) -> str:
        """The id of one of the options, of which there is at least one. sent_amount: tokens of prompts."""


class DecodePlacement(ABC):
    """For --decode-placement: which decode instance a prefill instance asks for room."""

    @abstractmethod
    def choose(self, options: Sequence[Option], demand: Demand, rng: random.Random) -> str:
        """The id of one of the options, of which there is at least one. sent_amount: blocks."""


class PromptOrder(ABC):
    """For --prefill-policy: in which order the prompts of one scheduling batch are computed."""

    @abstractmethod
    def order(self, token_counts: Sequence[int]) -> Sequence[int]:
        """Every index of `token_counts` once, the prompt to compute first before the others. token_counts: of prompts,
        in the order of their arrival."""


class BatchAdmission(ABC):
    """For --decode-policy: how many landed requests join the running batch."""

    @abstractmethod
    def admit(self, batch: RunningBatch, landed: Sequence[BatchMember]) -> int:
        """How many of `landed`, from the first on: 0 to len(landed), and at least 1 when nothing runs. landed: at
        least one, at most batch.seats, in the order of their landing."""


class HolderPlacement(ABC):
    """For --replication: which decode instance holds the copy of a request's KV."""

    @abstractmethod
    def choose(self, options: Sequence[Option], owner: InstanceRecord, needed_bytes: int, rng: random.Random) -> str:
        """The id of one of the options, of which there is at least one. owner: the instance that decodes the request.
        needed_bytes: of the copy. sent_amount: bytes of copies."""


PluginT = TypeVar("PluginT", PrefillPlacement, DecodePlacement, PromptOrder, BatchAdmission, HolderPlacement)
AnswerT = TypeVar("AnswerT")


class _BadAnswer(Exception):
    """Against the contract."""


@dataclass(frozen=True, eq=False, slots=True)
class Guarded(Generic[PluginT]):
    """A plug-in that cannot fail its caller."""

    plugin: PluginT
    report: Callable[[str], None]
    """Gets what the plug-in did wrong, each time. Must not raise."""

    def ask(self, question: Callable[[PluginT], object], check: Callable[[object], AnswerT]) -> AnswerT | None:
        """The checked answer. None: the plug-in raised, or check() did; the caller's default decides."""
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
    """The instance whose id the plug-in answers. None: there are no instances, or its answer is none of them."""
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
    """The indexes of `token_counts` in the plug-in's order; None: its answer is none."""

    def check(answer: object) -> Sequence[int]:
        indexes = list(answer) if isinstance(answer, Sequence) else []
        is_whole = all(type(index) is int for index in indexes) and sorted(indexes) == list(range(len(token_counts)))
        if not is_whole:
            raise _BadAnswer(f"answered {_shown(answer)}, which is not every index of {len(token_counts)} prompts once")
        return indexes

    return policy.ask(lambda plugin: plugin.order(token_counts), check)


def admitted_by(policy: Guarded[BatchAdmission], batch: RunningBatch, landed: Sequence[BatchMember]) -> int | None:
    """How many of `landed` the plug-in admits; None: its answer is no such number. landed: see BatchAdmission."""
    least = 0 if batch.request_count else 1

    def check(answer: object) -> int:
        if type(answer) is not int or not least <= answer <= len(landed):
            raise _BadAnswer(f"answered {_shown(answer)}, which is no number of requests from {least} to {len(landed)}")
        return answer

    return policy.ask(lambda plugin: plugin.admit(batch, landed), check)


def _shown(value: object, show: Callable[[object], str] = repr) -> str:
    """A plug-in's object may fail to describe itself."""
    try:
        return show(value)[:_MOST_SHOWN]
    except Exception:
        return f"a {type(value).__name__}"
