"""KV lines to another instance: records in chunks, and what takes them there."""

from collections.abc import Sequence

import numpy as np

from kaveri.errors import InvalidArgument, KaveriError
from kaveri.kv.chunk_link import CHUNK_BLOCK_BYTES, ChunkReceiver
from kaveri.kv.lines import LineRun, decode_record, encode_header
from kaveri.kv.places import NAME_SEPARATOR, FlushPlace, require_request_name
from kaveri.kv.staging import StagingBuffers
from kaveri.kv.ticket import KvEndpoint, Ticket
from kaveri.kv.token_streamer import LineSink
from kaveri.telemetry.logs import get_logger

_ENDS_MAX = 1024
_ENDS_TIMEOUT_S = 10.0
_NO_LINES = np.empty(0, np.uint8)
"""A record without tokens says that its request has ended."""


class LineSender:
    """A LineSink: puts records together and flushes them to `place`, as a rule a ChunkSender, whose owner closes it.

    stream: the beginning of the chunks' names; different for every sender of one receiver. chunk_bytes: most in one
    chunk, and all the memory it takes; the streamer's staging_bytes and a little for headers. With what it returns from
    write() the other side has landed the lines, and stores them in order.
    """

    def __init__(self, place: FlushPlace, stream: str, chunk_bytes: int = (8 << 20) + CHUNK_BLOCK_BYTES) -> None:
        self._place = place
        self._prefix = require_request_name(stream) + NAME_SEPARATOR
        self._staging = StagingBuffers(chunk_bytes, 1)
        self._sequence = 0
        self._ended: list[str] = []

    def write(self, runs: Sequence[LineRun], timeout_s: float) -> None:
        """See LineSink.write. Raises InvalidArgument for a run that is larger than a chunk."""
        ends = [LineRun(request, range(0), _NO_LINES) for request in self._ended]
        with self._staging.lend(0.0) as buffer:
            filled = 0
            for run in (*ends, *runs):
                header = np.frombuffer(encode_header(run), np.uint8)
                record_bytes = header.nbytes + run.lines.nbytes
                if record_bytes > buffer.nbytes:
                    raise InvalidArgument("chunk_bytes", buffer.nbytes, f"at least the {record_bytes} of a record")
                if filled + record_bytes > buffer.nbytes:
                    self._flush(buffer[:filled], timeout_s)
                    filled = 0
                buffer[filled : filled + header.nbytes] = header
                np.copyto(buffer[filled + header.nbytes : filled + record_bytes], run.lines)
                filled += record_bytes
            if filled:
                self._flush(buffer[:filled], timeout_s)
            self._place.settle(self._prefix, timeout_s)
        del self._ended[: len(ends)]

    def end(self, request: str) -> None:
        """See LineSink.end. Goes with the next lines, with settle(), or with others when there are many."""
        if len(self._ended) >= _ENDS_MAX:
            self.write((), _ENDS_TIMEOUT_S)
        self._ended.append(request)

    def settle(self, timeout_s: float) -> None:
        """See LineSink.settle."""
        if self._ended:
            self.write((), timeout_s)

    def close(self) -> None:
        """See LineSink.close: the place is its owner's."""

    def _flush(self, chunk: np.ndarray[tuple[int], np.dtype[np.uint8]], timeout_s: float) -> None:
        self._place.flush(f"{self._prefix}{self._sequence}", chunk, timeout_s)
        self._sequence += 1


class LineReceiver:
    """Takes LineSenders' chunks and gives their lines to `sink`, on a thread of its own; the sink is closed with it.

    Lines that the sink refuses, or that follow a gap, are logged and lost here: what a request's copy holds is the
    sink's to tell (LinePool.held), and a request that is to be whole is streamed anew from there. A chunk is at most
    chunk_bytes; chunk_count of them may wait. epoch, listen: as of KvReceiver.
    """

    def __init__(
        self,
        sink: LineSink,
        *,
        listen: Sequence[KvEndpoint],
        epoch: int,
        chunk_bytes: int = (8 << 20) + CHUNK_BLOCK_BYTES,
        chunk_count: int = 4,
        write_timeout_s: float = 10.0,
    ) -> None:
        self._sink = sink
        self._write_timeout_s = write_timeout_s
        self._staging = StagingBuffers(chunk_bytes, 1)
        block_count = chunk_count * -(-chunk_bytes // CHUNK_BLOCK_BYTES)
        self._chunks = ChunkReceiver(listen=listen, epoch=epoch, block_count=block_count, on_landed=self._on_landed)

    def grant(self, name: str, byte_count: int, expires_in_s: float) -> Ticket:
        """See ChunkReceiver.grant."""
        if byte_count > self._staging.buffer_bytes:
            raise InvalidArgument("byte_count", byte_count, f"at most {self._staging.buffer_bytes}")
        return self._chunks.grant(name, byte_count, expires_in_s)

    def close(self) -> None:
        """Ends connections and threads, and closes the sink. Idempotent."""
        self._chunks.close()
        self._sink.close()

    def _on_landed(self, name: str, byte_count: int) -> None:
        with self._staging.lend(0.0) as buffer:
            chunk = buffer[:byte_count]
            self._chunks.fetch(name, chunk, 0.0)
            self._chunks.discard(name)
            position = 0
            while position < byte_count:
                # A damaged record ends the chunk, a refused one only itself.
                run, position = decode_record(chunk, position)
                try:
                    if run.tokens:
                        self._sink.write((run,), self._write_timeout_s)
                    else:
                        self._sink.end(run.request)
                except KaveriError as error:
                    get_logger().warning("kv lines refused", request_id=run.request, reason=str(error))
