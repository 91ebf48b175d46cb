"""Wire protocol of the socket transport. Pure: bytes in, values out.

A connection carries one sender's transfers to one receiver, interleaved frame by frame. Integers are little-endian.
Each side begins with a hello. The receiver's carries its epoch and whether it verifies digests; the sender's epoch is
0, and it computes digests only if asked.

    hello    magic "KAVERIKV" (8) | oldest version (2) | with digests (1) | newest version (1) | reserved (4)
             | epoch (8)

    header   kind (1) | reserved (1) | layer count (2) | layer (4) | transfer id (16) | first index (4)
             | block count (4) | payload bytes (8) | digest (8)                                            48 bytes

A side speaks all versions from its oldest to its newest; a connection uses the newest that both speak. Version 4 says 0
for its newest. Version 5 added open transfers (MARK, MARKED, EXTENDED); with version 4 both sides refuse only these.

    sender -> receiver                                        receiver -> sender
    OPEN       payload: secret (16) | epoch (8)               ACCEPTED   verified, all of it
    DATA       payload: `block count` blocks from             REJECTED   payload: the reason, UTF-8
               `first index`, of each of `layer count`
               layers from `layer`
    END        payload: the note; `digest` of all payload
               of the transfer's DATA
    ABORT      the transfer is cancelled; `first index` 1:   CREDIT     payload: bytes (8) that may be sent beyond
               marked blocks are still of use                           those before, of whatever transfer, and
                                                                        how many may be under way now (8)

    in open transfers
    MARK       blocks [0, `block count`) of each layer       MARKED     blocks [0, `block count`) are verified and kept
               are sent; payload: the note; `digest` of      EXTENDED   `block count` more destination blocks, from
               all payload of the transfer's DATA so far                `first index` on; payload: their ids (4 each)

    where the sender writes one-sided (shared memory, NIXL); GRANTED as credit, too (gloo)
    FENCED     nothing is written into the rejected         GRANTED    the opened transfer's blocks may be
               transfer any more                                       written until its end

A transfer is OPEN, DATA and MARK in any order, then END or ABORT. Each OPEN and END is answered eventually, by one
ACCEPTED or by one or more REJECTED; each MARK, in order, by a MARKED or by the transfer's REJECTED. Later frames of a
rejected transfer are discarded, so frames in flight never disturb the connection's other transfers.

Each DATA costs credit for its blocks' bytes; the first CREDIT follows the receiver's hello. Where the sender writes
one-sided, DATA has no payload and reports written blocks; shm.py, nixl.py and collective.py say what follows the hello.
"""

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kaveri.kv.transfer.transport import LinkLost

OLDEST_VERSION = 4
VERSION = 5
"""Newest version supported here."""
MARKS_VERSION = 5
"""First version with open transfers."""
_MAGIC = b"KAVERIKV"
_HELLO = struct.Struct("<8sHBB4xQ")
_HEADER = struct.Struct("<BxHI16sIIQQ")
OPENING = struct.Struct("<16sQ")
"""Payload of OPEN: secret and epoch."""
CREDIT = struct.Struct("<QQ")
"""Payload of CREDIT: bytes that may be sent beyond those before, and the window."""
_BLOCK_ID = struct.Struct("<I")

HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size
SMALL_PAYLOAD_BYTES = 4096
"""Max payload of any frame but DATA."""
_EXTENDED_BLOCKS = SMALL_PAYLOAD_BYTES // _BLOCK_ID.size
DATA_PAYLOAD_BYTES = 1 << 30
"""Max payload of a DATA frame; a larger claim is a protocol error."""


class Kind(enum.IntEnum):
    """Kind of a frame of the wire protocol."""

    OPEN = 1
    DATA = 2
    END = 3
    ABORT = 4
    ACCEPTED = 5
    REJECTED = 6
    FENCED = 7
    GRANTED = 8
    CREDIT = 9
    MARK = 10
    MARKED = 11
    EXTENDED = 12


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """Header of a frame: its kind, the transfer and blocks that it is about, and its payload's size."""

    kind: Kind
    transfer_id: bytes
    payload_bytes: int = 0
    layers: range = range(1)
    first_index: int = 0
    block_count: int = 0
    digest: int = 0


def pack_frame(header: Header, payload: bytes = b"") -> bytes:
    """Encode a frame, or its header alone if the payload is sent separately."""
    kind, transfer_id, payload_bytes, layers, first_index, block_count, digest = header
    place = (len(layers), layers.start, transfer_id, first_index, block_count)
    return _HEADER.pack(kind, *place, payload_bytes, digest) + payload


def unpack_header(data: bytes | bytearray) -> Header:
    """Decode a frame's header. Raises LinkLost if it is invalid: the start of the next frame is then unknown."""
    number, layer_count, layer, transfer_id, first_index, block_count, payload_bytes, digest = _HEADER.unpack(data)
    kind = _KINDS.get(number)
    if kind is None:
        raise LinkLost(f"protocol error: frame of unknown kind {number}")
    limit = DATA_PAYLOAD_BYTES if kind == Kind.DATA else SMALL_PAYLOAD_BYTES
    if payload_bytes > limit:
        raise LinkLost(f"protocol error: {kind.name} of {payload_bytes} bytes")
    layers = range(layer, layer + layer_count)
    return Header(kind, transfer_id, payload_bytes, layers, first_index, block_count, digest)


def unpack_payload(header: Header, form: struct.Struct, data: bytes | bytearray) -> tuple[Any, ...]:
    """Decode a frame's payload of the fixed size and format `form`. Raises LinkLost for another size."""
    if len(data) != form.size:
        raise LinkLost(f"protocol error: {header.kind.name} of {len(data)} bytes")
    return form.unpack(data)


class Hello(NamedTuple):
    """First message from the other side of a connection. Of a sender's, only the version matters."""

    epoch: int
    with_digests: bool
    version: int
    """The newest that both sides speak."""


def pack_hello(epoch: int = 0, with_digests: bool = False, version: int = VERSION) -> bytes:
    """Encode the first message of a connection. epoch, with_digests: the receiver's. version: newest of this side."""
    return _HELLO.pack(_MAGIC, OLDEST_VERSION, with_digests, version, epoch)


def unpack_hello(data: bytes | bytearray) -> Hello:
    """Decode the peer's first message. Raises LinkLost unless it speaks a supported version of this protocol."""
    magic, oldest, with_digests, newest, epoch = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise LinkLost("the peer does not speak Kaveri's KV protocol")
    version = min(VERSION, max(oldest, newest))
    if not max(oldest, OLDEST_VERSION) <= version:
        spoken = f"this side {OLDEST_VERSION} to {VERSION}"
        raise LinkLost(f"the peer speaks versions {oldest} to {max(oldest, newest)} of the KV protocol, {spoken}")
    return Hello(epoch, bool(with_digests), version)


def pack_extensions(transfer_id: bytes, first_index: int, block_ids: Sequence[int]) -> Iterator[bytes]:
    """Encode EXTENDED frames, which grant more blocks: block_ids[i] is the transfer's block first_index + i."""
    for start in range(0, len(block_ids), _EXTENDED_BLOCKS):
        ids = block_ids[start : start + _EXTENDED_BLOCKS]
        payload = struct.pack(f"<{len(ids)}I", *ids)
        header = Header(Kind.EXTENDED, transfer_id, len(payload), first_index=first_index + start, block_count=len(ids))
        yield pack_frame(header, payload)


def unpack_extension(header: Header, data: bytes | bytearray) -> tuple[int, ...]:
    """Decode the block ids of an EXTENDED frame, which grants more destination blocks. Raises LinkLost."""
    if not data or len(data) != _BLOCK_ID.size * header.block_count:
        raise LinkLost(f"protocol error: EXTENDED of {len(data)} bytes for {header.block_count} blocks")
    return tuple(block_id for (block_id,) in _BLOCK_ID.iter_unpack(data))
