"""Tries, before registration, that an engine can run its model, by dummy requests that leave no trace.

Two prompts, of two tokens and of one, share one step, so that chunks and single tokens are computed. If the instance
decodes, the first one continues with a decode step. All is shorter than a usual block, so no prefix cache keeps it."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kaveri.domain.sampling import ResolvedParams
from kaveri.engine.contract import (
    Engine,
    EngineEvent,
    EngineKey,
    EngineRequest,
    EngineStopped,
    FirstToken,
    RequestFailed,
    StepTokens,
)
from kaveri.errors import ConfigError, KaveriError, NoCapacity

TRIAL_TIMEOUT_S = 300.0
"""Seconds for a trial. The first steps of an engine on a GPU may compile kernels, for minutes."""
_LOOK_AGAIN_S = 0.005
_NAME = "kaveri-trial"


class Trial:
    """A test that a started engine can run its model, by dummy requests. For the event loop that receives its events.

    decodes: also test a decode step."""

    def __init__(self, engine: Engine, decodes: bool) -> None:
        # A decode-only engine cannot compute a prompt, and is not tried.
        self._engine: Any = engine if hasattr(engine, "prefill") else None
        self._decodes = decodes
        self._running: set[EngineKey] = set()
        self._failure: str | None = None
        self._over = asyncio.Event()

    async def run(self, timeout_s: float = TRIAL_TIMEOUT_S) -> None:
        """Run the dummy requests until they have ended and their blocks are free. Raises ConfigError otherwise."""
        if self._engine is None:
            return
        try:
            self._submit()
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
                # Blocks freed after the end of a request cause no event.
                while self._failure is None and not self._all_free():  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError:
            self._failure = f"two short prompts did not end in {timeout_s:g} s"
        except KaveriError as error:
            self._failure = str(error)
        if self._failure is not None:
            raise ConfigError("engine", f"cannot run this model: {self._failure}")

    def handle(self, events: Sequence[EngineEvent]) -> None:
        """Process a batch of the engine's events. Never raises."""
        for event in events:
            match event:
                case FirstToken(key=key):
                    if event.finish is None:
                        self._decode(key)
                    else:
                        self._end(key)
                case StepTokens():
                    for step in event.steps:
                        if step.finish is not None:
                            self._end(step.key)
                case RequestFailed() | EngineStopped():
                    self._fail(event.reason)

    def _submit(self) -> None:
        info = self._engine.info
        # Id 0 is a padding token in many vocabularies.
        token_id = 1 % info.vocab_size
        for prompt_tokens, answer_tokens in ((2, 2 if self._decodes else 1), (1, 1)):
            token_ids = (token_id,) * min(prompt_tokens, info.max_model_len - 1)
            params = ResolvedParams(max_tokens=answer_tokens, seed=0, ignore_eos=True)
            key = EngineKey(_NAME, prompt_tokens)
            self._running.add(key)
            try:
                self._engine.prefill(EngineRequest(key, token_ids, 0, params))
            except NoCapacity:
                # A pool of one block; the first prompt suffices there.
                self._running.discard(key)
        if not self._running:
            self._fail("its pool has no room for a prompt of two tokens")

    def _decode(self, key: EngineKey) -> None:
        try:
            self._engine.adopt(key)
            self._engine.admit(key)
        except KaveriError as error:
            self._fail(str(error))

    def _all_free(self) -> bool:
        free_blocks: int = self._engine.stats().free_blocks
        total_blocks: int = self._engine.info.total_blocks
        return free_blocks == total_blocks

    def _end(self, key: EngineKey) -> None:
        self._running.discard(key)
        if not self._running:
            self._over.set()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._over.set()
