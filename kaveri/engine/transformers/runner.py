"""Runs a transformers model: packs a step, calls the model's own forward with paged attention, draws tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kaveri.engine.stepwise.runner import Drawn, LayerListener, NoToken, ScoredSlice, SequenceSlice
from kaveri.engine.transformers.attention import PagedMemory, report_last
from kaveri.engine.transformers.sampler import draw_tokens, score_tokens
from kaveri.engine.transformers.step import pack
from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool


class TransformersRunner:
    """ModelRunner of a transformers model. Made by load_runner(), which has checked that its attention is supported."""

    name = "transformers"

    def __init__(
        self, model: Any, layout: KvLayout, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._model = model
        self._memory: PagedMemory | None = None
        self._device: torch.device = model.device
        self.device = str(model.device)
        self.layout = layout
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    def attach(self, pool: KvPool) -> None:
        """Set the KV pool, once, before the first step. Raises ConfigError if the device lacks memory for its copy."""
        assert self._memory is None, "a runner has one pool"
        self.layout.require_same(pool.layout)
        try:
            self._memory = PagedMemory(pool, self._device)
        except torch.OutOfMemoryError as error:
            reason = f"is {pool.memory.nbytes} bytes, more than {self.device} has free beside the model"
            raise ConfigError("kv_cache_memory", reason) from error

    @torch.inference_mode()
    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Compute one step and draw tokens. Errors of on_layer pass through and leave the step half done."""
        memory = self._memory
        assert memory is not None, "attach() comes first"
        step = pack(batch, self.layout, self._device, on_layer)
        logits: Tensor = self._model(
            input_ids=step.token_ids,
            position_ids=step.position_ids,
            use_cache=False,
            logits_to_keep=step.logits_rows,
            kaveri_step=step,
            kaveri_memory=memory,
        ).logits
        if step.reports is not None and step.reports.under_way is not None:
            report_last(step.reports)
        results: list[Drawn] = [None] * len(batch)
        first = len(step.drawn_slices)
        if first:
            slices = [batch[index] for index in step.drawn_slices]
            drawn = draw_tokens(logits[0, :first], slices, self.eos_token_ids)
            for index, token in zip(step.drawn_slices, drawn, strict=True):
                results[index] = token
        for index in step.scored_slices:
            last = first + len(batch[index].scored_ids)
            results[index], first = _scored(logits[0, first:last], batch[index], results[index]), last
        return results

    def completed(self, block_ids: Sequence[int]) -> None:
        assert self._memory is not None, "attach() comes first"
        self._memory.mirror_all(block_ids)

    def landed(self, block_ids: Sequence[int]) -> None:
        assert self._memory is not None, "attach() comes first"
        self._memory.landed(block_ids)


def _scored(logits: Tensor, piece: SequenceSlice, drawn: Drawn) -> Drawn:
    assert not isinstance(drawn, ScoredSlice)
    try:
        entries = score_tokens(logits, piece.scored_ids, piece.params.prompt_logprobs or 0)
    except Exception as error:
        return NoToken(f"its prompt_logprobs raised {error!r}", is_final=True)
    return ScoredSlice(entries, drawn)
