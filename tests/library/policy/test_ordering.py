from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kaveri.policy.ordering import OrderingPolicy, order_prompts
from kaveri.policy.prompt_queue import PromptQueue


class WaitingPrompt(NamedTuple):
    arrival_number: int
    token_count: int


waiting_prompts = st.lists(
    st.builds(WaitingPrompt, st.integers(1, 1000), st.integers(1, 10_000)),
    max_size=20,
    unique_by=lambda prompt: prompt.arrival_number,
).map(sorted)


@given(waiting_prompts)
def test_prompts_go_by_arrival_or_by_length_and_then_by_arrival(waiting: list[WaitingPrompt]) -> None:
    by_length = sorted(waiting, key=lambda prompt: (prompt.token_count, prompt.arrival_number))
    longest_first = sorted(waiting, key=lambda prompt: (-prompt.token_count, prompt.arrival_number))
    assert list(order_prompts(OrderingPolicy.FCFS, waiting)) == waiting
    assert list(order_prompts(OrderingPolicy.SJF, waiting)) == by_length
    assert list(order_prompts(OrderingPolicy.LJF, waiting)) == longest_first


class PromptQueueMachine:
    """State machine: arrivals, computations and cancellations of prompts; records the order of computation."""

    def __init__(self, policy: OrderingPolicy, scheduling_batch: int) -> None:
        self.queue: PromptQueue[WaitingPrompt] = PromptQueue(policy, 1, 1000, scheduling_batch)
        self.waiting: list[WaitingPrompt] = []
        self.computed: list[WaitingPrompt] = []
        self.overtaken_by: Counter[int] = Counter()
        self.arrivals = 0

    def arrive(self, token_count: int) -> None:
        self.arrivals += 1
        prompt = WaitingPrompt(self.arrivals, token_count)
        self.waiting.append(prompt)
        self.queue.hold(prompt)
        self.queue.release(prompt)

    def compute(self) -> None:
        head = self.queue.next()
        assert (head is None) == (not self.waiting)
        if head is not None:
            self.queue.submitted(head)
            self.queue.advance(head, head.token_count)
            self.waiting.remove(head)
            self.computed.append(head)
            self.overtaken_by.update(
                prompt.arrival_number for prompt in self.waiting if prompt.arrival_number < head.arrival_number
            )

    def compute_all(self) -> None:
        while self.waiting:
            self.compute()

    def cancel(self, index: int) -> None:
        if self.waiting:
            self.queue.remove(self.waiting.pop(index % len(self.waiting)))


# A number above 0 arrives with that length, 0 computes the head, one below cancels a prompt.
steps = st.lists(st.integers(-3, 6), max_size=200)


@given(st.sampled_from(OrderingPolicy), st.integers(1, 5), steps)
def test_a_prompt_is_overtaken_by_fewer_than_a_scheduling_batch(
    policy: OrderingPolicy, scheduling_batch: int, steps: list[int]
) -> None:
    machine = PromptQueueMachine(policy, scheduling_batch)
    for step in steps:
        if step > 0:
            machine.arrive(step)
        elif step == 0:
            machine.compute()
        else:
            machine.cancel(-step)
        assert machine.queue.room == 1000 - len(machine.waiting)
        assert max(machine.overtaken_by.values(), default=0) <= scheduling_batch - 1
    machine.compute_all()
    assert max(machine.overtaken_by.values(), default=0) <= scheduling_batch - 1


def test_the_bound_on_overtaking_is_reached() -> None:
    machine = PromptQueueMachine(OrderingPolicy.SJF, 4)
    for token_count in (9, 1, 2, 3, 1):
        machine.arrive(token_count)
    machine.compute_all()
    assert machine.overtaken_by[1] == 3
    assert [prompt.token_count for prompt in machine.computed] == [1, 2, 3, 9, 1]


def test_prompts_that_come_one_by_one_behind_a_batch_are_ordered_together() -> None:
    machine = PromptQueueMachine(OrderingPolicy.SJF, 4)
    for token_count in (5, 6, 7):
        machine.arrive(token_count)
    for token_count in (3, 2, 1):
        machine.compute()
        machine.arrive(token_count)
    machine.compute_all()
    assert [prompt.token_count for prompt in machine.computed] == [5, 6, 7, 1, 2, 3]
