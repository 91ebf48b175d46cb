"""Holds the prompts that wait, and submits them to the engine late: in the policy's order, as it comes to need them.

The engine computes in the order of submission, so an order is final once submitted. It is kept about two chunks of
work ahead: one that it computes, one so that it never idles.
"""

import itertools
from collections.abc import Callable, Collection

from kaveri.engine.contract import PrefillEngine
from kaveri.errors import EngineError, InvalidArgument, NoCapacity
from kaveri.policy.ordering import DEFAULT_SCHEDULING_BATCH, OrderingPolicy, PromptSchedule, WaitingPrompt
from services.prefill.requests import PrefillRequest

_CHUNKS_AHEAD = 2

HasRoom = Callable[[PrefillRequest, Collection[PrefillRequest]], bool]
"""Whether a prompt may be submitted beside those that are being computed, the earliest submitted first."""


class PrefillQueue:
    """Requests from their arrival to the end of their computation. For one event loop."""

    def __init__(
        self,
        engine: PrefillEngine,
        policy: OrderingPolicy,
        chunk_tokens: int,
        max_waiting: int,
        scheduling_batch: int = DEFAULT_SCHEDULING_BATCH,
        has_room: HasRoom | None = None,
    ) -> None:
        """max_waiting: requests not submitted yet; add() refuses more.

        scheduling_batch: most prompts that the policy orders together. has_room: asked before a prompt is submitted,
        where not all free blocks are for prompts.
        """
        self._engine = engine
        self._schedule = PromptSchedule(policy, scheduling_batch)
        self._limit_tokens = _CHUNKS_AHEAD * chunk_tokens
        self._max_waiting = max_waiting
        self._has_room = has_room
        self._held: set[PrefillRequest] = set()
        self._waiting: dict[int, PrefillRequest] = {}
        self._prompts: dict[PrefillRequest, WaitingPrompt] = {}
        self._arrivals = itertools.count(1)
        self._computing: dict[PrefillRequest, None] = {}
        self._computing_tokens = 0
        self._waiting_tokens = 0
        self.out_of_blocks = False
        """Whether the last submit() ended because the engine had no blocks for the prompt at the head."""

    @property
    def queued_tokens(self) -> int:
        """Tokens accepted and not computed yet."""
        return self._waiting_tokens + self._computing_tokens

    @property
    def room(self) -> int:
        """Requests that it takes before it is full."""
        return max(0, self._max_waiting - len(self._held) - len(self._waiting))

    def add(self, request: PrefillRequest) -> None:
        """Lets the request wait. Raises NoCapacity when the queue is full."""
        self.hold(request)
        self.release(request)

    def hold(self, request: PrefillRequest) -> None:
        """Keeps a place for the request, which does not wait for the engine yet. Raises NoCapacity."""
        if not self.room:
            raise NoCapacity("prefill", retry_after_s=0.5, reason=f"{self._max_waiting} requests are queued already")
        self._held.add(request)
        self._waiting_tokens += request.token_count

    def release(self, request: PrefillRequest) -> None:
        """Lets a held request wait, behind all that wait already; others are ignored."""
        if request in self._held:
            self._held.remove(request)
            prompt = WaitingPrompt(next(self._arrivals), request.token_count)
            self._waiting[prompt.arrival_number] = request
            self._prompts[request] = prompt
            self._schedule.add(prompt)

    def remove(self, request: PrefillRequest) -> None:
        """Forgets the request, wherever it is; unknown ones are ignored. The engine is not told."""
        if request in self._held:
            self._held.remove(request)
            self._waiting_tokens -= request.token_count
        elif (prompt := self._prompts.get(request)) is not None:
            self._leave(request, prompt)
        elif request in self._computing:
            del self._computing[request]
            self._computing_tokens -= request.token_count - request.computed_tokens

    def advance(self, request: PrefillRequest, computed_tokens: int) -> None:
        """The engine has computed the first `computed_tokens` of the request."""
        if request in self._computing:
            self._computing_tokens -= computed_tokens - request.computed_tokens
            request.computed_tokens = computed_tokens
            if computed_tokens == request.token_count:
                del self._computing[request]

    def submit(self) -> list[tuple[PrefillRequest, InvalidArgument]]:
        """Gives the engine what it needs now. Returns the requests that it says can never fit; they wait no more."""
        refused: list[tuple[PrefillRequest, InvalidArgument]] = []
        self.out_of_blocks = False
        while self._computing_tokens < self._limit_tokens and (prompt := self._schedule.head()) is not None:
            request = self._waiting[prompt.arrival_number]
            if self._has_room is not None and not self._has_room(request, self._computing):
                self.out_of_blocks = True
                break
            try:
                self._engine.prefill(request.engine_request)
            except NoCapacity:
                self.out_of_blocks = True
                break
            except EngineError:
                break  # it stopped; EngineStopped follows and ends every request
            except InvalidArgument as error:
                refused.append((request, error))
            else:
                self._computing[request] = None
                self._computing_tokens += request.token_count
            self._leave(request, prompt)
        return refused

    def _leave(self, request: PrefillRequest, prompt: WaitingPrompt) -> None:
        self._schedule.remove(prompt)
        del self._waiting[prompt.arrival_number]
        del self._prompts[request]
        self._waiting_tokens -= request.token_count
