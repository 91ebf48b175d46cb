"""A model runner that makes up tokens, and checks that the KV it reads is the KV that was written.

The next token is a pure function of the tokens so far and of the index of the draw, so a request gets the same answer
wherever and however it is placed. In place of KV there is a record per position::

    chain     64 bits over all tokens up to this one: chain' = chain * M + token + 1 (mod 2**64), from _CHAIN_SEED
    place     position << 32 | token

repeated over the row of the position, and masked differently in every layer, in K and in V, and in every word of the
row. A block that is stale, swapped, misplaced, of another layer or of another request does not read back.
"""

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kaveri.domain.sampling import ALL_RULED_OUT, Logprobs
from kaveri.engine.stepwise.runner import (
    Drawn,
    DrawnToken,
    LayerListener,
    NoToken,
    ScoredSlice,
    SequenceSlice,
)
from kaveri.engine.stopping import barred_token_ids
from kaveri.engine.token_rules import LogitChanges
from kaveri.errors import ConfigError, EngineError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import KvPool

_MASK = 2**64 - 1
_CHAIN_SEED = 0x6B61_7665_7269_0001
_MULTIPLIER = 0xD134_2543_DE82_EF95
_INVERSE = pow(_MULTIPLIER, -1, 2**64)
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_WORD_BYTES = 8
_DRAWN_TOKEN_IDS = 1000
_NONE: frozenset[int] = frozenset()
_LIKELIEST = 5.0
"""Logit of the token that is drawn unless a request's rules change it; those of others are below 4."""
_UNLIKELY = 1000.0
"""Subtracted from the logits of tokens that no answer has unless the rules leave nothing else."""
KV_LAYERS = 32
"""Layers of a model made by of_kv()."""
KV_UNIT_BYTES = 2 * KV_LAYERS * 2 * _WORD_BYTES
"""Unit of a token's KV in of_kv(): one 16-byte record in K and in V of each layer."""

Words = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """Made-up model: each token is a hash of those before. Instances of one shape and vocabulary can exchange KV."""

    vocab_size: int = 1000
    """Number of valid prompt ids. Answers use only the first 1000, and so do not depend on the vocabulary."""
    eos_token_id: int = 0
    eos_probability: float = 0.0
    """Chance of each draw to be eos_token_id, decided by the tokens so far. 0: an answer ends by max_tokens only."""
    max_model_len: int = 4096
    layer_count: int = 2
    block_tokens: int = 16
    kv_head_count: int = 2
    head_dim: int = 8
    """float32 values; kv_head_count * head_dim must be a multiple of 4, so that a position's record fits its row."""
    step_s: float = 0.0
    """Seconds that every step takes, spread over its layers."""
    prefill_token_s: float = 0.0
    """Additional seconds for each token of a prefill or recomputed chunk."""
    verify: bool = True
    """Check the KV of all earlier positions in every step. False: write only what the next step reads, which is cheap
    enough for high token rates and large KV."""

    def __post_init__(self) -> None:
        if self.vocab_size < 2 or not 0 <= self.eos_token_id < self.drawn_size:
            reason = f"is {self.vocab_size}; it must be at least 2, and its first {_DRAWN_TOKEN_IDS} ids hold "
            raise ConfigError("vocab_size", f"{reason}{self.eos_token_id}")
        if self.kv_head_count * self.head_dim % 4 != 0 or self.kv_head_count * self.head_dim == 0:
            raise ConfigError("head_dim", f"{self.kv_head_count} heads of {self.head_dim} are no multiple of 4")

    @property
    def drawn_size(self) -> int:
        """Number of ids that answers use: all are below it."""
        return min(self.vocab_size, _DRAWN_TOKEN_IDS)

    @property
    def layout(self) -> KvLayout:
        """Shape of the KV pool."""
        fingerprint = f"fake-{self.vocab_size}-{self.eos_token_id}-{self.eos_probability:g}"
        return KvLayout(
            fingerprint, self.layer_count, self.block_tokens, self.kv_head_count, self.head_dim, dtype="float32"
        )

    def of_kv(self, token_bytes: int) -> "FakeModel":
        """Return this model with one KV head and this many bytes of KV per token, a multiple of KV_UNIT_BYTES."""
        return replace(self, layer_count=KV_LAYERS, kv_head_count=1, head_dim=token_bytes // (2 * KV_LAYERS * 4))

    def answer(self, token_ids: Sequence[int], generated_count: int, token_count: int) -> list[int]:
        """Return the `token_count` tokens after `token_ids`, past any EOS. generated_count: tokens drawn before."""
        chain = self.chain(token_ids)
        answer = []
        for index in range(generated_count, generated_count + token_count):
            answer.append(self.draw(chain, index))
            chain = self.chain(answer[-1:], chain)
        return answer

    def chain(self, token_ids: Sequence[int], before: int = _CHAIN_SEED) -> int:
        """Return the 64-bit hash of a token sequence: `before`, the hash of its beginning, extended by token_ids."""
        for token_id in token_ids:
            before = (before * _MULTIPLIER + token_id + 1) & _MASK
        return before

    def draw(self, chain: int, draw_index: int, barred: AbstractSet[int] = _NONE) -> int:
        """Return the next token: splitmix64 of the sequence's hash and the index in the answer. Skips `barred`."""
        mixed = (chain + (draw_index + 1) * _GOLDEN) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        mixed ^= mixed >> 31
        if (mixed >> 40) < self.eos_probability * 2**24 and self.eos_token_id not in barred:
            return self.eos_token_id
        token_id = (mixed & 0xFFFF_FFFF) % (self.drawn_size - 1)
        return self.drawable(token_id + (token_id >= self.eos_token_id), barred)

    def drawn(self, part: SequenceSlice, chain: int) -> DrawnToken | NoToken:
        """Return a slice's token, with its requested log-probabilities."""
        barred = barred_token_ids(part.params, frozenset({self.eos_token_id}), part.draw_index)
        token_id: int | None
        if part.rules is None:
            token_id = self.draw(chain, part.draw_index, barred)
        else:
            # A grammar says itself where an answer ends.
            barred = _NONE if part.params.grammar is not None else barred
            try:
                changes = part.rules.changes(part.draw_index)
            except EngineError as error:
                return NoToken(str(error), is_final=True)
            token_id = self._draw_by_rules(chain, part.draw_index, barred, changes)
        if token_id is None:
            return NoToken(ALL_RULED_OUT, is_final=True)
        return DrawnToken(token_id, self.logprobs(token_id, part.params.logprobs))

    def _draw_by_rules(
        self, chain: int, draw_index: int, barred: AbstractSet[int], changes: LogitChanges
    ) -> int | None:
        """Return the likeliest token of made-up logits after `changes`: before them, it is draw()'s token. None if the
        changes leave none."""
        numbers = (np.arange(self.vocab_size, dtype=np.uint64) + np.uint64(chain ^ draw_index)) * np.uint64(_GOLDEN)
        logits = (numbers >> np.uint64(40)).astype(np.float32) * np.float32(4 * 2.0**-24)
        logits[self.drawn_size :] -= _UNLIKELY
        logits[self.draw(chain, draw_index, barred)] = _LIKELIEST
        changes.apply(logits)
        logits[list(barred)] = -np.inf
        likeliest = int(logits.argmax())
        return likeliest if np.isfinite(logits[likeliest]) else None

    def drawable(self, token_id: int, barred: AbstractSet[int]) -> int:
        """Return token_id, or the next id that is not barred."""
        while token_id in barred:
            token_id = (token_id + 1) % self.drawn_size
        return token_id

    def logprobs(self, token_id: int, count: int | None) -> Logprobs | None:
        """Return made-up log-probabilities of a token and of `count` others; None if count is None."""
        if count is None:
            return None
        return Logprobs(-0.5, tuple(((token_id + rank) % self.vocab_size, -0.5 - rank) for rank in range(count)))

    def scored(self, part: SequenceSlice, drawn: DrawnToken | None) -> Drawn:
        """Return a slice's result (one sequence's part of a step) with the prompt log-probabilities it requests."""
        if not part.scored_ids:
            return drawn
        count = part.params.prompt_logprobs or 0
        positions = enumerate(part.scored_ids, part.start + 1)
        return ScoredSlice(tuple(self.prompt_logprobs(place, token_id, count) for place, token_id in positions), drawn)

    def prompt_logprobs(self, position: int, token_id: int, count: int) -> Logprobs:
        """Return made-up log-probabilities of the prompt token at `position` and `count` others, exact in float32."""
        logprob = -1.0 - (31 * position + token_id) % 97 / 8
        return Logprobs(logprob, tuple(((token_id + 1 + rank) % self.vocab_size, -0.5 - rank) for rank in range(count)))


class StaleKv(Exception):
    """Error: KV that was read differs from what was written for its position: an engine or a transfer is at fault."""


class FakeRunner:
    """ModelRunner of FakeModel. Of the sampling parameters it uses `rules` and those that end an answer; its
    log-probabilities are made up."""

    name = "fake"
    device = "cpu"

    def __init__(self, model: FakeModel | None = None) -> None:
        self.model = model = model or FakeModel()
        self.layout = model.layout
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.eos_token_ids = frozenset({model.eos_token_id})
        row_words = model.kv_head_count * model.head_dim * 4 // _WORD_BYTES
        # [layer_count, K and V, row_words]: the mask of every record.
        count = model.layer_count * 2 * row_words
        masks = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)).reshape(model.layer_count, 2, row_words)
        self._masks: Words = masks
        powers = np.full(model.max_model_len + 1, _MULTIPLIER, np.uint64)
        powers[0] = 1
        self._powers: Words = np.multiply.accumulate(powers)
        powers[1:] = _INVERSE
        self._inverse_powers: Words = np.multiply.accumulate(powers)
        self._cache: Words = np.empty(0, np.uint64)

    def attach(self, pool: KvPool) -> None:
        words = pool.memory.view(np.uint64)
        # [layer_count, block_count, K and V, block_tokens, row_words]
        self._cache = words.reshape(*words.shape[:2], 2, self.layout.block_tokens, -1)

    def completed(self, block_ids: Sequence[int]) -> None:
        """Do nothing: KV is computed in the host pool itself."""

    def landed(self, block_ids: Sequence[int]) -> None:
        """Do nothing: KV is computed in the host pool itself."""

    def run(self, batch: Sequence[SequenceSlice], on_layer: LayerListener | None) -> list[Drawn]:
        """Compute a step. Raises StaleKv if `verify` is on and the KV of earlier positions is not what was written."""
        before = self._chains_before(batch)
        lengths = [len(part.token_ids) for part in batch]
        if max(lengths) == 1:
            # The decode batch, and the reason for numpy here: 32 sequences cost little more than one.
            tokens = np.array([part.token_ids[0] for part in batch], np.uint64)
            positions = np.array([part.start for part in batch], np.int64)
            blocks = self._blocks(batch, positions.tolist())
            chains = lasts = before * np.uint64(_MULTIPLIER) + tokens + np.uint64(1)
        else:
            tokens = np.concatenate([np.asarray(part.token_ids, np.uint64) for part in batch])
            spans = [np.arange(part.start, part.start + length) for part, length in zip(batch, lengths, strict=True)]
            positions = np.concatenate(spans)
            block_tokens = self.layout.block_tokens
            blocks = np.concatenate(
                [np.asarray(part.block_ids)[span // block_tokens] for part, span in zip(batch, spans, strict=True)]
            )
            chains = np.concatenate(
                [self._chains(chain, part.token_ids) for chain, part in zip(before, batch, strict=True)]
            )
            lasts = chains[np.cumsum(lengths) - 1]
        places = positions.astype(np.uint64) << np.uint64(32) | tokens
        prefill_tokens = sum(length for length in lengths if length > 1)
        records = np.stack((chains, places), axis=1)
        self._write(blocks, positions % self.layout.block_tokens, records, prefill_tokens, on_layer)
        token_ids = self._draw(lasts, np.array([part.draw_index for part in batch], np.uint64))
        results: list[Drawn] = []
        for part, token_id, chain in zip(batch, token_ids, lasts, strict=True):
            drawn: DrawnToken | NoToken | None = None
            if part.draw and (part.rules is not None or part.draw_index < part.params.min_tokens):
                drawn = self.model.drawn(part, int(chain))
            elif part.draw:
                drawn = DrawnToken(token_id, self.model.logprobs(token_id, part.params.logprobs))
            results.append(drawn if isinstance(drawn, NoToken) else self.model.scored(part, drawn))
        return results

    def _blocks(self, batch: Sequence[SequenceSlice], positions: Sequence[int]) -> Indices:
        block_tokens = self.layout.block_tokens
        pairs = zip(batch, positions, strict=True)
        return np.array([part.block_ids[position // block_tokens] for part, position in pairs], np.int64)

    def _chains_before(self, batch: Sequence[SequenceSlice]) -> Words:
        if self.model.verify:
            return np.array([self._verified_chain(part) for part in batch], np.uint64)
        lasts = np.array([part.start - 1 for part in batch], np.int64)
        first = lasts < 0
        lasts[first] = 0
        words = self._cache[0, self._blocks(batch, lasts.tolist()), 0, lasts % self.layout.block_tokens, 0]
        return np.where(first, np.uint64(_CHAIN_SEED), words ^ self._masks[0, 0, 0])

    def _verified_chain(self, part: SequenceSlice) -> int:
        if part.start == 0:
            return _CHAIN_SEED
        block_ids = part.block_ids[: self.layout.block_count(part.start)]
        # [layer_count, K and V, start, row_words]
        rows = self._cache[:, block_ids].swapaxes(1, 2).reshape(*self._masks.shape[:2], -1, self._masks.shape[2])
        rows = rows[:, :, : part.start] ^ self._masks[:, :, None]
        record = rows[0, 0, :, :2]
        chains, places = record[:, 0], record[:, 1]
        wrong = (rows.reshape(-1, part.start, rows.shape[-1] // 2, 2) != record[:, None]).any(axis=(0, 2, 3))
        wrong |= places >> np.uint64(32) != np.arange(part.start, dtype=np.uint64)
        before = np.concatenate((np.array([_CHAIN_SEED], np.uint64), chains[:-1]))
        wrong |= chains != before * np.uint64(_MULTIPLIER) + (places & np.uint64(0xFFFF_FFFF)) + np.uint64(1)
        if wrong.any():
            position = int(wrong.argmax())
            raise StaleKv(
                f"position {position} of {part.start} in block {block_ids[position // self.layout.block_tokens]}"
            )
        chain = int(chains[-1])
        # A decode step's own token was drawn after this very chain; consistent KV of another request differs here.
        if len(part.token_ids) == 1 and part.draw_index > 0 and part.draw and part.rules is None:
            barred = barred_token_ids(part.params, self.eos_token_ids, part.draw_index - 1)
            expected = self.model.draw(chain, part.draw_index - 1, barred)
            if part.token_ids[0] != expected:
                raise StaleKv(f"token {part.token_ids[0]} at {part.start} follows KV that leads to token {expected}")
        return chain

    def _chains(self, chain: np.uint64, token_ids: Sequence[int]) -> Words:
        """Return the chain hash after each token: chain * M**(i+1) + sum of (token_j + 1) * M**(i-j), j <= i."""
        count = len(token_ids)
        steps = (np.asarray(token_ids, np.uint64) + np.uint64(1)) * self._inverse_powers[1 : count + 1]
        return (np.cumsum(steps, dtype=np.uint64) + chain) * self._powers[1 : count + 1]

    def _draw(self, chains: Words, draw_indices: Words) -> list[int]:
        """Vectorized FakeModel.draw()."""
        model = self.model
        mixed = chains + (draw_indices + np.uint64(1)) * np.uint64(_GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        mixed ^= mixed >> np.uint64(31)
        token_ids = (mixed & np.uint64(0xFFFF_FFFF)) % np.uint64(model.drawn_size - 1)
        token_ids += token_ids >= np.uint64(model.eos_token_id)
        token_ids[(mixed >> np.uint64(40)) < model.eos_probability * 2**24] = model.eos_token_id
        drawn: list[int] = token_ids.tolist()
        return drawn

    def _write(
        self, blocks: Indices, slots: Indices, records: Words, prefill_tokens: int, on_layer: LayerListener | None
    ) -> None:
        layer_count, _, row_words = self._masks.shape
        layer_s = (self.model.step_s + prefill_tokens * self.model.prefill_token_s) / layer_count
        if on_layer is None and layer_s > 0:
            time.sleep(layer_s * layer_count)
        rows = np.tile(records, (1, row_words // 2)) if self.model.verify else records
        for layer in range(layer_count):
            if on_layer is not None and layer_s > 0:
                time.sleep(layer_s)
            if self.model.verify:
                self._cache[layer, blocks, :, slots] = rows[:, None] ^ self._masks[layer]
            elif layer == 0:
                self._cache[0, blocks, 0, slots, :2] = rows ^ self._masks[0, 0, :2]
            if on_layer is not None:
                on_layer(layer)
