"""The length predictor of a simulated cluster: the service's own code around a model that takes virtual time."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from kaveri.domain.length import TokenRange
from services.predictor.worker import WorkerThread

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")

_CALL_S = 0.004
"""What one batch takes."""


class SimulatedPredictor:
    """A LengthModel that is sure of a bucket, and mostly wrong: it looks at nothing but a checksum of the prompt."""

    granularity = 16
    bucket_count = 8
    version = "simulated"

    def __init__(self, model: str, vocab_size: int, max_prompt_tokens: int) -> None:
        self.model, self.vocab_size, self.max_prompt_tokens = model, vocab_size, max_prompt_tokens

    def predict(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """See LengthModel."""
        chosen = (zlib.crc32(repr(list(prompt)).encode()) % self.bucket_count for prompt in prompts)
        return [[float(bucket == one) for bucket in range(self.bucket_count)] for one in chosen]

    def range_of(self, bucket: int) -> TokenRange:
        """See LengthModel."""
        return TokenRange(bucket * self.granularity, (bucket + 1) * self.granularity)


class SimulatedWorker(WorkerThread):
    """Computes on the simulated loop, one call at a time, each after its virtual time. It has no thread."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()

    async def call(
        self, function: Callable[ParamsT, ResultT], *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> ResultT:
        """See WorkerThread."""
        async with self._free:
            await asyncio.sleep(_CALL_S)
            return function(*args, **kwargs)

    def close(self) -> None:
        """Nothing to end."""
