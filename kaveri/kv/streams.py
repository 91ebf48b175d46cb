"""DéjàVuLib's upper primitives (DéjàVu, table 1): stream_out and stream_in over scatter and gather.

    stream_out, stream_in   who gets which part of a request's KV, by the plan between two partitions
    scatter, gather         regions of the cache that are not contiguous, to and from contiguous chunks
    flush, fetch            one chunk, to and from a place: kaveri.kv.places

Prompts stream layer by layer and chunk by chunk (optimisation 2) by one call for each: `layers` and `tokens` say which.
The receiving side makes the same calls, or waits with them for what it wants to use first.

Two prefill ranks, which split the heads, hand a request to a decode instance with other blocks and one rank:

>>> from dataclasses import replace
>>> from kaveri.kv.layout import KvLayout
>>> from kaveri.kv.partition import KvPartition
>>> from kaveri.kv.places import HostMemory
>>> from kaveri.kv.plan import make_plan
>>> from kaveri.kv.pool import KvPool
>>> model = KvLayout("model", layer_count=2, block_tokens=16, kv_head_count=2, head_dim=4, dtype="float16")
>>> prefill = KvPartition.even(model, tensor_ranks=2)
>>> decode = KvPartition.even(replace(model, block_tokens=32, order="2HND"))
>>> plan, place, staging = make_plan(prefill, decode), HostMemory(4096, 8), StagingBuffers(4096)
>>> for rank in range(2):
...     pool = KvPool(prefill.rank_layout(rank), block_count=4)
...     pool.memory.fill(rank + 1)
...     cache = RequestCache("request-1", pool, rank, block_ids=(3, 1, 2))
...     stream_out(plan, cache, {0: place}, staging, tokens=range(40), timeout_s=1.0)
1280
1280
>>> pool = KvPool(decode.rank_layout(0), block_count=4)
>>> cache = RequestCache("request-1", pool, 0, block_ids=(0, 2))
>>> stream_in(plan, cache, {0: place, 1: place}, staging, tokens=range(40), timeout_s=1.0)
2560
>>> pool.memory[0, 0].reshape(2, 2, 32, 8)[0, :, 0, 0]  # K of token 0: head 0 from rank 0, head 1 from rank 1
array([1, 2], dtype=uint8)
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from kaveri.errors import InvalidArgument
from kaveri.kv.partition import KvPartition
from kaveri.kv.places import NAME_SEPARATOR, FetchPlace, FlushPlace, require_request_name
from kaveri.kv.plan import Chunk, KvPlan, Share
from kaveri.kv.pool import KvPool
from kaveri.kv.regions import copy_regions
from kaveri.kv.staging import StagingBuffers

PlaceT = TypeVar("PlaceT")


@dataclass(frozen=True, slots=True)
class RequestCache:
    """Where one rank keeps one request's KV."""

    request: str
    """Names the request's chunks in every place; see places.require_request_name."""
    pool: KvPool
    rank: int
    block_ids: tuple[int, ...]
    """Block i keeps tokens [i * block_tokens, (i + 1) * block_tokens)."""


def stream_out(
    plan: KvPlan,
    cache: RequestCache,
    places: Mapping[int, FlushPlace],
    staging: StagingBuffers,
    *,
    tokens: range,
    layers: range | None = None,
    timeout_s: float,
    settle: bool = True,
) -> int:
    """Gives a source rank's part of a request to all destination ranks that need some of it. Returns the bytes.

    places: of each destination rank. layers: of the model, None for all; those that the rank does not hold are not its
    affair. The blocks are not read any more on return. With `settle` every destination can fetch all of it then;
    without, for the layers but the last of a prompt, the caller settles the places for chunk_prefix() at the end.

    Raises LayoutMismatch when the pool is not the plan's, InvalidArgument, NoCapacity, TransferFailed or
    DeadlineExceeded; some chunks may have gone out then.
    """
    deadline_s = time.monotonic() + timeout_s
    _require_fit(plan.source, cache)
    streamed_bytes = 0
    shares = plan.shares_from(cache.rank)
    for share in shares:
        place = _place_of(places, share.destination_rank)
        streamed_bytes += scatter(plan, share, cache, place, staging, tokens, layers, deadline_s - time.monotonic())
    if settle:
        for share in shares:
            places[share.destination_rank].settle(chunk_prefix(cache.request), deadline_s - time.monotonic())
    return streamed_bytes


def stream_in(
    plan: KvPlan,
    cache: RequestCache,
    places: Mapping[int, FetchPlace],
    staging: StagingBuffers,
    *,
    tokens: range,
    layers: range | None = None,
    timeout_s: float,
    keep: bool = False,
) -> int:
    """Takes a destination rank's part of a request from all source ranks that have some of it. Returns the bytes.

    places: of each source rank. tokens, layers, and the staging's buffer_bytes are those of stream_out. keep: chunks
    stay where they are, else each is discarded once it is merged.

    Raises as stream_out does; some blocks may have been written then.
    """
    deadline_s = time.monotonic() + timeout_s
    _require_fit(plan.destination, cache)
    streamed_bytes = 0
    for share in plan.shares_to(cache.rank):
        place = _place_of(places, share.source_rank)
        left_s = deadline_s - time.monotonic()
        streamed_bytes += gather(plan, share, cache, place, staging, tokens, layers, left_s, keep=keep)
    return streamed_bytes


def chunk_prefix(request: str) -> str:
    """How the names of all chunks of a request begin, and of no other's."""
    return request + NAME_SEPARATOR


def scatter(
    plan: KvPlan,
    share: Share,
    cache: RequestCache,
    place: FlushPlace,
    staging: StagingBuffers,
    tokens: range,
    layers: range | None,
    timeout_s: float,
) -> int:
    """Copies a share's regions together and flushes them, a staging buffer at a time. Returns the bytes."""
    deadline_s = time.monotonic() + timeout_s
    flushed_bytes = 0
    for chunk in plan.chunks(share, _layers(plan, layers), tokens, staging.buffer_bytes):
        copies = plan.packing(share, chunk.tokens, cache.block_ids)
        held = plan.source_layers(share, chunk.layers)
        with staging.lend(deadline_s - time.monotonic()) as buffer:
            piece = buffer[: chunk.byte_count]
            blocks = cache.pool.memory[held].reshape(len(chunk.layers), -1)
            copy_regions(copies, blocks, piece.reshape(len(chunk.layers), -1))
            place.flush(_name(cache, share, chunk), piece, deadline_s - time.monotonic())
        flushed_bytes += chunk.byte_count
    return flushed_bytes


def gather(
    plan: KvPlan,
    share: Share,
    cache: RequestCache,
    place: FetchPlace,
    staging: StagingBuffers,
    tokens: range,
    layers: range | None,
    timeout_s: float,
    *,
    keep: bool = False,
) -> int:
    """Fetches a share, a staging buffer at a time, and copies it to where it belongs. Returns the bytes."""
    deadline_s = time.monotonic() + timeout_s
    fetched_bytes = 0
    for chunk in plan.chunks(share, _layers(plan, layers), tokens, staging.buffer_bytes):
        copies = plan.unpacking(share, chunk.tokens, cache.block_ids)
        held = plan.destination_layers(share, chunk.layers)
        name = _name(cache, share, chunk)
        with staging.lend(deadline_s - time.monotonic()) as buffer:
            piece = buffer[: chunk.byte_count]
            place.fetch(name, piece, deadline_s - time.monotonic())
            blocks = cache.pool.memory[held].reshape(len(chunk.layers), -1)
            copy_regions(copies, piece.reshape(len(chunk.layers), -1), blocks)
        if not keep:
            place.discard(name)
        fetched_bytes += chunk.byte_count
    return fetched_bytes


def _require_fit(partition: KvPartition, cache: RequestCache) -> None:
    cache.pool.layout.require_same(partition.rank_layout(cache.rank))
    # The copies see a layer as one piece of memory: a block outside the pool would be one of the next layer.
    if cache.block_ids and not 0 <= min(cache.block_ids) <= max(cache.block_ids) < cache.pool.block_count:
        raise InvalidArgument("block_ids", cache.block_ids, f"in [0, {cache.pool.block_count})")
    require_request_name(cache.request)


def _layers(plan: KvPlan, layers: range | None) -> range:
    return range(plan.source.layout.layer_count) if layers is None else layers


def _place_of(places: Mapping[int, PlaceT], rank: int) -> PlaceT:
    if rank not in places:
        raise InvalidArgument("places", sorted(places), f"a place for rank {rank}, which has a share")
    return places[rank]


def _name(cache: RequestCache, share: Share, chunk: Chunk) -> str:
    return (
        f"{chunk_prefix(cache.request)}r{share.source_rank}-{share.destination_rank}"
        f".l{chunk.layers.start}-{chunk.layers.stop}.t{chunk.tokens.start}-{chunk.tokens.stop}"
    )
