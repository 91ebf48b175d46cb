"""What a gateway does with clients that send nonsense, go away, do not read, or only stay connected.

Real processes on the fake engine: a gateway, a router, a prefill and a decode instance. Four parts, in turn:

- 10,000 malformed requests: broken JSON and HTTP, values of wrong types and sizes, parameters that do not exist.
- 1,000 streams whose clients close the connection, 50 at once, some while the request waits or the prompt is computed,
  some after a few tokens. Time until every block is free again, as heartbeats show it.
- 2,000 connections that ask nothing: memory of the gateway.
- 60 clients that ask for a long answer and do not read it: memory of the gateway, and whether they
  lose their requests.

Bodies are drawn by hand, not from an OpenAPI description: the gateway has none.
"""

import asyncio
import contextlib
import json
import random
import socket
import string
import time
from collections import Counter
from typing import Any

import psutil
import uvloop

from benchmarks.support.harness import Options, Report, run
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

SEED = 14
AT_ONCE = 16
CUT_TOGETHER = 50
SLOW_READER_S = 3.0
MOST_KEPT_BYTES = (64 << 10) + (1 << 20)
"""What docs/doors.md says that an answer whose client does not read may take in the gateway."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
ALLOWED = {200, 400, 404, 405, 408, 413, 429, 431}
_NAMES = ["prompt", "messages", "model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens"]
_NAMES += ["temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs"]
_NAMES += ["top_logprobs", "prompt_logprobs", "echo", "return_token_ids", "best_of", "logit_bias", "tools", "user"]
_NAMES += ["response_format", "suffix", "tokens", "add_special_tokens"]


class Nonsense:
    """Draws requests. Those that would be answered ask for two tokens."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def request(self) -> bytes:
        rng, path = self._rng, self._rng.choice(PATHS)
        body = self._body(path)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        kind = rng.random()
        if kind < 0.02:
            return bytes(rng.randrange(256) for _ in range(rng.randint(1, 200))) + b"\r\n\r\n"
        if kind < 0.03:
            return f"{head}x: {'y' * rng.randint(1, 200_000)}\r\n\r\n".encode()
        if kind < 0.04:
            wrong = rng.choice(("-1", "1e3", "0x10", "99999999999999999999", "a", ""))
            return f"{head}content-length: {wrong}\r\n\r\n".encode() + body
        if kind < 0.05:
            return f"{head}transfer-encoding: chunked\r\n\r\nZZ\r\n".encode() + body
        if kind < 0.06:
            method = rng.choice(("GET", "PUT", "BREW", "post"))
            return (
                f"{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    def _body(self, path: str) -> bytes:
        rng = self._rng
        plain: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
        if "chat" in path:
            plain = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        elif path == "/detokenize":
            plain = {"tokens": [300, 301]}
        for _ in range(rng.randint(1, 3)):
            plain[rng.choice((*_NAMES, self._text()))] = self._value(3)
        # Long answers are no nonsense: they would be computed.
        for name in ("max_tokens", "max_completion_tokens"):
            if (type(plain.get(name)) in (int, float) and 2 < plain[name] < 1e5) or plain.get(name, 0) is None:
                plain[name] = 2
        if type(plain.get("min_tokens")) is int and plain["min_tokens"] > 2:
            plain["min_tokens"] = -1
        text = json.dumps(plain)
        kind = rng.random()
        if kind < 0.1:
            return text[: rng.randrange(len(text))].encode()
        if kind < 0.15:
            return ("[" * rng.randint(1, 5_000)).encode()
        if kind < 0.2:
            raw = bytearray(text.encode())
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            return bytes(raw)
        return text.encode()

    def _value(self, depth: int) -> Any:
        rng = self._rng
        drawn = rng.randrange(10 if depth else 8)
        if drawn == 8:
            return [self._value(depth - 1) for _ in range(rng.randint(0, 4))]
        if drawn == 9:
            names = ("role", "content", "type", "text", "include_usage", "a")
            return {rng.choice(names): self._value(depth - 1) for _ in range(rng.randint(0, 4))}
        return (
            None,
            rng.random() < 0.5,
            rng.choice((-1, 0, 1, 2**31, 2**63, 2**64, -(10**30), 10**300)),
            rng.choice((-0.5, 0.1, 1e308, float("inf"), float("nan"))),
            self._text(),
            rng.choice(("kaveri-tiny", "user", "\ud800", "\0", "text")),
            "x" * rng.randint(0, 20_000),
            [rng.randint(-5, 3_000) for _ in range(rng.randint(0, 40))],
        )[drawn]

    def _text(self) -> str:
        return "".join(self._rng.choices(string.printable, k=self._rng.randint(0, 20)))


async def answer_of(address: str, request: bytes, within_s: float = 30.0) -> int:
    """The status of one request on a connection of its own; 0: the connection was closed without one."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    try:
        writer.write(request)
        async with asyncio.timeout(within_s):
            line = await reader.readline()
            await reader.read()
    except ConnectionError:
        return 0
    finally:
        writer.close()
    parts = line.split()
    return int(parts[1]) if len(parts) > 1 else 0


async def send_nonsense(address: str, count: int) -> Counter[int]:
    """Statuses of so many malformed requests."""
    drawn, found = Nonsense(SEED), Counter[int]()
    left = iter(range(count))

    async def send() -> None:
        for _ in left:
            request = drawn.request()
            status = await answer_of(address, request)
            if status not in ALLOWED and status:
                print(f"  {status} for {request[:300]!r}", flush=True)
            found[status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send())
    return found


def stream_request(prompt: list[int], tokens: int, **fields: Any) -> bytes:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def cut_streams(stack: LocalStack, rng: random.Random) -> float:
    """Seconds from the moment when so many clients close their connections until every block is free."""
    host, _, port = stack.http_targets[0].rpartition(":")
    writers = []
    for number in range(CUT_TOGETHER):
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        prompt = [rng.randrange(1, 1000) for _ in range(rng.choice((8, 300, 2_000)))]
        writer.write(stream_request(prompt, 1_000))
        if number % 2:
            # The phases of the others are where they happen to be.
            async with asyncio.timeout(60):
                for _ in range(rng.randint(1, 12)):
                    await reader.readuntil(b"\n\n")
    began_s = time.monotonic()
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(60):
        while not is_free(stack):
            await stack.wait_for_change(0.02)
    return time.monotonic() - began_s


def is_free(stack: LocalStack) -> bool:
    """Whether no instance has a request or a block, as its last heartbeat says."""
    loads = [status.load for name, status in stack.view().instances.items() if not name.startswith("gateway")]
    return all(load.free_blocks == load.total_blocks and not load.running_requests for load in loads)


async def idle_connections(address: str, process: psutil.Process, count: int) -> tuple[float, int]:
    """KiB of the gateway's memory for each connection that asks nothing, and the status of a request meanwhile."""
    host, _, port = address.rpartition(":")
    before = process.memory_info().rss
    writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(count)]
    status = await answer_of(address, stream_request([300], 2))
    grown = process.memory_info().rss - before
    for writer in writers:
        writer.transport.abort()
    return grown / count / 1024, status


async def slow_readers(stack: LocalStack, process: psutil.Process, count: int) -> tuple[float, float, int]:
    """KiB of the gateway's memory at most for each client that does not read, seconds until all is free, and how many
    lost their requests."""
    host, _, port = stack.http_targets[0].rpartition(":")
    before = most = process.memory_info().rss
    sockets = []
    began_s = time.monotonic()
    for number in range(count):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        # With log-probabilities tokens come from the router, without them from the decode instance.
        fields = {"logprobs": 5} if number % 2 else {"return_token_ids": True}
        raw.sendall(stream_request([300 + number % 100] * 20, 3_900, **fields))
        sockets.append(raw)
    try:
        async with asyncio.timeout(300):
            seen = False
            while not seen or not is_free(stack):
                await stack.wait_for_change(0.05)
                seen = seen or not is_free(stack)
                most = max(most, process.memory_info().rss)
        seconds = time.monotonic() - began_s
        lost = sum([not await asyncio.to_thread(_is_whole, raw) for raw in sockets])
    finally:
        for raw in sockets:
            raw.close()
    return (most - before) / count / 1024, seconds, lost


def _is_whole(raw: socket.socket) -> bool:
    """Whether what is left in the connection ends as an answer does."""
    raw.settimeout(10.0)
    end = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(1 << 20):
            end = (end + piece)[-100:]
    return b"data: [DONE]" in end


async def measure_async(options: Options, report: Report) -> None:
    nonsense, cut, idle, slow = options.choose((10_000, 1_000, 2_000, 60), (500, 100, 200, 20))
    report.workload = {
        "engine": "fake",
        "malformed": nonsense,
        "cut": cut,
        "idle": idle,
        "slow readers": slow,
        "seed": SEED,
    }
    config = StackConfig.of(
        engine="fake",
        gateway_count=1,
        prefill_count=1,
        decode_count=1,
        restart=False,
        gateway_flags=("--slow-reader-s", str(SLOW_READER_S), "--slow-sender-s", "2"),
        decode_flags=("--fake-step-s", "0.005", "--max-batch", "256"),
        prefill_flags=("--fake-step-s", "0.005"),
        start_timeout_s=300.0,
    )
    async with LocalStack(config) as stack:
        address = stack.http_targets[0]
        gateway = psutil.Process(stack.process("gateway-0").pid)
        pids = stack.pids()
        rng = random.Random(SEED)
        await send_nonsense(address, 300)
        before = gateway.memory_info().rss
        statuses = await send_nonsense(address, nonsense)
        grown = (gateway.memory_info().rss - before) / 2**20
        wrong = sum(count for status, count in statuses.items() if status and status not in ALLOWED)
        report.row("malformed requests that got another status than those of docs/doors.md", [wrong], "requests")
        report.row("memory of the gateway after them", [grown], "MiB")
        report.note(f"statuses, 0: the connection was closed without one: {dict(sorted(statuses.items()))}")
        times_s = [await cut_streams(stack, rng) for _ in range(cut // CUT_TOGETHER)]
        slowest_s = max(times_s)
        report.row(f"{CUT_TOGETHER} clients gone until every block is free", times_s, "s")
        report.ratio("asked for (1 s) / the slowest time until every block is free", 1.0 / slowest_s, 1.0)
        kib, status = await idle_connections(address, gateway, idle)
        report.row("memory of an idle connection", [kib], "KiB")
        report.row("status of a request meanwhile", [status], "")
        kib, seconds, lost = await slow_readers(stack, gateway, slow)
        report.row("memory of a client that does not read", [kib], "KiB")
        report.row(f"{slow} such clients until every block is free", [seconds], "s")
        report.ratio("clients that do not read that lost their requests, of all", lost / slow, 1.0)
        report.ratio("limit / memory of a client that does not read", MOST_KEPT_BYTES / 1024 / max(kib, 1.0), 1.0)
        ended = sum(stack.pids().get(name) != pid for name, pid in pids.items())
        report.row("processes that ended", [ended], "")
        report.ratio("requests without a wrong status", 1 - wrong / nonsense, 1.0)


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.hostile_http", measure, description=__doc__)
