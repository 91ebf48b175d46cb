"""KV lines: the K and V of single tokens, apart from the blocks in which they stand, and their form as records.

A record is what goes to disk or to another instance: a header with the request, its tokens and a digest of either part,
then the lines. Whatever was cut off or damaged on the way is found.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kaveri.errors import InvalidArgument, LayoutMismatch, TransferFailed
from kaveri.kv.layout import ELEMENT_BYTES, ORDERS
from kaveri.kv.pool import KvPool

REQUEST_BYTES_MAX = 120
_MAGIC = b"KVLN"
_HEADER = struct.Struct("<4sI2I2Q")  # magic, request bytes, first token, tokens, line bytes, xxh3_64 of the lines
_DIGEST = struct.Struct("<Q")  # xxh3_64 of the header and the request, which stand before it
_ALIGNMENT = 8
"""Requests are filled up with zeros, so that lines can be copied in words."""


@dataclass(frozen=True, slots=True)
class LineRun:
    """The KV of consecutive tokens of one request."""

    request: str
    tokens: range
    lines: npt.NDArray[np.uint8]
    """[layer_count, 2, tokens, kv_heads, head_dim] in bytes, flat, C-contiguous: the same for every order of blocks."""


class TornRecord(TransferFailed):
    """The bytes end within a record: what a writer leaves that died while it wrote."""


class PoolLines:
    """A pool, seen as tokens. Reads and writes lines; owns nothing. Raises LayoutMismatch for an opaque layout."""

    def __init__(self, pool: KvPool) -> None:
        layout = pool.layout
        if layout.order not in ORDERS:
            raise LayoutMismatch("order", layout.order, ORDERS)
        self.pool = pool
        self.line_bytes = layout.token_bytes
        head_bytes = layout.head_dim * ELEMENT_BYTES[layout.dtype]
        # Words as wide as a head allows: numpy copies int64 several times faster than bytes.
        self._word = np.dtype(f"u{next(size for size in (8, 4, 2, 1) if head_bytes % size == 0)}")
        within = (layout.block_tokens, layout.kv_head_count)
        words = pool.memory.view(self._word)
        if layout.order == "2NHD":
            self._tokens = words.reshape(layout.layer_count, pool.block_count, 2, *within, -1)
        else:
            heads_first = words.reshape(layout.layer_count, pool.block_count, 2, *within[::-1], -1)
            self._tokens = heads_first.swapaxes(3, 4)

    def gather(self, block_ids: Sequence[int], tokens: range, into: npt.NDArray[np.uint8]) -> None:
        """Copies lines out of the pool. into: uint8, len(tokens) * line_bytes, in the form of LineRun.lines."""
        lines = self._as_lines(into, len(tokens))
        for block, within, run in self._runs(block_ids, tokens):
            np.copyto(lines[:, :, run], self._tokens[:, block, :, within])

    def store(self, block_ids: Sequence[int], run: LineRun) -> None:
        """Copies lines into the pool."""
        lines = self._as_lines(run.lines, len(run.tokens))
        for block, within, piece in self._runs(block_ids, run.tokens):
            np.copyto(self._tokens[:, block, :, within], lines[:, :, piece])

    def require_room(self, block_ids: Sequence[int], token_count: int) -> None:
        """Raises InvalidArgument unless so many blocks are enough for the tokens."""
        needed = self.pool.layout.block_count(token_count)
        if len(block_ids) < needed:
            raise InvalidArgument("block_ids", len(block_ids), f"at least {needed} blocks for {token_count} tokens")

    def _as_lines(self, flat: npt.NDArray[np.uint8], token_count: int) -> npt.NDArray[np.uint64]:
        layers, _, _, _, heads, words = self._tokens.shape
        return flat.view(self._word).reshape(layers, 2, token_count, heads, words)

    def _runs(self, block_ids: Sequence[int], tokens: range) -> Iterator[tuple[int, slice, slice]]:
        """Per block: its id, the tokens within it, and the same tokens counted from tokens.start."""
        block_tokens = self.pool.layout.block_tokens
        start = tokens.start
        while start < tokens.stop:
            index, first = divmod(start, block_tokens)
            stop = min(tokens.stop, (index + 1) * block_tokens)
            yield (
                block_ids[index],
                slice(first, first + stop - start),
                slice(start - tokens.start, stop - tokens.start),
            )
            start = stop


def encode_header(run: LineRun) -> bytes:
    """What stands before the lines in a record. Raises InvalidArgument for a name that is too long."""
    request = run.request.encode()
    if not 1 <= len(request) <= REQUEST_BYTES_MAX:
        raise InvalidArgument("request", run.request, f"1 to {REQUEST_BYTES_MAX} bytes")
    digest = xxhash.xxh3_64_intdigest(run.lines.data)
    header = _HEADER.pack(_MAGIC, len(request), run.tokens.start, len(run.tokens), run.lines.nbytes, digest)
    header += request.ljust(_padded(len(request)), b"\0")
    return header + _DIGEST.pack(xxhash.xxh3_64_intdigest(header))


def decode_record(data: npt.NDArray[np.uint8], start: int) -> tuple[LineRun, int]:
    """The record that begins at `start`, as a view of `data`, and where it ends.

    Raises TornRecord when the data ends before the record does, or only zeros follow (a file that grew and was never
    filled); TransferFailed when the record is damaged.
    """
    rest = data[start:]
    if rest.nbytes < _HEADER.size:
        raise TornRecord(f"{rest.nbytes} bytes at {start} are no whole record")
    magic, request_bytes, first_token, token_count, line_bytes, digest = _HEADER.unpack_from(rest.data)
    if magic == bytes(len(_MAGIC)) and not rest.any():
        raise TornRecord(f"nothing was written at {start} and behind")
    if magic != _MAGIC or not 1 <= request_bytes <= REQUEST_BYTES_MAX:
        raise TransferFailed(f"no KV lines at byte {start}")
    header_bytes = _HEADER.size + _padded(request_bytes)
    if rest.nbytes < header_bytes + _DIGEST.size:
        raise TornRecord(f"the header at {start} is cut off")
    if xxhash.xxh3_64_intdigest(rest[:header_bytes].data) != _DIGEST.unpack_from(rest.data, header_bytes)[0]:
        raise TransferFailed(f"the header at byte {start} is damaged")
    begin = header_bytes + _DIGEST.size
    if rest.nbytes < begin + line_bytes:
        raise TornRecord(f"the lines at {start} are cut off")
    lines = rest[begin : begin + line_bytes]
    if xxhash.xxh3_64_intdigest(lines.data) != digest:
        # Of the last record nobody can tell a tear, whose missing pages read as zeros, from damage.
        last = rest.nbytes == begin + line_bytes
        raise (TornRecord if last else TransferFailed)(f"the lines at byte {start} are damaged")
    request = rest[_HEADER.size : _HEADER.size + request_bytes].tobytes().decode()
    return LineRun(request, range(first_token, first_token + token_count), lines), start + begin + line_bytes


def _padded(byte_count: int) -> int:
    return -(-byte_count // _ALIGNMENT) * _ALIGNMENT
