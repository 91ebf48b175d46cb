"""Simulates schedulers of other systems, for comparison: each instance prefills and decodes on one engine. Pure.

Steps last as long as the latency model says. Decode-only steps form one event, until a request arrives, ends or lacks a
block.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kaveri.errors import ConfigError
from kaveri.latency.model import LatencyModel
from kaveri.simulator.baseline_rule import BaselineRule
from kaveri.simulator.spec import ClusterSpec
from kaveri.simulator.table import RunTable
from kaveri.workload.requests import PlannedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineSpec:
    """Settings of one simulated instance that batches by `rule`."""

    rule: BaselineRule
    latency: LatencyModel
    total_blocks: int
    block_tokens: int = 16
    max_batch: int = 256
    step_tokens: int = 2048
    """Token limit of a step: prompt tokens for prefill-first (a lone longer prompt is taken), all tokens for
    token-budget, tokens of prompt chunks for beside; unused for whole-batch."""
    step_prompts: int = 256
    """Limit on whole prompts per step."""
    swap_token_s: float | None = None
    """Seconds to move one token's KV to host memory or back when a request is preempted. None: recompute it."""

    def __post_init__(self) -> None:
        for name in ("total_blocks", "block_tokens", "max_batch", "step_tokens", "step_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"is {getattr(self, name)}; it must be at least 1")
        if self.swap_token_s is not None and not 0 <= self.swap_token_s < math.inf:
            raise ConfigError("swap_token_s", f"is {self.swap_token_s!r}; it must be a number of at least 0")


@dataclass(slots=True, eq=False)
class _BaselineRequest:
    number: int
    prompt: int
    output: int
    drawn: int = 0
    computed: int = 0
    """Tokens whose KV is computed."""
    blocks: int = 0
    last_s: float = math.nan

    @property
    def tokens(self) -> int:
        return self.prompt + self.drawn

    @property
    def pending(self) -> int:
        """Tokens whose KV must be computed before the next token is sampled."""
        return self.tokens - self.computed


def baseline_of(cluster: ClusterSpec, rule: BaselineRule) -> BaselineSpec:
    """Return settings with the cluster's decode pool and batch limit. A step holds one prefill chunk, or with rules
    that take whole prompts as many tokens as the longest request, as in vLLM 0.2."""
    pool = cluster.decode.engine
    whole = rule in (BaselineRule.PREFILL_FIRST, BaselineRule.WHOLE_BATCH)
    return BaselineSpec(
        rule=rule,
        latency=pool.latency,
        total_blocks=pool.total_blocks,
        block_tokens=pool.block_tokens,
        max_batch=pool.max_batch,
        step_tokens=pool.max_model_len if whole else cluster.prefill.engine.chunk_tokens,
    )


def simulate_baseline(spec: BaselineSpec, requests: Sequence[PlannedRequest], count: int = 1) -> RunTable:
    """Simulate `count` equal instances that receive the requests round robin, until all have ended.

    Raises ConfigError for a request that exceeds an instance's pool.
    """
    if count < 1:
        raise ConfigError("count", f"is {count}; there must be at least 1 instance")
    if not requests:
        raise ConfigError("requests", "are none; there must be at least 1")
    # No instance is lost, and none records what a request's phases took.
    instance_ids = tuple(f"baseline-{number}" for number in range(count))
    table = RunTable(len(requests), instance_ids, losses=())
    for number, one in enumerate(requests):
        table.place(number, instance_ids[number % count], instance_ids[number % count])
        table.plan(number, one.arrival_s, one.lengths.prompt_tokens, one.lengths.output_tokens)
    instances = [_BaselineInstance(spec, requests, range(first, len(requests), count), table) for first in range(count)]
    for instance in instances:
        instance.run()
    return table


class _BaselineInstance:
    def __init__(self, spec: BaselineSpec, requests: Sequence[PlannedRequest], numbers: range, table: RunTable) -> None:
        """numbers: indices of the requests for this instance."""
        for number in numbers:
            lengths = requests[number].lengths
            if -(-(lengths.prompt_tokens + lengths.output_tokens) // spec.block_tokens) > spec.total_blocks:
                tokens = f"{lengths.prompt_tokens} + {lengths.output_tokens} tokens"
                raise ConfigError("requests", f"one has {tokens}; the pool has {spec.total_blocks} blocks")
        self._spec = spec
        self._requests = requests
        self._coming = deque(numbers)
        self._table = table
        self._now_s = 0.0
        self._free = spec.total_blocks
        self._waiting: deque[_BaselineRequest] = deque()
        self._prefilling: deque[_BaselineRequest] = deque()
        """Admitted requests whose prompts are not fully computed."""
        self._running: list[_BaselineRequest] = []
        self._swapped: deque[_BaselineRequest] = deque()

    def run(self) -> None:
        while self._has_work() or self._coming:
            if not self._has_work():
                self._now_s = max(self._now_s, self._next_arrival_s())
            self._take_arrivals()
            self._step()
        assert self._free == self._spec.total_blocks, "blocks are left"

    def _has_work(self) -> bool:
        return bool(self._waiting or self._running or self._prefilling or self._swapped)

    def _next_arrival_s(self) -> float:
        return self._requests[self._coming[0]].arrival_s if self._coming else math.inf

    def _take_arrivals(self) -> None:
        while self._next_arrival_s() <= self._now_s:
            number = self._coming.popleft()
            lengths = self._requests[number].lengths
            self._waiting.append(_BaselineRequest(number, lengths.prompt_tokens, lengths.output_tokens))

    # Forming steps.

    def _step(self) -> None:
        match self._spec.rule:
            case BaselineRule.PREFILL_FIRST:
                prompts = self._whole_prompts()
            case BaselineRule.WHOLE_BATCH:
                prompts = [] if self._running else self._padded_batch()
            case BaselineRule.TOKEN_BUDGET | BaselineRule.BESIDE:
                self._mixed_step()
                return
        if prompts:
            longest = max(one.pending for one in prompts)
            padded = self._spec.rule is BaselineRule.WHOLE_BATCH
            spans = [(0, longest if padded else one.pending) for one in prompts]
            self._now_s += self._spec.latency.step_s(spans)
            for one in prompts:
                self._computed(one)
        else:
            self._decode()

    def _whole_prompts(self) -> list[_BaselineRequest]:
        """Dequeue prompts for a step, first come first served; none while a request is swapped to host memory."""
        spec, taken = self._spec, list[_BaselineRequest]()
        tokens = 0
        while self._waiting and not self._swapped and len(taken) < spec.step_prompts:
            one = self._waiting[0]
            is_full = len(self._running) + len(taken) >= spec.max_batch
            if is_full or (taken and tokens + one.pending > spec.step_tokens) or not self._take(one, one.tokens + 1):
                break
            tokens += one.pending
            taken.append(self._waiting.popleft())
        return taken

    def _padded_batch(self) -> list[_BaselineRequest]:
        """Dequeue the next batch of requests whose prompts and whole answers fit into the pool."""
        taken = list[_BaselineRequest]()
        while self._waiting and len(taken) < self._spec.max_batch:
            one = self._waiting[0]
            if not self._take(one, one.prompt + one.output):
                break
            taken.append(self._waiting.popleft())
        return taken

    def _mixed_step(self) -> None:
        spec = self._spec
        self._swap_in()
        while self._waiting and not self._swapped and len(self._running) + len(self._prefilling) < spec.max_batch:
            if not self._take(self._waiting[0], self._waiting[0].tokens + 1):
                break
            self._prefilling.append(self._waiting.popleft())
        if not self._prefilling:
            self._decode()
            return
        self._grow()
        drawing = len(self._running)
        room = spec.step_tokens - (drawing if spec.rule is BaselineRule.TOKEN_BUDGET else 0)
        chunks = list[tuple[_BaselineRequest, int]]()
        for one in self._prefilling:
            if room < 1:
                break
            tokens = min(room, one.pending)
            chunks.append((one, tokens))
            room -= tokens
        if not chunks and not drawing:
            raise AssertionError("a step has nothing to do")
        spans = [(one.computed, tokens) for one, tokens in chunks]
        context = sum(one.tokens for one in self._running)
        self._now_s += spec.latency.mixed_step_s(spans, drawing, context)
        self._drew(1, 0.0)
        for one, tokens in chunks:
            if tokens == one.pending:
                self._prefilling.remove(one)
                self._computed(one)
            else:
                one.computed += tokens

    # Results of a step.

    def _computed(self, one: _BaselineRequest) -> None:
        """Record the end of a prefill or recomputation: the request joins the running batch, or ends."""
        one.computed = one.tokens
        one.drawn += 1
        if one.drawn == 1:
            self._table.times["first_s"][one.number] = self._now_s
        else:
            self._table.gaps(self._now_s - one.last_s, 1)
        one.last_s = self._now_s
        if one.drawn == one.output:
            self._end(one)
        else:
            self._running.append(one)

    def _decode(self) -> None:
        spec = self._spec
        self._swap_in()
        self._grow()
        count = len(self._running)
        if not count:
            # The only one has lost its blocks, and takes them again.
            return
        most = min(one.output - one.drawn for one in self._running)
        if self._swapped or self._growth(most) > self._free:
            most = 1
        fit = spec.latency.decode_fit(count)
        context = sum(one.tokens for one in self._running)
        step_s = fit.step_s + context * fit.context_token_s + count * fit.request_s
        more_s = count * fit.context_token_s
        arrives_s = self._next_arrival_s()
        # At least one, even if a request came while KV was moved.
        begins_s, steps, first_s = self._now_s, 0, step_s
        while not steps or (steps < most and begins_s < arrives_s):
            begins_s += step_s
            step_s += more_s
            steps += 1
        rest_s = begins_s - self._now_s - first_s
        self._now_s = begins_s
        self._drew(steps, rest_s)

    def _drew(self, steps: int, rest_s: float) -> None:
        """Record `steps` decode steps of the running requests. rest_s: duration of all but the first."""
        first_end_s = self._now_s - rest_s
        if steps > 1:
            self._table.gaps(rest_s / (steps - 1), (steps - 1) * len(self._running))
        ended = False
        for one in self._running:
            self._table.gaps(first_end_s - one.last_s, 1)
            one.last_s = self._now_s
            one.drawn += steps
            one.computed += steps
            ended = ended or one.drawn == one.output
            if steps > 1:
                self._take(one, one.tokens)
        if ended:
            for one in [one for one in self._running if one.drawn == one.output]:
                self._running.remove(one)
                self._end(one)

    def _end(self, one: _BaselineRequest) -> None:
        self._table.times["last_s"][one.number] = self._now_s
        self._table.end(one.number, attempts=1, received_tokens=one.output)
        self._release(one)

    # Blocks.

    def _block_count(self, tokens: int) -> int:
        return -(-tokens // self._spec.block_tokens)

    def _growth(self, steps: int) -> int:
        return sum(max(0, self._block_count(one.tokens + steps) - one.blocks) for one in self._running)

    def _take(self, one: _BaselineRequest, tokens: int) -> bool:
        """Allocate the blocks that a request lacks to hold `tokens` tokens. False if too few are free."""
        more = max(0, self._block_count(tokens) - one.blocks)
        if more > self._free:
            return False
        one.blocks += more
        self._free -= more
        return True

    def _release(self, one: _BaselineRequest) -> None:
        self._free += one.blocks
        one.blocks = 0

    def _grow(self) -> None:
        """Give each running request a block for its next token; preempt the latest if blocks run out."""
        index = 0
        while index < len(self._running):
            one = self._running[index]
            if self._take(one, one.tokens + 1):
                index += 1
            elif self._prefilling and not self._prefilling[-1].computed:
                victim = self._prefilling.pop()
                self._release(victim)
                self._waiting.appendleft(victim)
            else:
                self._preempt(self._running.pop())

    def _preempt(self, one: _BaselineRequest) -> None:
        self._table.preemptions[one.number] += 1
        self._release(one)
        if self._spec.swap_token_s is None:
            one.computed = 0
            self._waiting.appendleft(one)
        else:
            self._now_s += one.computed * self._spec.swap_token_s
            self._swapped.appendleft(one)

    def _swap_in(self) -> None:
        while self._swapped and len(self._running) < self._spec.max_batch:
            one = self._swapped[0]
            # A spare block for each running request, or it would be preempted again at once.
            if self._block_count(one.tokens + 1) + len(self._running) > self._free:
                break
            self._take(one, one.tokens + 1)
            self._now_s += one.computed * (self._spec.swap_token_s or 0.0)
            self._running.append(self._swapped.popleft())
