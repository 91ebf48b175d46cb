"""A simulated engine whose requests may land with a part of their KV: the rest is computed beside the batch. Pure."""

from kaveri.simulator.engine import CountedEngine
from kaveri.simulator.sequence import CountedSequence


class ResumingEngine(CountedEngine):
    """Goes step by step while a request that was resumed lacks KV, as it does for requests that lost their blocks."""

    def land_partly(self, sequence: CountedSequence, held_tokens: int) -> None:
        """The KV of the first `held_tokens` of a request is here, whose blocks are open. All its tokens are known."""
        assert 0 < held_tokens < sequence.tokens
        sequence.computed = held_tokens
        self._decoding.land(sequence)
        self._blocks_may_be_taken()

    @property
    def computed_by_run(self) -> int | None:
        """What is added to `offset_tokens` of a running request for the tokens whose KV is here, as of the last step
        that sync() knows of. None: `computed` of each holds."""
        return None if self._by_steps else self._steps - 1

    def _begin(self) -> None:
        if not self._by_steps and any(sequence.pending > 1 for sequence in self._waiting):
            self._busy, self._run_steps = True, 1
            self._begin_step()
        else:
            super()._begin()
