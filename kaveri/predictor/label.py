"""kaveri predictor label: runs prompts through a served model and records the lengths of its answers (TetriInfer,
figure 8). Labels are appended to the file one by one, so that a killed run can be resumed."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kaveri.client.answer import ModelInfo
from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import FinishReason, ResolvedParams
from kaveri.errors import ConfigError, InvalidArgument, NoCapacity, RequestCancelled, Unavailable
from kaveri.predictor.labels import Label, read_labels
from kaveri.workload.prompts import RequestPrompt

_RETRY_AFTER_S = 1.0
"""Retry delay when the cluster gives none."""
_RETRY_AT_MOST_AFTER_S = 10.0


@dataclass(frozen=True)
class LabelOutcome:
    """Result of a labelling run: prompts labelled, skipped and refused."""

    labelled: int
    resumed: int
    """Prompts labelled by an earlier run or twice in the input."""
    refused: tuple[str, ...]
    """A sentence for each prompt that the cluster refused: its line and the reason."""


async def label_prompts(
    prompts: list[tuple[int, RequestPrompt]],
    out: Path,
    target: str,
    *,
    model: str | None,
    concurrency: int,
    max_tokens: int | None,
    timeout_s: float,
    advance: Callable[[int], None],
) -> LabelOutcome:
    """Run prompts through a served model, greedily, and append their answer lengths to the file `out`; skips those in
    it.

    prompts: each with its line number. concurrency: prompts in flight. max_tokens: limit of an answer; None: no limit.
    timeout_s: for one prompt, including waits for a busy cluster. advance: called with the number of prompts done.
    Raises ConfigError: `out` is corrupt or of another model, or the model is not served; else the KaveriError that ends
    the run. Labels written so far are kept. Cancellation ends all requests in flight.
    """
    async with AsyncClient(target, timeout_s=timeout_s) as client:
        info = await _served_model(client, model)
        _drop_torn_line(out)
        done = _labelled_before(out, info)
        waiting = {prompt.digest: (number, prompt) for number, prompt in prompts if prompt.digest not in done}
        advance(len(prompts) - len(waiting))
        run = _Run(client, info, ResolvedParams(max_tokens=max_tokens, temperature=0.0), timeout_s, advance)
        with out.open("a", encoding="utf-8") as file:
            # All workers share one iterator, so at most one request per worker is in flight.
            source = iter(waiting.values())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(concurrency, len(waiting))):
                        group.create_task(run.work(source, file))
            except* Exception as errors:
                # One reason is enough; the others failed for the same reason or were cancelled.
                raise _first(errors) from None
    return LabelOutcome(run.labelled, len(prompts) - len(waiting), tuple(run.refused))


class _Run:
    """State shared by the workers of one labelling run."""

    def __init__(
        self,
        client: AsyncClient,
        info: ModelInfo,
        params: ResolvedParams,
        timeout_s: float,
        advance: Callable[[int], None],
    ) -> None:
        self.labelled = 0
        self.refused: list[str] = []
        self._client = client
        self._info = info
        self._params = params
        self._timeout_s = timeout_s
        self._advance = advance

    async def work(self, source: Iterator[tuple[int, RequestPrompt]], file: IO[str]) -> None:
        """Label prompts from the shared iterator `source` until it is empty."""
        for number, prompt in source:
            try:
                label = await self._label(prompt)
            except InvalidArgument as error:
                self.refused.append(f"line {number}: {error}")
            else:
                # One write per line: a kill leaves at most the last line incomplete.
                file.write(label.as_line())
                file.flush()
                self.labelled += 1
            self._advance(1)

    async def _label(self, prompt: RequestPrompt) -> Label:
        give_up_at_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                answer = await self._client.generate(
                    **prompt.as_json(), params=self._params, model=self._info.name, timeout_s=self._timeout_s
                )
                break
            except (NoCapacity, Unavailable) as error:
                wait_s = min(error.retry_after_s or _RETRY_AFTER_S, _RETRY_AT_MOST_AFTER_S)
                if asyncio.get_running_loop().time() + wait_s >= give_up_at_s:
                    raise
                await asyncio.sleep(wait_s)
        if answer.finish_reason is FinishReason.CANCELLED:
            # Another client cancelled the request by its id, so its length is meaningless.
            raise RequestCancelled(answer.request_id)
        return Label(
            prompt=prompt,
            model=self._info.name,
            vocab_size=self._info.vocab_size,
            prompt_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            finish_reason=answer.finish_reason,
        )


async def _served_model(client: AsyncClient, model: str | None) -> ModelInfo:
    served = await client.list_models()
    found = [entry for entry in served if model in (None, entry.name)]
    if len(found) != 1:
        names = ", ".join(entry.name for entry in served) or "none"
        reason = "is not given, and several are served" if model is None else f"{model!r} is not served"
        raise ConfigError("--model", f"{reason} at {client.target}: {names}")
    return found[0]


def _drop_torn_line(out: Path) -> None:
    if not out.exists():
        return
    content = out.read_bytes()
    if content and not content.endswith(b"\n"):
        with out.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _labelled_before(out: Path, info: ModelInfo) -> set[bytes]:
    labels = read_labels(out, "--out") if out.exists() else []
    if labels and (labels[0].model, labels[0].vocab_size) != (info.name, info.vocab_size):
        raise ConfigError("--out", f"{out} holds labels of model {labels[0].model!r}, not of {info.name!r}")
    return {label.prompt.digest for label in labels}


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    error: Exception = errors
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
