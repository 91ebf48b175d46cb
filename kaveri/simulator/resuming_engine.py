"""A simulated engine whose requests may land with a part of their KV: the rest is computed with the batch. Pure."""

from kaveri.simulator.engine import CountedEngine
from kaveri.simulator.sequence import CountedSequence


class ResumingEngine(CountedEngine):
    """Goes step by step while a resumed request lacks KV, as it does for requests that lost their blocks."""

    def land_partly(self, sequence: CountedSequence, held_tokens: int) -> None:
        """Land a request whose blocks are open with the KV of its first `held_tokens`. All its tokens are known."""
        assert 0 < held_tokens < sequence.tokens
        sequence.computed = held_tokens
        self._decoding.land(sequence)
        self._blocks_may_be_taken()

    @property
    def computed_by_run(self) -> int | None:
        """Term to add to `offset_tokens` of a running request to get the tokens whose KV is here, after the last step
        that sync() has seen. None: `computed` of each holds."""
        return None if self._by_steps else self._steps - 1

    def _begin(self) -> None:
        if not self._by_steps and any(sequence.pending > 1 for sequence in self._waiting):
            self._busy, self._run_steps = True, 1
            self._begin_step()
        else:
            super()._begin()
