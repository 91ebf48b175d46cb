"""Links with nothing around them, for kv_transfer to compare with: no transfers, no frames, no digests, no fences.

    socket   sendmsg / recvmsg_into between the blocks, up to 1024 of them a call, with the buffers that suit it best
    nixl     one prepared NIXL write for each layer, all posted before any is waited for; the receiving end pauses
             between polls as the transport does: without, it took the sending end half of its speed on two cores
    gloo     messages of 1 MiB, four posted at a time; between the blocks themselves where they lie in a row, else with
             a gather before each message and a scatter behind it
    grpc     bytes in messages of 1 MiB on one client stream, copied into the blocks on arrival

Each has two ends, in two processes: the receiving end is made first, and its address makes the other.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kaveri.kv.tiers.pool import KvPool

BUFFERS_PER_CALL = 1024
MESSAGE_BYTES = 1 << 20
POSTED_MESSAGES = 4
WAIT_S = 30.0
_PAUSE_S = 1e-4
_BUFFER_BYTES = 1 << 18


class BareSender(Protocol):
    """The sending end."""

    def send(self, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
        """Moves source[i] of each layer to target[i]; returns when the other end has them all."""

    def close(self) -> None:
        """Ends it."""


class BareReceiver(Protocol):
    """The receiving end."""

    address: Any

    def accept(self) -> None:
        """Waits for the sending end."""

    def receive(self, target: Sequence[int]) -> None:
        """Takes part in one send()."""

    def close(self) -> None:
        """Ends it."""


def bare_receiver(kind: str, pool: KvPool, folder: str) -> BareReceiver:
    """kind: "tcp", "unix", "nixl", "gloo" or "grpc"."""
    if kind == "nixl":
        return _NixlReceiver(pool)
    if kind == "gloo":
        return _GlooReceiver(pool)
    if kind == "grpc":
        return _GrpcReceiver(pool)
    return _SocketReceiver(pool, kind, folder)


def bare_sender(kind: str, pool: KvPool, address: Any) -> BareSender:
    """The sending end for the receiving end of this address."""
    if kind == "nixl":
        return _NixlSender(pool, *address)
    if kind == "gloo":
        return _GlooSender(pool, address)
    if kind == "grpc":
        return _GrpcSender(address)
    return _SocketSender(kind, address)


class _SocketReceiver:
    def __init__(self, pool: KvPool, family: str, folder: str) -> None:
        self._pool = pool
        self._listening = socket.socket(socket.AF_INET if family == "tcp" else socket.AF_UNIX)
        self._listening.bind(("127.0.0.1", 0) if family == "tcp" else str(Path(folder) / "bare.sock"))
        self._listening.listen(1)
        self.address = self._listening.getsockname()

    def accept(self) -> None:
        self._socket, _ = self._listening.accept()
        self._listening.close()
        _set_buffers(self._socket)

    def receive(self, target: Sequence[int]) -> None:
        for layer in range(self._pool.layout.layer_count):
            regions = self._pool.regions(layer, target)
            while regions:
                _drop(regions, self._socket.recvmsg_into(regions[:BUFFERS_PER_CALL], 0, socket.MSG_WAITALL)[0])
        self._socket.send(b"!")

    def close(self) -> None:
        self._socket.close()


class _SocketSender:
    def __init__(self, family: str, address: Any) -> None:
        self._socket = socket.socket(socket.AF_INET if family == "tcp" else socket.AF_UNIX)
        self._socket.connect(address)
        _set_buffers(self._socket)
        if family == "tcp":
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
        for layer in range(pool.layout.layer_count):
            regions = pool.regions(layer, source)
            while regions:
                _drop(regions, self._socket.sendmsg(regions[:BUFFERS_PER_CALL]))
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()


class _NixlReceiver:
    def __init__(self, pool: KvPool) -> None:
        self._layer_count = pool.layout.layer_count
        self._agent = _nixl_agent(pool, "bare-receiver")
        self.address = (self._agent.get_agent_metadata(), pool.memory.ctypes.data, pool.block_count)

    def accept(self) -> None:
        """Nothing: the sender needs the address only."""

    def receive(self, target: Sequence[int]) -> None:
        arrived = 0
        while arrived < self._layer_count:
            arrived += sum(map(len, self._agent.get_new_notifs().values()))
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        del self._agent


class _NixlSender:
    def __init__(self, pool: KvPool, metadata: bytes, target_address: int, target_block_count: int) -> None:
        layout = pool.layout
        self._agent = _nixl_agent(pool, "bare-sender")
        receiver = self._agent.add_remote_agent(metadata)
        self._block_counts = pool.block_count, target_block_count
        own = _descriptors(pool.memory.ctypes.data, layout.layer_count * pool.block_count, layout.block_bytes)
        theirs = _descriptors(target_address, layout.layer_count * target_block_count, layout.block_bytes)
        self._source = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", own, "DRAM")
        self._target = self._agent.prep_xfer_dlist(receiver, theirs, "DRAM")

    def send(self, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
        agent, writes = self._agent, []
        sources, targets = np.asarray(source, np.int32), np.asarray(target, np.int32)
        for layer in range(pool.layout.layer_count):
            own, theirs = sources + layer * self._block_counts[0], targets + layer * self._block_counts[1]
            write = agent.make_prepped_xfer("WRITE", self._source, own, self._target, theirs, b"layer")
            agent.transfer(write)
            writes.append(write)
        for write in writes:
            while (state := agent.check_xfer_state(write)) == "PROC":
                pass
            assert state == "DONE", state
            write.release()

    def close(self) -> None:
        for handle in (self._source, self._target):
            handle.release()
        del self._agent, self._source, self._target


class _GlooReceiver:
    def __init__(self, pool: KvPool) -> None:
        import torch.distributed as distributed

        self._pool = pool
        self._store = distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False
        )
        self.address = self._store.port

    def accept(self) -> None:
        self._group, self._layers, self._staging = _gloo_ends(self._pool, self._store, 0)

    def receive(self, target: Sequence[int]) -> None:
        messages = list(_messages(self._pool, target))
        posted: list[Any] = []
        for index, (layer, blocks) in enumerate([*messages, *[(0, [])] * POSTED_MESSAGES]):
            if index >= POSTED_MESSAGES and index - POSTED_MESSAGES < len(messages):
                done = index - POSTED_MESSAGES
                posted[done].wait(timedelta(seconds=WAIT_S))
                if not _is_run(messages[done][1]):
                    done_layer, done_blocks = messages[done]
                    staged = self._staging[done % POSTED_MESSAGES][: len(done_blocks)]
                    self._pool.memory[done_layer][done_blocks] = staged.numpy()
            if index < len(messages):
                staged = self._staging[index % POSTED_MESSAGES][: len(blocks)]
                whole = self._layers[layer, blocks[0] : blocks[-1] + 1] if _is_run(blocks) else staged
                posted.append(self._group.recv([whole], 1, 0))

    def close(self) -> None:
        del self._group, self._store


class _GlooSender:
    def __init__(self, pool: KvPool, port: int) -> None:
        import torch.distributed as distributed

        store = distributed.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S), wait_for_workers=False
        )
        self._group, self._layers, self._staging = _gloo_ends(pool, store, 1)

    def send(self, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
        posted: list[Any] = []
        for index, (layer, blocks) in enumerate(_messages(pool, source)):
            if index >= POSTED_MESSAGES:
                posted[index - POSTED_MESSAGES].wait(timedelta(seconds=WAIT_S))
            if _is_run(blocks):
                message = self._layers[layer, blocks[0] : blocks[-1] + 1]
            else:
                message = self._staging[index % POSTED_MESSAGES][: len(blocks)]
                np.take(pool.memory[layer], blocks, axis=0, out=message.numpy(), mode="clip")
            posted.append(self._group.send([message], 0, 0))
        for work in posted[-POSTED_MESSAGES:]:
            work.wait(timedelta(seconds=WAIT_S))

    def close(self) -> None:
        del self._group


class _GrpcReceiver:
    def __init__(self, pool: KvPool) -> None:
        import grpc

        self._pool = pool
        self._target: list[int] = []
        self._received = threading.Event()
        handler = grpc.stream_unary_rpc_method_handler(self._take)
        self._server = grpc.server(ThreadPoolExecutor(1), options=_GRPC_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", {"Push": handler}),))
        self.address = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def accept(self) -> None:
        """Nothing: gRPC does."""

    def receive(self, target: Sequence[int]) -> None:
        self._target = list(target)
        assert self._received.wait(WAIT_S)
        self._received.clear()

    def close(self) -> None:
        self._server.stop(None)

    def _take(self, contents: Iterator[bytes], _: Any) -> bytes:
        for (layer, blocks), content in zip(_messages(self._pool, self._target), contents, strict=True):
            self._pool.memory[layer][list(blocks)] = np.frombuffer(content, np.uint8).reshape(len(blocks), -1)
        self._received.set()
        return b"!"


class _GrpcSender:
    def __init__(self, port: int) -> None:
        import grpc

        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_OPTIONS)
        self._push = self._channel.stream_unary("/Bare/Push")

    def send(self, pool: KvPool, source: Sequence[int], target: Sequence[int]) -> None:
        self._push((b"".join(pool.regions(layer, blocks)) for layer, blocks in _messages(pool, source)), timeout=WAIT_S)

    def close(self) -> None:
        self._channel.close()


_GRPC_OPTIONS = (("grpc.max_receive_message_length", 2 * MESSAGE_BYTES),)


def _nixl_agent(pool: KvPool, name: str) -> Any:
    # The transport's own maker sets UCX up for machines without RDMA.
    from kaveri.kv.transports.nixl import NixlTransport

    NixlTransport()
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.memory.ctypes.data, pool.memory.nbytes, 0, "")], "DRAM")
    return agent


def _descriptors(address: int, count: int, block_bytes: int) -> Any:
    rows = np.zeros((count, 3), np.uint64)
    rows[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    return rows


def _gloo_ends(pool: KvPool, store: Any, rank: int) -> tuple[Any, Any, Any]:
    """The group; the pool as a tensor, [layer, block, byte]; staging, [message, block, byte]."""
    import torch
    import torch.distributed as distributed

    options = distributed.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=WAIT_S)
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = distributed.ProcessGroupGloo(store, rank, 2, options)
    block_bytes = pool.layout.block_bytes
    staging = torch.zeros((POSTED_MESSAGES, MESSAGE_BYTES // block_bytes, block_bytes), dtype=torch.uint8)
    return group, torch.from_numpy(pool.memory), staging


def _messages(pool: KvPool, blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Layer and blocks of each message."""
    step = MESSAGE_BYTES // pool.layout.block_bytes
    for layer in range(pool.layout.layer_count):
        for start in range(0, len(blocks), step):
            yield layer, blocks[start : start + step]


def _set_buffers(connected: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connected.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _is_run(blocks: Sequence[int]) -> bool:
    return blocks[-1] - blocks[0] + 1 == len(blocks) and list(blocks) == sorted(blocks)


def _drop(regions: list[memoryview], byte_count: int) -> None:
    done = 0
    while done < len(regions) and byte_count >= len(regions[done]):
        byte_count -= len(regions[done])
        done += 1
    del regions[:done]
    if byte_count:
        regions[0] = regions[0][byte_count:]
