"""Orders the prompts that wait in a prefill instance's queue. Pure: no clock, no I/O."""

import enum
from collections.abc import Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kaveri.policy.plugins import Guarded, PromptOrder, order_by

DEFAULT_SCHEDULING_BATCH = 16
"""TetriInfer's PrefillSchedBatch (arXiv 2401.11181, section 5.2.1)."""


class OrderingPolicy(enum.StrEnum):
    """In which order waiting prompts are computed."""

    FCFS = "fcfs"
    """First come, first served."""
    SJF = "sjf"
    """Shortest job first: the least mean wait."""
    LJF = "ljf"
    """Longest job first."""


AnyOrdering = OrderingPolicy | Guarded[PromptOrder]
"""Where a plug-in fails, the first to come is the first."""


class Prompt(Protocol):
    """One prompt in the queue. Hashed and compared."""

    @property
    def token_count(self) -> int:
        """Tokens to compute."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


def order_prompts(policy: AnyOrdering, waiting: Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """One scheduling batch, given in the order of arrival, in the order in which it goes to the engine.

    Prompts of equal length keep the order of arrival.
    """
    match policy:
        case OrderingPolicy.FCFS:
            return list(waiting)
        case OrderingPolicy.SJF:
            return sorted(waiting, key=lambda prompt: prompt.token_count)
        case OrderingPolicy.LJF:
            return sorted(waiting, key=lambda prompt: -prompt.token_count)
        case Guarded():
            indexes = order_by(policy, tuple(prompt.token_count for prompt in waiting))
            return list(waiting) if indexes is None else [waiting[index] for index in indexes]


class PromptSchedule(Generic[AnyPrompt]):
    """A raw queue in the order of arrival, and before it a scheduled queue: one batch in the policy's order.

    The next batch is taken from the raw queue when the scheduled queue is empty and a prompt is wanted, so it holds all
    that wait by then, up to its size (TetriInfer, arXiv 2401.11181, section 3.3.1). No prompt starves: it is overtaken
    by at most `scheduling_batch - 1` prompts that came after it, those of its own batch.
    """

    def __init__(self, policy: AnyOrdering, scheduling_batch: int = DEFAULT_SCHEDULING_BATCH) -> None:
        """scheduling_batch: most prompts that are ordered together, at least 1; 1 is FCFS whatever the policy."""
        assert scheduling_batch >= 1, scheduling_batch
        self._policy = policy
        self._scheduling_batch = scheduling_batch
        self._raw: dict[AnyPrompt, None] = {}
        self._scheduled: dict[AnyPrompt, None] = {}

    def __len__(self) -> int:
        """Prompts that wait, in either queue."""
        return len(self._raw) + len(self._scheduled)

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._raw or prompt in self._scheduled

    def add(self, prompt: AnyPrompt) -> None:
        """Lets the prompt wait, behind all that are here."""
        self._raw[prompt] = None

    def head(self) -> AnyPrompt | None:
        """The prompt to compute next, which stays the head until it is removed; None when none waits."""
        if not self._scheduled and self._raw:
            batch = list(islice(self._raw, self._scheduling_batch))
            for prompt in batch:
                del self._raw[prompt]
            if len(batch) == 1:
                self._scheduled[batch[0]] = None
                return batch[0]
            self._scheduled.update(dict.fromkeys(order_prompts(self._policy, batch)))
        return next(iter(self._scheduled)) if self._scheduled else None

    def remove(self, prompt: AnyPrompt) -> None:
        """Takes out a prompt that is here: it is computed, or not wanted any more."""
        del (self._scheduled if prompt in self._scheduled else self._raw)[prompt]
