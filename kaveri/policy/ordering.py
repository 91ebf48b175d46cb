"""Orders the prompts that wait in a prefill instance's queue. Pure: no clock, no I/O."""

import enum
from collections.abc import Sequence
from itertools import islice
from typing import Generic, Protocol, TypeVar

from kaveri.policy.plugins import Guarded, PromptOrder, order_by

DEFAULT_SCHEDULING_BATCH = 16
"""TetriInfer's PrefillSchedBatch (arXiv 2401.11181, section 5.2.1)."""


class OrderingPolicy(enum.StrEnum):
    """Order in which waiting prompts are computed."""

    FCFS = "fcfs"
    """First come, first served."""
    SJF = "sjf"
    """Shortest job first; minimizes the mean wait."""
    LJF = "ljf"
    """Longest job first."""


AnyOrdering = OrderingPolicy | Guarded[PromptOrder]
"""A failing plug-in is replaced by FCFS."""


class Prompt(Protocol):
    """A prompt in the queue. Hashable, comparable."""

    @property
    def token_count(self) -> int:
        """Tokens to compute."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


def order_prompts(policy: AnyOrdering, waiting: Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """Order one scheduling batch, given in order of arrival, for the engine.

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
    """A raw queue in order of arrival, feeding a scheduled queue: one batch in the policy's order.

    The next batch moves from the raw queue when the scheduled queue is empty and a prompt is needed, so it holds all
    that wait by then, up to its size (TetriInfer, arXiv 2401.11181, section 3.3.1). No prompt starves: at most
    `scheduling_batch - 1` later prompts, those of its own batch, overtake it.
    """

    def __init__(self, policy: AnyOrdering, scheduling_batch: int = DEFAULT_SCHEDULING_BATCH) -> None:
        """scheduling_batch: max prompts ordered together, at least 1; with 1 every policy is FCFS."""
        assert scheduling_batch >= 1, scheduling_batch
        self._policy = policy
        self._scheduling_batch = scheduling_batch
        self._raw: dict[AnyPrompt, None] = {}
        self._scheduled: dict[AnyPrompt, None] = {}

    def __len__(self) -> int:
        """Waiting prompts in both queues."""
        return len(self._raw) + len(self._scheduled)

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._raw or prompt in self._scheduled

    def add(self, prompt: AnyPrompt) -> None:
        """Append a prompt to the queue."""
        self._raw[prompt] = None

    def head(self) -> AnyPrompt | None:
        """Next prompt to compute, unchanged until it is removed; None if none waits."""
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
        """Remove a prompt that was computed or is no longer needed."""
        del (self._scheduled if prompt in self._scheduled else self._raw)[prompt]
