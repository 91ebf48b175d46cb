"""Reference for tests of layout mapping: the KV of the whole model in one array, without strides."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kaveri.kv.layout.layout import ELEMENT_BYTES, ORDERS, KvLayout
from kaveri.kv.tiers.pool import KvPool

MARK = 0xEE
"""Byte value wherever nothing was written."""

Reference = npt.NDArray[np.uint8]
"""[layer, token, K or V, head, byte of the head], uint8."""


@dataclass(frozen=True)
class KvPartition:
    """A model split over an instance's ranks: layers over pipeline stages, KV heads over tensor ranks (numbered stage
    by stage). With more tensor ranks than KV heads, each head is on several ranks."""

    layout: KvLayout
    """Layout of the whole model."""
    stage_layers: tuple[int, ...]
    """Layers of each pipeline stage, first stage first; together the layout's layer_count."""
    tensor_ranks: int = 1
    """Divides the layout's kv_head_count or is a multiple of it."""

    @classmethod
    def even(cls, layout: KvLayout, pipeline_stages: int = 1, tensor_ranks: int = 1) -> "KvPartition":
        least, more = divmod(layout.layer_count, pipeline_stages)
        return cls(layout, tuple(least + (stage < more) for stage in range(pipeline_stages)), tensor_ranks)

    @property
    def rank_count(self) -> int:
        return len(self.stage_layers) * self.tensor_ranks

    def layers(self, rank: int) -> range:
        stage = rank // self.tensor_ranks
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])

    def heads(self, rank: int) -> range:
        return self.rank_layout(rank).kv_heads

    def rank_layout(self, rank: int) -> KvLayout:
        split = replace(self.layout, tensor_ranks=self.tensor_ranks).rank(rank % self.tensor_ranks)
        layers = self.layers(rank)
        return replace(split, layer_count=len(layers), first_layer=layers.start)


@dataclass(frozen=True)
class RankPools:
    """KV pools of all ranks of an instance, with one request in each."""

    partition: KvPartition
    pools: tuple[KvPool, ...]
    block_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, partition: KvPartition, token_count: int, chance: np.random.Generator, spare: int = 3) -> "RankPools":
        """Create pools filled with MARK bytes, and allocate the request's blocks in random order, some of them
        adjacent."""
        count = partition.layout.block_count(token_count)
        pools, ids = [], []
        for rank in range(partition.rank_count):
            pool = KvPool(partition.rank_layout(rank), count + spare)
            pool.memory.fill(MARK)
            order = np.arange(count + spare)
            if chance.random() < 0.7:
                cut = chance.integers(0, count + spare)
                order = np.concatenate((chance.permutation(order[:cut]), order[cut:]))
            pools.append(pool)
            ids.append(tuple(order[:count].tolist()))
        return cls(partition, tuple(pools), tuple(ids))

    def write(self, reference: Reference) -> None:
        for rank in range(self.partition.rank_count):
            for token in range(reference.shape[1]):
                self.rows(rank, token)[:] = reference[:, token][self._part(rank)]

    def read(self, rank: int, token_count: int) -> Reference:
        return np.stack([self.rows(rank, token) for token in range(token_count)], axis=1)

    def rows(self, rank: int, token: int) -> Reference:
        layout = self.pools[rank].layout
        block = self.pools[rank].memory[:, self.block_ids[rank][token // layout.block_tokens]]
        within = token % layout.block_tokens
        row_bytes = layout.head_dim * ELEMENT_BYTES[layout.dtype]
        if layout.order == "2NHD":
            return block.reshape(-1, 2, layout.block_tokens, layout.kv_head_count, row_bytes)[:, :, within]
        return block.reshape(-1, 2, layout.kv_head_count, layout.block_tokens, row_bytes)[:, :, :, within]

    def expected(self, rank: int, reference: Reference) -> Reference:
        layers, heads = self.partition.layers(rank), self.partition.heads(rank)
        return reference[layers.start : layers.stop, :, :, heads.start : heads.stop]

    def assert_holds(self, reference: Reference, tokens: range) -> None:
        """Assert that the pools hold these tokens of the reference, and MARK in every other byte."""
        for rank, pool in enumerate(self.pools):
            expected = self.expected(rank, reference)
            for token in tokens:
                assert np.array_equal(self.rows(rank, token), expected[:, token]), f"rank {rank}, token {token}"
            kept = pool.memory.copy()
            for token in tokens:
                self.rows(rank, token)[:] = MARK
            assert (pool.memory == MARK).all(), f"rank {rank}: something was written beside the tokens"
            pool.memory[:] = kept

    def _part(self, rank: int) -> tuple[slice, slice, slice]:
        layers, heads = self.partition.layers(rank), self.partition.heads(rank)
        return slice(layers.start, layers.stop), slice(None), slice(heads.start, heads.stop)


def make_reference(layout: KvLayout, token_count: int, chance: np.random.Generator) -> Reference:
    row_bytes = layout.head_dim * ELEMENT_BYTES[layout.dtype]
    shape = (layout.layer_count, token_count, 2, layout.kv_head_count, row_bytes)
    return chance.integers(0, MARK, shape, dtype=np.uint8)


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """Hypothesis strategy: layouts of small whole models."""
    return KvLayout(
        "model",
        layer_count=draw(st.integers(1, 7)),
        block_tokens=draw(st.sampled_from((16, 32, 48, 64, 128))),
        kv_head_count=draw(st.sampled_from((1, 2, 4, 8))),
        head_dim=draw(st.sampled_from((1, 3, 4, 8))),
        dtype=draw(st.sampled_from(sorted(ELEMENT_BYTES))),
        order=draw(st.sampled_from(ORDERS)),
    )


@st.composite
def partitions(draw: st.DrawFn, layout: KvLayout) -> KvPartition:
    layout = replace(
        layout, block_tokens=draw(st.sampled_from((16, 32, 48, 64, 128))), order=draw(st.sampled_from(ORDERS))
    )
    stages = draw(st.integers(1, min(4, layout.layer_count)))
    ends = (
        draw(st.lists(st.integers(1, layout.layer_count - 1), min_size=stages - 1, max_size=stages - 1, unique=True))
        if (stages > 1)
        else []
    )
    edges = [0, *sorted(ends), layout.layer_count]
    sizes = tuple(end - begin for begin, end in itertools.pairwise(edges))
    return KvPartition(layout, sizes, draw(st.sampled_from((1, 2, 4))))


@st.composite
def whole_and_split(draw: st.DrawFn) -> tuple[KvPartition, KvPartition]:
    layout = draw(layouts())
    source = KvPartition(draw(partitions(layout)).layout, (layout.layer_count,))
    return source, draw(partitions(layout))


@st.composite
def token_ranges(draw: st.DrawFn, most: int = 300) -> range:
    stop = draw(st.integers(1, most))
    return range(draw(st.sampled_from((0, 0, draw(st.integers(0, stop - 1))))), stop)
