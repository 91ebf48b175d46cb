"""Orders the prompts that wait in a prefill instance's queue. Pure: no clock, no I/O."""

import enum
from collections.abc import Sequence
from typing import Protocol, TypeVar

from kaveri.policy.plugins import Guarded, PromptOrder, order_by

DEFAULT_SCHEDULING_BATCH = 16
"""Max prompts ordered together: TetriInfer's PrefillSchedBatch (arXiv 2401.11181, section 5.2.1)."""


class OrderingPolicy(enum.StrEnum):
    """Order in which a prefill instance computes waiting prompts."""

    FCFS = "fcfs"
    """First come, first served."""
    SJF = "sjf"
    """Shortest job first; minimizes the mean wait."""
    LJF = "ljf"
    """Longest job first."""


AnyOrdering = OrderingPolicy | Guarded[PromptOrder]
"""Built-in order or plug-in; FCFS replaces a failing plug-in."""


class Prompt(Protocol):
    """Prompt in a prefill instance's queue. Must be hashable."""

    @property
    def token_count(self) -> int:
        """Number of tokens to compute in prefill."""


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


def order_prompts(policy: AnyOrdering, waiting: Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """Order a scheduling batch of prompts for the engine. waiting: in order of arrival, which breaks ties."""
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
