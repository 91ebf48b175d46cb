"""Connections of a local cluster that can be cut: bytes wait where they are, and nothing is reset.

Every instance listens on 127.0.0.1 and is known to the others as an address of its own, 127.0.1.N, where Links listens
on the same ports. Redis has one address per instance. The kernel knows who opened a connection.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil

from kaveri.config.services import ServiceKind
from kaveri.local import stack as local_stack
from kaveri.local.config import StackConfig, service_command, service_environment
from tests.support.tcp_relay import Connect, RelayedConnection

REDIS = "redis"
CLIENT = "client"
_SCAN_S = 0.25
_SLOW_SCAN_S = 1.0
_NEW_FOR_S = 10.0
"""Processes that opened a port within this time are scanned more often."""
_LISTENING = "0A"
_MAPPED = "0000000000000000FFFF0000"


class Links:
    """Connections between the processes of one cluster, which can be cut. Not thread-safe."""

    def __init__(self, instance_ids: Sequence[str]) -> None:
        self._hosts = {name: f"127.0.1.{number}" for number, name in enumerate(instance_ids, 1)}
        self._redis_ports: dict[str, int] = {}
        self._redis_path = ""
        self._cut: dict[frozenset[str | None], int] = {}
        self._pairs: dict[_LinkedPair, None] = {}
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._pids: Callable[[], Mapping[str, int]] = dict
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.contextmanager
    def between_processes(self) -> Iterator[None]:
        """Connect LocalStacks (local clusters) that start in this context over these links."""

        starting = ""

        def command(config: StackConfig, role: ServiceKind, instance_id: str, port: int) -> list[str]:
            # The stack makes the command of an instance, and then its environment.
            nonlocal starting
            starting = instance_id
            words = service_command(config, role, instance_id, port)
            words[words.index("--advertise-host") + 1] = self._hosts[instance_id]
            return words

        def environment(config: StackConfig, role: ServiceKind, redis_url: str, inherited: Any) -> dict[str, str]:
            self._redis_path = redis_url.removeprefix("unix://")
            url = f"redis://127.0.0.1:{self._redis_ports[starting]}/0"
            return service_environment(config, role, url, inherited)

        with (
            mock.patch.object(local_stack, "service_command", command),
            mock.patch.object(local_stack, "service_environment", environment),
        ):
            yield

    async def open(self) -> None:
        """Listen for the instances' connections to Redis. Call before the stack starts."""
        for name in self._hosts:
            server = await asyncio.start_server(self._to_redis(name), "127.0.0.1", 0)
            self._redis_ports[name] = server.sockets[0].getsockname()[1]
            self._servers[REDIS, self._redis_ports[name]] = server

    def follow(self, pids: Callable[[], Mapping[str, int]]) -> None:
        """Listen wherever the instances do from now on. pids: returns ids of running processes by name."""
        self._pids = pids
        self._tasks = [asyncio.create_task(self._scan()), asyncio.create_task(self._find_sources())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers.values():
            server.close()
        for pair in tuple(self._pairs):
            pair.close()

    def cut(self, name: str, others: Collection[str]) -> None:
        """Stop all traffic between a process and `others` until heal()."""
        for other in others:
            ends: frozenset[str | None] = frozenset((name, other))
            self._cut[ends] = self._cut.get(ends, 0) + 1
        self._find_sources_now()

    def heal(self, name: str, others: Collection[str]) -> None:
        """End one cut(). Bytes sent meanwhile arrive."""
        for other in others:
            ends = frozenset((name, other))
            self._cut[ends] -= 1
            if not self._cut[ends]:
                del self._cut[ends]
        self._apply()

    def _apply(self) -> None:
        """Stop cut connections, and while anything is cut also those of unknown source."""
        for pair in self._pairs:
            pair.stand_still(bool(self._cut) if pair.source is None else pair.ends in self._cut)

    async def _find_sources(self) -> None:
        while True:
            await asyncio.sleep(_SCAN_S)
            if self._cut and any(pair.source is None for pair in self._pairs):
                self._find_sources_now()

    def _find_sources_now(self) -> None:
        """Find unknown sources; slow, as it reads the tables of all processes."""
        unknown = [pair for pair in self._pairs if pair.source is None]
        if unknown:
            inodes = {each.address: each.inode for each in _sockets()}
            owners = {inode: name for name, pid in self._pids().items() for inode in _socket_inodes(pid)}
            for pair in unknown:
                pair.source = owners.get(inodes.get(_written(*pair.peer), ""), CLIENT)
        self._apply()

    async def _scan(self) -> None:
        owners: dict[str, str] = {}
        changed_s: dict[int, float] = {}
        now_s = asyncio.get_running_loop().time
        while True:
            sockets = {each.inode: each.port for each in _sockets() if each.state == _LISTENING}
            pids = self._pids()
            if sockets.keys() - owners.keys():
                found = {inode: name for name in self._hosts for inode in _socket_inodes(pids.get(name))}
                owners |= {inode: found.get(inode, "") for inode in sockets.keys() - owners.keys()}
            owners = {inode: name for inode, name in owners.items() if inode in sockets}
            wanted = {(name, sockets[inode]) for inode, name in owners.items() if name}
            for name, port in wanted - self._servers.keys():
                # Another process may have the address for a moment; the next look tries again.
                with contextlib.suppress(OSError):
                    server = await asyncio.start_server(self._to_instance(name, port), self._hosts[name], port)
                    self._servers[name, port] = server
                changed_s[pids[name]] = now_s()
            for key in [key for key in self._servers if key[0] != REDIS and key not in wanted]:
                self._servers.pop(key).close()
            is_new = any(now_s() - changed_s.setdefault(pid, now_s()) < _NEW_FOR_S for pid in pids.values())
            await asyncio.sleep(_SCAN_S if is_new else _SLOW_SCAN_S)

    def _to_instance(self, name: str, port: int) -> Callable[..., Any]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pair = _LinkedPair(name, writer.get_extra_info("peername"))
            await self._serve(pair, reader, writer, lambda: asyncio.open_connection("127.0.0.1", port))

        return connected

    def _to_redis(self, name: str) -> Callable[..., Any]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            pair = _LinkedPair(REDIS, writer.get_extra_info("peername"), name)
            await self._serve(pair, reader, writer, lambda: asyncio.open_unix_connection(self._redis_path))

        return connected

    async def _serve(
        self, pair: "_LinkedPair", reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect
    ) -> None:
        self._pairs[pair] = None
        self._apply()
        try:
            await pair.run(reader, writer, connect)
        finally:
            del self._pairs[pair]


class _LinkedPair(RelayedConnection):
    def __init__(self, target: str, peer: tuple[str, int], source: str | None = None) -> None:
        super().__init__()
        self.target = target
        self.peer = peer
        self.source = source

    @property
    def ends(self) -> frozenset[str | None]:
        return frozenset((self.source, self.target))


class _Socket(NamedTuple):
    address: str
    state: str
    inode: str

    @property
    def port(self) -> int:
        return int(self.address.partition(":")[2], 16)


def _sockets() -> Iterator[_Socket]:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        yield _Socket(words[1], words[3], words[9])
    # gRPC's sockets take both: what is an IPv4 address there has a prefix.
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        words = line.split()
        if words[1].startswith(_MAPPED):
            yield _Socket(words[1].removeprefix(_MAPPED), words[3], words[9])


def _written(host: str, port: int) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(host.split("."))) + f":{port:04X}"


def family_of(pid: int) -> list[psutil.Process]:
    """Return a process and its children, such as the one of vLLM's engine, which receives KV. Empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _socket_inodes(pid: int | None) -> Iterator[str]:
    for process in family_of(pid) if pid is not None else ():
        folder = f"/proc/{process.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{folder}/{name}")
                    if target.startswith("socket:["):
                        yield target.removeprefix("socket:[").removesuffix("]")
