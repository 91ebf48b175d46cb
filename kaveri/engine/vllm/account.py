"""Every live request of a vLLM engine, and what of vLLM's blocks is promised to whom. No I/O, no locks."""

from collections import deque
from collections.abc import Iterable

from kaveri.engine.contract import EngineKey, EngineStats
from kaveri.engine.phase import Phase
from kaveri.engine.vllm.hosted import Hosted
from kaveri.errors import NoCapacity, RequestAlreadyExists

_RETRY_AFTER_S = 0.1


class Account:
    """Requests from their submission until vLLM has their blocks back."""

    def __init__(self, total_blocks: int) -> None:
        self.prefills: dict[EngineKey, Hosted] = {}
        self.decodes: dict[EngineKey, Hosted] = {}
        self.waiting: deque[Hosted] = deque()
        """Those of `decodes` that are admitted and not in the running batch, in the order of admission."""
        self.by_number: dict[str, Hosted] = {}
        """All of them, live and ended, as vLLM is told of them."""
        self.ended: set[Hosted] = set()
        """Done, but vLLM has not got their blocks back, or a transfer can still touch them."""
        self.unused_blocks = total_blocks
        """Blocks that nobody held at the end of the last step."""
        self._total_blocks = total_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and nobody was promised."""
        return max(0, self.unused_blocks - sum(hosted.promised_blocks for hosted in self._live()))

    @property
    def short_of_blocks(self) -> bool:
        """Whether a request that gave its blocks up waits for others."""
        return any(hosted.preempted for hosted in self.decodes.values())

    def open(self, hosted: Hosted) -> None:
        """Promises a new request its blocks. Raises RequestAlreadyExists and NoCapacity."""
        role, table = ("prefill", self.prefills) if hosted.is_prefill else ("decode", self.decodes)
        if hosted.key in table:
            raise RequestAlreadyExists(hosted.key.request_id)
        # New requests would take the blocks that a preempted one waits for.
        if self.short_of_blocks:
            raise NoCapacity(role, _RETRY_AFTER_S, "a preempted request waits for blocks")
        free_blocks = self.free_blocks
        if hosted.needed_blocks > free_blocks:
            reason = f"{hosted.needed_blocks} KV blocks are needed, {free_blocks} are free"
            raise NoCapacity(role, _RETRY_AFTER_S, reason)
        table[hosted.key] = hosted
        self.by_number[hosted.number] = hosted

    def adopt(self, hosted: Hosted) -> None:
        """A computed request of the prefill side becomes a landed one of the decode side."""
        if hosted.key in self.decodes:
            raise RequestAlreadyExists(hosted.key.request_id)
        self.decodes[hosted.key] = self.prefills.pop(hosted.key)
        hosted.phase = Phase.LANDED
        hosted.is_source = False
        hosted.needed_blocks = 0

    def end(self, hosted: Hosted) -> None:
        """The request is done: nothing more is heard of it. Its blocks follow when nothing can touch them."""
        hosted.done = True
        if hosted.is_prefill:
            del self.prefills[hosted.key]
        else:
            del self.decodes[hosted.key]
            if hosted.phase is Phase.WAITING:
                self.waiting.remove(hosted)
        self.ended.add(hosted)

    def forget(self, hosted: Hosted) -> None:
        """vLLM has the blocks of an ended request back."""
        self.ended.discard(hosted)
        self.by_number.pop(hosted.number, None)

    def admit(self, max_batch: int) -> list[Hosted]:
        """Takes those who wait into the running batch, in order, as many as it has room for."""
        room = max_batch - self.running_count()
        admitted = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        for hosted in admitted:
            hosted.phase = Phase.RUNNING
        return admitted

    def running_count(self) -> int:
        """Requests in the running batch, those that were preempted in it included."""
        return sum(hosted.phase is Phase.RUNNING for hosted in self.decodes.values())

    def idle_count(self) -> int:
        """Requests that vLLM counts as unfinished and can do nothing for: their KV is to come, or to be admitted."""
        return sum(
            hosted.placed and not hosted.received and not hosted.stopped
            for hosted in (*self.decodes.values(), *self.ended)
        )

    def clear(self) -> None:
        """vLLM has all blocks back and no transfer is open."""
        self.prefills.clear()
        self.decodes.clear()
        self.waiting.clear()
        self.ended.clear()
        self.by_number.clear()
        self.unused_blocks = self._total_blocks

    def stats(self) -> EngineStats:
        """Takes time in proportion to the live requests, no more."""
        prefilling = [hosted for hosted in self.prefills.values() if hosted.phase is Phase.PREFILLING]
        admitted = len(self.waiting) + self.running_count()
        return EngineStats(
            free_blocks=self.free_blocks,
            running_requests=len(prefilling) + admitted,
            waiting_requests=len(self.decodes) - admitted,
            pending_prefill_tokens=sum(len(hosted.request.token_ids) - hosted.computed for hosted in prefilling),
            context_tokens=sum(hosted.computed for hosted in self._live()),
        )

    def check_integrity(self, vllm_ids: Iterable[str]) -> None:
        """Asserts that nobody is counted twice, and that whoever of these vLLM holds is known here."""
        known = {hosted.vllm_id for hosted in (*self._live(), *self.ended)}
        for vllm_id in vllm_ids:
            assert vllm_id in known, f"vLLM keeps {vllm_id}, which nobody knows"
        assert len(self.waiting) == len(set(self.waiting)), "a request waits twice"
        assert all(hosted.phase is Phase.WAITING for hosted in self.waiting), "a request waits that is not admitted"
        assert all(hosted.done for hosted in self.ended), "a request has ended that is not done"
        assert not any(hosted.done for hosted in self._live()), "a request is done that has not ended"

    def _live(self) -> tuple[Hosted, ...]:
        return (*self.prefills.values(), *self.decodes.values())
