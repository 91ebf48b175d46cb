"""Orders the prompts that wait in a prefill instance's queue. Pure: no clock, no I/O."""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """One prompt in the queue."""

    arrival_number: int
    """Rises with each arrival; names the prompt within its queue."""
    token_count: int
    """Tokens to compute."""


def order_prompts(policy: OrderingPolicy, waiting: Sequence[WaitingPrompt]) -> tuple[WaitingPrompt, ...]:
    """One scheduling batch in the order in which it goes to the engine; equal lengths in the order of arrival."""
    match policy:
        case OrderingPolicy.FCFS:
            return tuple(sorted(waiting, key=lambda prompt: prompt.arrival_number))
        case OrderingPolicy.SJF:
            return tuple(sorted(waiting, key=lambda prompt: (prompt.token_count, prompt.arrival_number)))
        case OrderingPolicy.LJF:
            return tuple(sorted(waiting, key=lambda prompt: (-prompt.token_count, prompt.arrival_number)))


class PromptSchedule:
    """A raw queue in the order of arrival, and before it a scheduled queue: one batch in the policy's order.

    The next batch is taken from the raw queue when the scheduled queue is empty and a prompt is wanted, so it holds all
    that wait by then, up to its size (TetriInfer, arXiv 2401.11181, section 3.3.1). Nobody starves: a prompt is
    overtaken by at most `scheduling_batch - 1` prompts that came after it, those of its own batch.
    """

    def __init__(self, policy: OrderingPolicy, scheduling_batch: int = DEFAULT_SCHEDULING_BATCH) -> None:
        """scheduling_batch: most prompts that are ordered together, at least 1; 1 is FCFS whatever the policy."""
        assert scheduling_batch >= 1, scheduling_batch
        self._policy = policy
        self._scheduling_batch = scheduling_batch
        self._raw: dict[int, WaitingPrompt] = {}
        self._scheduled: deque[WaitingPrompt] = deque()

    def __len__(self) -> int:
        """Prompts that wait, in either queue."""
        return len(self._raw) + len(self._scheduled)

    def add(self, prompt: WaitingPrompt) -> None:
        """Lets the prompt wait, behind all that are here. Its arrival number must be above theirs."""
        self._raw[prompt.arrival_number] = prompt

    def head(self) -> WaitingPrompt | None:
        """The prompt to compute next, which stays the head until it is removed; None when none waits."""
        if not self._scheduled:
            batch = list(islice(self._raw.values(), self._scheduling_batch))
            for prompt in batch:
                del self._raw[prompt.arrival_number]
            self._scheduled.extend(order_prompts(self._policy, batch))
        return self._scheduled[0] if self._scheduled else None

    def remove(self, prompt: WaitingPrompt) -> None:
        """Takes a prompt out that is here: it was computed, or nobody wants it any more."""
        if self._scheduled and self._scheduled[0] == prompt:
            self._scheduled.popleft()
        elif self._raw.pop(prompt.arrival_number, None) is None:
            self._scheduled.remove(prompt)
