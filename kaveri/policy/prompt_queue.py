"""Decides which prompt to submit to a prefill engine, and when. Pure: no clock, no I/O.

An engine computes in the order of submission, so prompts are submitted late: it has about two chunks of work, one that
it computes and one so that it never idles.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Generic

from kaveri.policy.ordering import DEFAULT_SCHEDULING_BATCH, AnyOrdering, AnyPrompt, order_prompts

_CHUNKS_AHEAD = 2


class PromptQueue(Generic[AnyPrompt]):
    """Prompts of a prefill instance until computed. States: held (not ready to compute), waiting, computing.

    Waiting prompts are in a raw queue in order of arrival, which feeds a scheduled queue: one batch in the policy's
    order. When the scheduled queue is empty and a prompt is needed, it takes the oldest `scheduling_batch` raw prompts
    (TetriInfer, arXiv 2401.11181, section 3.3.1). No prompt starves: at most `scheduling_batch - 1` later prompts,
    those of its own batch, overtake it.
    """

    def __init__(
        self,
        policy: AnyOrdering,
        chunk_tokens: int,
        max_waiting: int,
        scheduling_batch: int = DEFAULT_SCHEDULING_BATCH,
    ) -> None:
        """chunk_tokens: tokens computed per engine step. max_waiting: max held or waiting prompts. scheduling_batch:
        max prompts that the policy orders together, at least 1; with 1 every policy is FCFS."""
        assert scheduling_batch >= 1, scheduling_batch
        self.chunk_tokens = chunk_tokens
        self.max_waiting = max_waiting
        self._policy = policy
        self._scheduling_batch = scheduling_batch
        self._held: set[AnyPrompt] = set()
        self._raw: dict[AnyPrompt, None] = {}
        self._scheduled: dict[AnyPrompt, None] = {}
        self._waiting_tokens = 0
        self.computing: dict[AnyPrompt, int] = {}
        """Prompts submitted to the engine, oldest first, with their remaining tokens."""
        self._computing_tokens = 0

    @property
    def queued_tokens(self) -> int:
        """Number of tokens in the queue that are not computed yet."""
        return self._waiting_tokens + self._computing_tokens

    @property
    def room(self) -> int:
        """Number of further prompts that fit into the queue."""
        room = self.max_waiting - len(self._held) - len(self._raw) - len(self._scheduled)
        return room if room > 0 else 0

    def hold(self, prompt: AnyPrompt) -> None:
        """Add a prompt that must not be computed before release(). There must be room."""
        assert self.room, "the queue is full"
        self._held.add(prompt)
        self._waiting_tokens += prompt.token_count

    def release(self, prompt: AnyPrompt) -> None:
        """Allow the computation of a held prompt: append it to the waiting ones."""
        self._held.remove(prompt)
        self._raw[prompt] = None

    def next(self) -> AnyPrompt | None:
        """Return the next prompt to submit; None if the engine has enough work or no prompt waits. The result stays the
        same until submitted() or remove(), so no prompt overtakes one that lacks KV blocks."""
        if self._computing_tokens >= _CHUNKS_AHEAD * self.chunk_tokens:
            return None
        if not self._scheduled and self._raw:
            batch = list(islice(self._raw, self._scheduling_batch))
            for prompt in batch:
                del self._raw[prompt]
            ordered = batch if len(batch) == 1 else order_prompts(self._policy, batch)
            self._scheduled.update(dict.fromkeys(ordered))
        return next(iter(self._scheduled), None)

    def submitted(self, prompt: AnyPrompt) -> None:
        """Record that the prompt returned by next() was submitted to the engine."""
        token_count = prompt.token_count
        del self._scheduled[prompt]
        self._waiting_tokens -= token_count
        self.computing[prompt] = token_count
        self._computing_tokens += token_count

    def advance(self, prompt: AnyPrompt, computed_tokens: int) -> None:
        """Record that the first `computed_tokens` of the prompt are computed. A finished prompt leaves the queue."""
        left_tokens, computing = prompt.token_count - computed_tokens, self.computing
        self._computing_tokens += left_tokens - computing[prompt]
        if left_tokens:
            computing[prompt] = left_tokens
        else:
            del computing[prompt]

    def to_level(self, surplus_tokens: int) -> list[AnyPrompt]:
        """Return the waiting prompts, newest first, whose move to a queue that is `surplus_tokens` shorter brings the
        two closest: each is shorter than what then still lies between the queues. Removes none."""
        moved: list[AnyPrompt] = []
        for prompt in (*reversed(self._raw), *reversed(self._scheduled)):
            if surplus_tokens <= 0:
                break
            if prompt.token_count < surplus_tokens:
                moved.append(prompt)
                surplus_tokens -= 2 * prompt.token_count
        return moved

    def remove(self, prompt: AnyPrompt) -> None:
        """Remove a prompt in any state, without informing the engine."""
        if prompt in self.computing:
            self._computing_tokens -= self.computing.pop(prompt)
            return
        if prompt in self._held:
            self._held.remove(prompt)
        else:
            del (self._scheduled if prompt in self._scheduled else self._raw)[prompt]
        self._waiting_tokens -= prompt.token_count


def prompt_fits(
    token_count: int, computing: Iterable[int], kept_blocks: int, free_blocks: int, block_tokens: int
) -> bool:
    """Return True if the free KV blocks, less `kept_blocks` reserved for running answers, suffice to compute the
    prompt.

    The prompt needs room for one more token, its first sampled one, or it would be preempted at once. `computing`
    (token counts of the prompts being computed) hold blocks for their prompts only, and need the same.
    """
    promised = sum(-(-(count + 1) // block_tokens) - -(-count // block_tokens) for count in computing)
    return -(-(token_count + 1) // block_tokens) + promised + kept_blocks <= free_blocks
