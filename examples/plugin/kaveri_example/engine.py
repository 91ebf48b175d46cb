"""An engine: `--engine example`. A made-up model on the stepwise engine, which schedules, keeps blocks and moves KV.

The KV of a token is the token itself, written into every layer. The next token is drawn from all tokens so far, as they
are read back from the KV; so an answer is right only if every block is where it should be.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kaveri.domain.sampling import Logprobs, SamplingParams
from kaveri.engine.settings import DEFAULT_BLOCK_TOKENS, EngineSettings
from kaveri.engine.stepwise.runner import Drawn, DrawnToken, LayerListener, ScoredSlice, SequenceSlice
from kaveri.engine.stopping import barred_token_ids
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool
from kaveri.models import resolve_model

EOS = 0
_DRAWN_IDS = 1000
"""Draws are below it, whatever the vocabulary."""
_EOS_ONE_IN = 50
_LAYERS = 2
_HEAD_DIM = 4


def build(settings: EngineSettings) -> "ExampleRunner":
    """What the entry point names: called once per instance, with its settings."""
    config = json.loads((Path(resolve_model(settings.model)) / "config.json").read_text())
    vocab_size = config["vocab_size"]
    block_tokens = settings.block_tokens or DEFAULT_BLOCK_TOKENS
    return ExampleRunner(vocab_size, settings.max_model_len or 4096, block_tokens)


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows these."""
    places = np.arange(1, len(token_ids) + 1, dtype=np.uint64)
    mixed = int(((np.asarray(token_ids, np.uint64) + np.uint64(1)) * places * np.uint64(0x9E3779B97F4A7C15)).sum())
    mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >> 16
    return EOS if mixed % _EOS_ONE_IN == 0 else 1 + mixed // _EOS_ONE_IN % (_DRAWN_IDS - 1)


class ExampleRunner:
    """A ModelRunner (kaveri.engine.stepwise.runner)."""

    name = "example"
    device = "cpu"
    eos_token_ids = frozenset({EOS})

    def __init__(self, vocab_size: int, max_model_len: int, block_tokens: int) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # The fingerprint changes with whatever changes the KV that is written, or what is drawn from it.
        self.layout = KvLayout("kaveri-example-1", _LAYERS, block_tokens, 1, _HEAD_DIM, dtype="float32")
        self._kv: npt.NDArray[np.uint32] = np.empty(0, np.uint32)

    def attach(self, pool: KvPool) -> None:
        """Gets the pool's memory: [layer_count, block_count, block_bytes], uint8."""
        # [layer_count, block_count, K and V, block_tokens, head_dim]
        self._kv = pool.memory.view(np.uint32).reshape(_LAYERS, -1, 2, self.layout.block_tokens, _HEAD_DIM)

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Writes the KV of all slices, layer by layer, and then draws."""
        for layer in range(_LAYERS):
            for part in batch:
                blocks, slots = self._places(part, part.start, part.start + len(part.token_ids))
                self._kv[layer, blocks, :, slots] = np.asarray(part.token_ids, np.uint32)[:, None, None]
            if on_layer is not None:
                # From now on this layer of the step may be pushed.
                on_layer(layer)
        return [self._scored(part, self._draw(part) if part.draw else None) for part in batch]

    def completed(self, block_ids: Sequence[int]) -> None:
        """Nothing to copy: the pool is the only memory."""

    def landed(self, block_ids: Sequence[int]) -> None:
        """Nothing to copy."""

    def _places(self, part: SequenceSlice, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Block and slot of positions [start, end)."""
        index, slots = np.divmod(np.arange(start, end), self.layout.block_tokens)
        return np.asarray(part.block_ids)[index], slots

    def _scored(self, part: SequenceSlice, drawn: DrawnToken | None) -> Drawn:
        """With what the slice asks for about its prompt (params.prompt_logprobs)."""
        if not part.scored_ids:
            return drawn
        count = part.params.prompt_logprobs or 0
        return ScoredSlice(tuple(_made_up(token_id, count) for token_id in part.scored_ids), drawn)

    def _draw(self, part: SequenceSlice) -> DrawnToken:
        blocks, slots = self._places(part, 0, part.start + len(part.token_ids))
        # Each position from another layer, K or V, in turn: all of them count.
        turns = np.arange(len(blocks))
        token_ids = self._kv[turns % _LAYERS, blocks, turns // _LAYERS % 2, slots, 0]
        token_id = next_token(token_ids.tolist())
        # Nothing ends an answer before its min_tokens.
        barred = barred_token_ids(part.params, self.eos_token_ids, part.draw_index)
        while token_id in barred:
            token_id = (token_id + 1) % _DRAWN_IDS
        return DrawnToken(token_id, _logprobs(token_id, part.params))


def _logprobs(token_id: int, params: SamplingParams) -> Logprobs | None:
    """Made up, where they are asked for."""
    return None if params.logprobs is None else _made_up(token_id, params.logprobs)


def _made_up(token_id: int, count: int) -> Logprobs:
    return Logprobs(-0.5, tuple(((token_id + rank) % _DRAWN_IDS, -0.5 - rank) for rank in range(count)))
