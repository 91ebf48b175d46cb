"""The NIXL transport, "nixl": one-sided writes from pool to pool through UCX, over whatever link UCX finds.

The protocol is that of one_sided.py, over a TCP connection. After its hello the receiver sends its pool's location and
NIXL's metadata. A write is one NIXL transfer of block numbers in prepared descriptor lists, progressed by the thread
that waits for it: a progress thread would poll without a pause. DATA without blocks announces a write, so that the
receiver progresses its side only while needed; DATA with blocks reports them as written.

A cancelled write may still land: UCX's queued data does so when the receiver next progresses its side. So each
connection has its own agent on both sides, and the sender completes each write before FENCED. If one does not complete
in time, the sender destroys its agent and ends the connection, and the receiver destroys its own before it releases
blocks. That revokes the permission: queues, sockets and memory registration.

Tested: DRAM to DRAM on one host, by UCX's own choice (copies between processes) and over TCP. Not tested, for lack of
hardware: RDMA. GPU memory is not supported: pools are host memory.
"""

import contextlib
import functools
import importlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kaveri.errors import ConfigError
from kaveri.extras import install_command
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digest
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transfer.transport import Landing, LinkListener, LinkLost
from kaveri.kv.transports.frames import Header, Kind
from kaveri.kv.transports.one_sided import OneSidedLink, OneSidedReceivingConnection
from kaveri.kv.transports.socket import SocketTransport
from kaveri.kv.transports.stream import ByteStream, never

_OFFER = struct.Struct("<QQI")
"""Address of the receiver's pool, bytes of a layer of it, and the size of NIXL's own metadata, which follows."""
_OFFER_BYTES_MAX = 1 << 20

_LET_GO_WITHIN_S = 0.5
"""Max time for an unwanted write to complete before the connection is ended."""
_PAUSE_S = 1e-4
"""Poll interval for pending writes. Without it a receiver takes the sender's processor where they share few, and gains
nothing: arriving data waits in the kernel's buffers and UCX's."""
_LONG_PAUSE_S = 1e-3
"""Poll interval after _PATIENCE_S: the other side is stopped, or the network is."""
_PATIENCE_S = 0.5


class NixlTransport(SocketTransport):
    """Transport by one-sided writes with NIXL. Addresses are TCP. A listener registers its pool for each connection.

    Raises ConfigError when NIXL is not installed.
    """

    connect_timeout_s = 5.0
    progress_timeout_s = 10.0
    """Also limits one write; NIXL does not report its progress."""
    connection_limit = 64

    def __init__(self, *, advertise_host: str | None = None) -> None:
        _import_nixl()
        _start_ucx()
        super().__init__("tcp", advertise_host=advertise_host)
        self.name = self.label = "nixl"
        self.connection_type = NixlReceivingConnection
        # Each write costs a round trip between two polling processes.
        self.capabilities = replace(self.capabilities, can_revoke=False, is_byte_stream=False, write_bytes=16 << 20)

    def _link(self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint) -> "NixlLink":
        address, layer_bytes, metadata_bytes = _OFFER.unpack(stream.receive_bytes(_OFFER.size))
        if metadata_bytes > _OFFER_BYTES_MAX:
            raise LinkLost(f"protocol error: an offer of {metadata_bytes} bytes")
        block_count = layer_bytes // pool.layout.block_bytes
        agent = _SendingAgent(pool, address, block_count, bytes(stream.receive_bytes(metadata_bytes)))
        try:
            return NixlLink(stream, pool, listener, endpoint, agent)
        except BaseException:
            agent.close()
            raise


class NixlLink(OneSidedLink):
    """A sender's NIXL connection; implements transport.Link. Its agent is used by the writing thread."""

    def __init__(
        self, stream: ByteStream, pool: KvPool, listener: LinkListener, endpoint: KvEndpoint, agent: "_SendingAgent"
    ) -> None:
        self._agent = agent
        super().__init__(stream, pool, listener, endpoint, agent.target_block_count)

    def close(self) -> None:
        self._is_broken = True
        self._agent.close()
        super().close()

    def _put(
        self,
        ticket: Ticket,
        layers: range,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        digest: Digest | None,
        is_stopped: Callable[[], bool],
    ) -> bool:
        self._send(Header(Kind.DATA, ticket.transfer_id, 0, layers[:1]))
        with self._permission(ticket, is_stopped) as is_permitted:
            if not is_permitted:
                return False
            try:
                self._agent.post(layers, source_blocks, target_blocks)
                if digest is not None:
                    # Both only read the source.
                    for layer in layers:
                        for region in self._pool.regions(layer, source_blocks):
                            digest.update(region)
                self._wait(is_stopped)
            except LinkLost:
                # Before the connection ends, whose end promises that nothing more is written.
                self._agent.close()
                raise
        return True

    def _wait(self, is_stopped: Callable[[], bool]) -> None:
        give_up_at_s = time.monotonic() + self._stream.progress_timeout_s
        for now_s in _polls():
            if self._agent.is_written():
                return
            if self._is_broken:
                raise LinkLost("the connection was closed")
            if is_stopped():
                give_up_at_s = min(give_up_at_s, now_s + _LET_GO_WITHIN_S)
                is_stopped = never
            if now_s > give_up_at_s:
                raise LinkLost("a write did not complete in time")


class NixlReceivingConnection(OneSidedReceivingConnection):
    """Receiving side of one sender's NIXL connection. Its thread alone uses its agent."""

    _agent: "_Agent | None" = None
    # The transfer that the sender is writing to.
    _written_into: bytes | None = None

    def _greet(self, hello: bytes) -> None:
        self._agent = _Agent(self._pool)
        metadata = self._agent.metadata()
        offer = _OFFER.pack(self._pool.memory.ctypes.data, self._pool.memory[0].nbytes, len(metadata))
        self._stream.send([hello + offer + metadata])

    def _take_frame(self) -> None:
        super()._take_frame()
        assert self._agent is not None
        if self._written_into is not None:
            for _ in _polls():
                if self._stream.is_readable():
                    return
                self._agent.progress()

    def _take_blocks(self, header: Header, landing: Landing | None) -> None:
        if header.block_count:
            self._written_into = None
            super()._take_blocks(header, landing)
        else:
            self._stream.discard(header.payload_bytes)
            self._written_into = header.transfer_id

    def _finish(self, header: Header, landing: Landing | None) -> None:
        self._written_into = None
        super()._finish(header, landing)

    def _let_go(self, transfer_id: bytes, *, keep_marked: bool = False) -> Landing | None:
        if transfer_id == self._written_into:
            self._written_into = None
        return super()._let_go(transfer_id, keep_marked=keep_marked)

    def _shut(self) -> None:
        # Ends pending data in the sender's queues and sockets. Its process's own writes end with the wait for it.
        if self._agent is not None:
            self._agent.close()


class _Agent:
    """NIXL agent with one registered pool. Used and closed by one thread."""

    def __init__(self, pool: KvPool) -> None:
        self._agent: Any = _ask("starting", _new_agent)
        region = (pool.memory.ctypes.data, pool.memory.nbytes, 0, "")
        self._memory: Any = _ask("registering the pool", self._agent.register_memory, [region], "DRAM")

    def metadata(self) -> bytes:
        """Return the metadata with which another agent can write into the pool."""
        return bytes(_ask("describing the pool", self._agent.get_agent_metadata))

    def progress(self) -> None:
        """Process pending events of remote agents' writes."""
        _ask("receiving", self._agent.get_new_notifs)

    def close(self) -> None:
        """Destroy the agent: it reads, writes and receives nothing afterwards. Idempotent."""
        agent, self._agent = self._agent, None
        memory, self._memory = self._memory, None
        if agent is not None:
            with contextlib.suppress(Exception):
                agent.deregister_memory(memory)


class _SendingAgent(_Agent):
    """NIXL agent of a sender, which writes into one receiver's pool, one write at a time."""

    def __init__(self, pool: KvPool, target_address: int, target_block_count: int, target_metadata: bytes) -> None:
        super().__init__(pool)
        self.target_block_count = target_block_count
        self._source_block_count = pool.block_count
        self._source: Any = None
        self._target: Any = None
        self._write: Any = None
        self._status = "DONE"
        try:
            target = _ask("meeting the receiver's agent", self._agent.add_remote_agent, target_metadata)
            layers, block_bytes = pool.layout.layer_count, pool.layout.block_bytes
            own = _descriptors(pool.memory.ctypes.data, layers * pool.block_count, block_bytes)
            self._source = _ask("describing blocks", self._agent.prep_xfer_dlist, "NIXL_INIT_AGENT", own, "DRAM")
            theirs = _descriptors(target_address, layers * target_block_count, block_bytes)
            self._target = _ask("describing blocks", self._agent.prep_xfer_dlist, target, theirs, "DRAM")
        except BaseException:
            self.close()
            raise

    def post(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        """Start writing source_blocks[i] of each layer to target_blocks[i]. Raises LinkLost."""
        numbers = np.asarray(layers, np.int32)[:, np.newaxis]
        sources = (np.asarray(source_blocks, np.int32) + numbers * self._source_block_count).ravel()
        targets = (np.asarray(target_blocks, np.int32) + numbers * self.target_block_count).ravel()
        self._write = _ask(
            "writing", self._agent.make_prepped_xfer, "WRITE", self._source, sources, self._target, targets
        )
        self._status = _ask("writing", self._agent.transfer, self._write)

    def is_written(self) -> bool:
        """Progress the write; return True once all its bytes are in the receiver's pool. Raises LinkLost."""
        if self._status == "PROC":
            self._status = _ask("writing", self._agent.check_xfer_state, self._write)
        if self._status == "DONE":
            _ask("writing", self._write.release)
            self._write = None
            return True
        if self._status != "PROC":
            raise LinkLost(f"nixl: writing: {self._status}")
        return False

    def close(self) -> None:
        # Each refers to the agent. A pending write cannot be released; it ends with the agent.
        for name in ("_write", "_source", "_target"):
            handle = getattr(self, name)
            setattr(self, name, None)
            if handle is not None:
                with contextlib.suppress(Exception):
                    handle.release()
        super().close()


def _polls() -> Iterator[float]:
    began_s = now_s = time.monotonic()
    while True:
        yield now_s
        time.sleep(_PAUSE_S if now_s - began_s < _PATIENCE_S else _LONG_PAUSE_S)
        now_s = time.monotonic()


def _descriptors(address: int, count: int, block_bytes: int) -> npt.NDArray[np.uint64]:
    # [count, 3]: address, bytes and device of each block of a pool.
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    return rows


def _ask(doing: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        problem = f"nixl: {doing}: {error or type(error).__name__}"
    # The new error must not refer to the agent, which would outlive close(): neither this frame nor the frames of
    # NIXL's own error, which it would carry if it were raised above or by a context manager.
    del call, arguments
    raise LinkLost(problem)


@functools.cache
def _start_ucx() -> None:
    # A process's first agent takes half a second of processor time on each side, and some seconds on a busy machine,
    # which would delay the first request.
    try:
        _new_agent()
    except Exception as error:
        raise ConfigError("kv_transports", f"nixl does not start: {error}") from error


def _new_agent() -> Any:
    nixl = _import_nixl()
    settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    return nixl.nixl_agent(f"kaveri-{os.getpid()}-{secrets.token_hex(8)}", settings)


def _import_nixl() -> ModuleType:
    if not os.path.isdir("/sys/class/infiniband"):
        # Without an RDMA device UCX's modules for it crash at process exit. Read when the first agent is created.
        os.environ.setdefault("UCX_MODULES", "^ib")
    try:
        nixl = importlib.import_module("nixl_cu13._api")
    except ImportError as error:
        raise ConfigError("kv_transports", f"nixl needs nixl-cu13: {install_command('nixl')} ({error})") from error
    # It would write to stdout, even at every agent's start.
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    return nixl
