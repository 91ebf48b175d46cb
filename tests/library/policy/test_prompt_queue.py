from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kaveri.policy.ordering import OrderingPolicy
from kaveri.policy.prompt_queue import PromptQueue

CHUNK_TOKENS = 100


@dataclass(eq=False)
class QueuedPrompt:
    token_count: int
    computed_tokens: int = 0


def new_queue(
    max_waiting: int = 100, policy: OrderingPolicy = OrderingPolicy.FCFS, batch: int = 16
) -> PromptQueue[QueuedPrompt]:
    return PromptQueue(policy, CHUNK_TOKENS, max_waiting, batch)


def add(queue: PromptQueue[QueuedPrompt], *token_counts: int) -> list[QueuedPrompt]:
    prompts = [QueuedPrompt(token_count) for token_count in token_counts]
    for prompt in prompts:
        queue.hold(prompt)
        queue.release(prompt)
    return prompts


def submitted(queue: PromptQueue[QueuedPrompt]) -> Iterator[QueuedPrompt]:
    while (prompt := queue.next()) is not None:
        queue.submitted(prompt)
        yield prompt


def test_the_engine_gets_two_chunks_of_work_and_the_rest_waits() -> None:
    queue = new_queue()
    prompts = add(queue, 80, 80, 80, 80, 80)
    assert list(submitted(queue)) == prompts[:3]
    assert queue.queued_tokens == 400


@given(
    st.sampled_from(OrderingPolicy),
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "release", "submit", "compute", "compute", "cancel"]), st.integers(0, 350)
        ),
        min_size=20,
    ),
)
def test_the_engine_is_never_idle_never_far_ahead_and_every_token_is_counted(
    policy: OrderingPolicy, batch: int, steps: list[tuple[str, int]]
) -> None:
    queue = new_queue(policy=policy, batch=batch)
    held: list[QueuedPrompt] = []
    waiting: list[QueuedPrompt] = []
    computing: list[QueuedPrompt] = []
    for step, number in steps:
        match step:
            case "arrive":
                held.append(QueuedPrompt(number + 1))
                queue.hold(held[-1])
            case "release" if held:
                waiting.append(held.pop(number % len(held)))
                queue.release(waiting[-1])
            case "submit":
                for prompt in submitted(queue):
                    waiting.remove(prompt)
                    computing.append(prompt)
                left_tokens = sum(prompt.token_count - prompt.computed_tokens for prompt in computing)
                assert left_tokens >= 2 * CHUNK_TOKENS or not waiting
            case "compute" if computing:
                prompt = computing[0]
                prompt.computed_tokens = min(prompt.token_count, prompt.computed_tokens + CHUNK_TOKENS)
                queue.advance(prompt, prompt.computed_tokens)
                if prompt.computed_tokens == prompt.token_count:
                    computing.remove(prompt)
            case "cancel" if prompts := [*held, *waiting, *computing]:
                prompt = prompts[number % len(prompts)]
                queue.remove(prompt)
                for place in (held, waiting, computing):
                    if prompt in place:
                        place.remove(prompt)
        assert list(queue.computing) == computing
        assert queue.room == 100 - len(held) - len(waiting)
        left = [prompt.token_count - prompt.computed_tokens for prompt in computing]
        assert queue.queued_tokens == sum(prompt.token_count for prompt in [*held, *waiting]) + sum(left)
        assert sum(left[:-1]) < 2 * CHUNK_TOKENS, "the last one was not needed"


def test_prompts_go_to_a_shorter_queue_newest_first_while_they_bring_the_two_closer() -> None:
    queue = new_queue()
    computing = add(queue, 300)
    assert list(submitted(queue)) == computing
    first, second, third, last = add(queue, 100, 90, 500, 80)
    assert queue.to_level(80) == [], "as long as what lies between"
    assert queue.to_level(81) == [last]
    # 400 are too little for the prompt of 500; the others leave 400 - 160 - 180, too little for a third.
    assert queue.to_level(400) == [last, second]
    assert queue.to_level(10_000) == [last, third, second, first]
    assert queue.queued_tokens == 1070, "none was removed"


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(0, 3000))
def test_queues_are_never_further_apart_after_levelling(counts: list[int], shorter_by: int) -> None:
    queue = new_queue()
    add(queue, *counts)
    moved = sum(prompt.token_count for prompt in queue.to_level(shorter_by))
    assert abs(shorter_by - 2 * moved) <= shorter_by
