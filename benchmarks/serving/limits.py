"""What one client costs the others when it drives two limits at once, such as the size of a prompt and n.

Real processes on the fake engine: a gateway, a router, a prefill and a decode instance. For each pair of limits another
process sends the requests, while four streams go on. Each pair is driven three times. Measured, from outside, are

- the longest stall of each process's event loop: the slowest answer to /livez, asked every 10 ms, without the time in
  which the loop's thread waited for one of the two cores, which eight processes share. The slowest answer as a whole
  stands beside it. The median of the three counts: the host of a virtual machine stops it for 0.1 s now and then,
  whatever it runs;
- the peak of each process's memory above what it had just before; the largest of the three counts;
- the longest gap between two tokens of the four streams.

The rule: no loop stands still for more than 100 ms, and no process takes more than 64 MiB, 16 times the bodies and the
answers. What Kaveri refuses is recorded as refused, with the statuses.
"""

import asyncio
import itertools
import json
import multiprocessing
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import uvloop
from grpc import aio

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.loop_probe import Loop, LoopProbe, Stalls, forget_peak, peak_bytes, resident_bytes
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.server import MAX_MESSAGE_BYTES, open_channel
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub

STEP_S = 0.005
MODEL_TOKENS = 131_072
METRICS_PORT = 19_400
MOST_STALL_S = 0.1
ROOM_BYTES = 64 * 2**20
BODY_FACTOR = 16
STREAMS = 4
REPEATS = 3
_BODY_BYTES = 4_100_000
_TIMEOUT_S = 240.0
_SETTLE_S = 1.0


@dataclass
class Cost:
    """What the requests of one case were."""

    statuses: Counter[str] = field(default_factory=Counter)
    body_bytes: int = 0
    answer_bytes: int = 0


@dataclass(frozen=True)
class Doors:
    """Where to ask."""

    http: str
    router: str


Case = Callable[[Doors, Cost], Coroutine[Any, Any, None]]


async def post(targets: Doors, cost: Cost, path: str, body: bytes) -> None:
    """One request on a connection of its own, read to its end."""
    host, _, port = targets.http.rpartition(":")
    cost.body_bytes += len(body)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    try:
        writer.write(_head(path, len(body)) + body)
        line = await reader.readline()
        size = len(line)
        while piece := await reader.read(1 << 20):
            size += len(piece)
        cost.answer_bytes += size
        cost.statuses[line.split()[1].decode() if line else "closed"] += 1
    except ConnectionError:
        cost.statuses["reset"] += 1
    finally:
        writer.close()


def _head(path: str, size: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n".encode()


def completions(count: int, make: Callable[[], dict[str, Any]], path: str = "/v1/completions") -> Case:
    """A case of so many equal requests at once."""

    async def case(targets: Doors, cost: Cost) -> None:
        body = json.dumps({"temperature": 0, "ignore_eos": True, **make()}, separators=(",", ":")).encode()
        await asyncio.gather(*(post(targets, cost, path, body) for _ in range(count)))

    return case


def raw(count: int, make: Callable[[], bytes]) -> Case:
    """The same, of a body that is no JSON of ours."""

    async def case(targets: Doors, cost: Cost) -> None:
        body = make()
        await asyncio.gather(*(post(targets, cost, "/v1/completions", body) for _ in range(count)))

    return case


def reattach(count: int, received_tokens: int, stop: tuple[str, ...]) -> Case:
    """Clients that come back with what they have received, of requests that nobody knows."""

    async def case(targets: Doors, cost: Cost) -> None:
        params = sampling_pb2.SamplingParams(max_tokens=received_tokens + 10, temperature=0, seed=1, stop=stop)

        async def ask() -> None:
            request = inference_pb2.GenerateRequest(
                request_id=secrets.token_hex(8),
                token_ids=inference_pb2.TokenIds(ids=[300] * 8),
                params=params,
                session=1,
                secret=secrets.token_bytes(16),
                received=inference_pb2.Received(
                    token_ids=[300 + number % 500 for number in range(received_tokens)],
                    characters=received_tokens,
                    max_tokens=received_tokens + 10,
                ),
            )
            cost.body_bytes += request.ByteSize()
            async with open_channel(targets.router) as channel:
                try:
                    async for response in InferenceServiceStub(channel).Generate(request, timeout=_TIMEOUT_S):
                        cost.answer_bytes += response.ByteSize()
                    cost.statuses["OK"] += 1
                except aio.AioRpcError as error:
                    cost.statuses[error.code().name] += 1

        await asyncio.gather(*(ask() for _ in range(count)))

    return case


def slow_readers(count: int, make: Callable[[], dict[str, Any]]) -> Case:
    """Clients that ask for many answers and read nothing for a while."""

    async def case(targets: Doors, cost: Cost) -> None:
        host, _, port = targets.http.rpartition(":")
        body = json.dumps({"temperature": 0, "ignore_eos": True, **make()}).encode()
        sockets = []
        for _ in range(count):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.connect((host, int(port)))
            made.sendall(_head("/v1/completions", len(body)) + body)
            cost.body_bytes += len(body)
            sockets.append(made)
        await asyncio.sleep(8.0)
        for made in sockets:
            made.close()
            cost.statuses["left"] += 1

    return case


def prompt_text(size_bytes: int) -> str:
    return "words " * (size_bytes // 6)


def prompt_ids(count: int) -> list[int]:
    return [300 + number % 500 for number in range(count)]


def _parts(messages: int, parts: int) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": "a"}] * parts
    return [{"role": "user" if number % 2 == 0 else "assistant", "content": content} for number in range(messages)]


def _deep(levels: int, size_bytes: int) -> dict[str, Any]:
    value: Any = [[]] * (size_bytes // 3)
    for _ in range(levels - 3):
        value = {"a": value}
    return value  # type: ignore[no-any-return]


_STOPS = tuple(f"{number:03d}" + "ab" * 126 for number in range(16))
_ANSWERS = {"prompt": [[300], [301]], "n": 128, "max_tokens": 1_900}
CASES: dict[str, Case] = {
    "body, n": completions(1, lambda: {"prompt": prompt_text(_BODY_BYTES), "n": 128, "max_tokens": 1}),
    "body, n: four at once": completions(4, lambda: {"prompt": prompt_text(_BODY_BYTES), "n": 128, "max_tokens": 1}),
    "body, n: nearly the most characters": completions(
        1, lambda: {"prompt": prompt_text(130_000), "n": 128, "max_tokens": 1}
    ),
    "body, n: a prompt that fits": completions(1, lambda: {"prompt": prompt_text(24_000), "n": 64, "max_tokens": 1}),
    "ids, n": completions(1, lambda: {"prompt": prompt_ids(1_000_000), "n": 128, "max_tokens": 1}),
    "ids, n: a prompt that fits": completions(1, lambda: {"prompt": prompt_ids(120_000), "n": 128, "max_tokens": 1}),
    "ids, n: nearly the most tokens": completions(1, lambda: {"prompt": prompt_ids(65_000), "n": 16, "max_tokens": 1}),
    "ids, n: 8,000 tokens": completions(1, lambda: {"prompt": prompt_ids(8_000), "n": 128, "max_tokens": 1}),
    "ids, n: many prompts": completions(
        1, lambda: {"prompt": [prompt_ids(3_900)] * 256, "max_tokens": 1, "return_token_ids": True}
    ),
    "answers, length": completions(1, lambda: {**_ANSWERS, "return_token_ids": True}),
    "answers, length: 400 tokens, streamed": completions(1, lambda: {**_ANSWERS, "stream": True, "max_tokens": 400}),
    "received, stops": reattach(1, 100_000, _STOPS),
    "received, connections": reattach(32, 100_000, ()),
    "prompt ids, connections": completions(16, lambda: {"prompt": prompt_ids(130_000), "max_tokens": 2}),
    "messages, parts": completions(
        1, lambda: {"messages": _parts(100, 1_300), "max_tokens": 1}, "/v1/chat/completions"
    ),
    "messages, parts: many messages": completions(
        1, lambda: {"messages": _parts(60_000, 1), "max_tokens": 1}, "/v1/chat/completions"
    ),
    "logprobs, max_tokens": completions(
        1, lambda: {"prompt": [300], "n": 32, "max_tokens": 1_000, "logprobs": 20, "ignore_eos": True}
    ),
    "logprobs, max_tokens: one answer": completions(1, lambda: {"prompt": [300], "max_tokens": 2_000, "logprobs": 20}),
    "logprobs, prompt": completions(
        1, lambda: {"prompt": prompt_ids(6_000), "echo": True, "logprobs": 20, "n": 1, "max_tokens": 1}
    ),
    "bias entries, n": completions(
        1,
        lambda: {
            "prompt": [300],
            "logit_bias": {str(number): 1 for number in range(150_000)},
            "n": 128,
            "max_tokens": 1,
        },
    ),
    "stop texts, their length": completions(
        1, lambda: {"prompt": [300], "stop": list(_STOPS), "n": 64, "max_tokens": 1_000}
    ),
    "JSON depth, body": completions(1, lambda: {"prompt": [300], "metadata": _deep(15, _BODY_BYTES)}),
    "JSON depth, body: nearly the most values": completions(
        1, lambda: {"prompt": prompt_ids(520_000), "metadata": {"a": [[]] * 65_000}}
    ),
    "JSON depth, body: too deep": raw(1, lambda: b'{"prompt":' + b"[" * (_BODY_BYTES - 100)),
    "slow readers, answers": slow_readers(
        32, lambda: {"prompt": [300], "n": 8, "max_tokens": 1_900, "stream": True, "return_token_ids": True}
    ),
    "tokenize": completions(1, lambda: {"prompt": prompt_text(400_000)}, "/tokenize"),
    "detokenize": completions(1, lambda: {"tokens": prompt_ids(130_000)}, "/detokenize"),
}

_WORST = [
    "body, n",
    "ids, n",
    "received, stops",
    "JSON depth, body",
    "messages, parts",
    "logprobs, max_tokens",
    "body, n: nearly the most characters",
    "ids, n: nearly the most tokens",
    "JSON depth, body: nearly the most values",
    "answers, length: 400 tokens, streamed",
    "received, connections",
]
"""Of a quick run, in this order: those that cost most before the limits on products, and what is nearly at these."""


def _attack(name: str, targets: Doors, result: "Connection[Cost, object]") -> None:
    cost = Cost()
    uvloop.run(CASES[name](targets, cost))
    result.send(cost)


async def attack(name: str, targets: Doors) -> Cost:
    """Run one case in a child process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(name, targets, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        has_ended = await asyncio.to_thread(ours.poll, _TIMEOUT_S)
        assert has_ended, f"{name}: no end within {_TIMEOUT_S} s"
        found: Cost = ours.recv()
        return found
    finally:
        process.kill()
        process.join()


class Streams:
    """Streams of other clients, each in turn from one answer to the next, in a process of their own."""

    def __init__(self, targets: Doors) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_stream, args=(targets, theirs), daemon=True)
        self._process.start()

    async def longest_gap_s(self) -> float:
        """Since the last call."""
        self._ours.send(None)
        assert await asyncio.to_thread(self._ours.poll, _TIMEOUT_S), "the streams do not answer"
        found: float = self._ours.recv()
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _stream(targets: Doors, asked: "Connection[float, None]") -> None:
    uvloop.run(_stream_all(targets, asked))


async def _stream_all(targets: Doors, asked: "Connection[float, None]") -> None:
    longest_s = 0.0
    last_s: dict[int, float] = {}

    def answer() -> None:
        nonlocal longest_s
        asked.recv()
        now_s = time.monotonic()
        asked.send(max([longest_s, *(now_s - each for each in last_s.values())]))
        longest_s = 0.0

    async def read(number: int) -> None:
        nonlocal longest_s
        host, _, port = targets.http.rpartition(":")
        body = json.dumps({"prompt": [300 + number], "max_tokens": 100_000, "ignore_eos": True, "stream": True})
        for _ in itertools.count():
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(_head("/v1/completions", len(body)) + body.encode())
            last_s.pop(number, None)
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    now_s = time.monotonic()
                    longest_s = max(longest_s, now_s - last_s.get(number, now_s))
                    last_s[number] = now_s
            writer.close()

    asyncio.get_running_loop().add_reader(asked.fileno(), answer)
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(read(number))


def stack_config() -> StackConfig:
    engine = ("--fake-step-s", str(STEP_S), "--max-model-len", str(MODEL_TOKENS), "--fake-verify-kv", "false")
    return StackConfig.of(
        engine="fake",
        gateway_count=1,
        prefill_count=1,
        decode_count=1,
        restart=False,
        metrics_port=METRICS_PORT,
        kv_cache_memory=512 * 2**20,
        prefill_flags=(*engine, "--chunk-tokens", "8192"),
        decode_flags=(*engine, "--max-batch", "272"),
        start_timeout_s=300.0,
    )


class Outcome(NamedTuple):
    """What one run of a case cost."""

    cost: Cost
    taken_s: float
    gap_s: float
    stalls: Mapping[str, Stalls]
    """By process name."""
    grown_bytes: Mapping[str, int]
    """Peak memory above idle, by process name."""

    @property
    def room_bytes(self) -> int:
        """Memory that the rule allows."""
        return ROOM_BYTES + BODY_FACTOR * self.cost.body_bytes + self.cost.answer_bytes


async def drive(name: str, stack: LocalStack, probe: LoopProbe, streams: Streams) -> Outcome:
    """Drive one case once."""
    processes = {name: stack.process(name).pid for name in stack.instance_ids}
    targets = Doors(stack.http_targets[0], stack.target)
    await asyncio.sleep(_SETTLE_S)
    idle = {process: resident_bytes(pid) for process, pid in processes.items()}
    for pid in processes.values():
        forget_peak(pid)
    await streams.longest_gap_s()
    await probe.begin()
    began_s = time.monotonic()
    cost = await attack(name, targets)
    taken_s = time.monotonic() - began_s
    await asyncio.sleep(_SETTLE_S)
    stalls, gap_s = await probe.longest(), await streams.longest_gap_s()
    grown = {process: max(0, peak_bytes(pid) - idle[process]) for process, pid in processes.items()}
    return Outcome(cost, taken_s, gap_s, stalls, grown)


def report_case(name: str, outcomes: Sequence[Outcome], report: Report) -> bool:
    """Report all runs of a case. Returns True if it is within the rule."""
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(outcomes[0].cost.statuses.items()))
    longest_s = []
    for process in outcomes[0].stalls:
        blocked = [1e3 * outcome.stalls[process].blocked_s for outcome in outcomes]
        longest_s.append(1e-3 * report.row("longest stall", blocked, "ms", pair=name, process=process))
        answers = [1e3 * outcome.stalls[process].answer_s for outcome in outcomes]
        report.row("slowest answer", answers, "ms", pair=name, process=process)
        grown = [outcome.grown_bytes[process] / 2**20 for outcome in outcomes]
        report.row("peak memory above idle", grown, "MiB", pair=name, process=process)
    gaps = [1e3 * outcome.gap_s for outcome in outcomes]
    report.row("longest gap of four streams", gaps, "ms", pair=name, outcome=statuses)
    report.row("duration", [outcome.taken_s for outcome in outcomes], "s", pair=name)
    room = [outcome.room_bytes for outcome in outcomes]
    report.row("memory that the rule allows", [size / 2**20 for size in room], "MiB", pair=name)
    most_bytes = max(max(outcome.grown_bytes.values()) for outcome in outcomes)
    report.ratio(f"100 ms / longest stall: {name}", MOST_STALL_S / max(longest_s), 1.0)
    report.ratio(f"room / peak memory: {name}", min(room) / max(most_bytes, 2**20), 1.0)
    return max(longest_s) <= MOST_STALL_S and most_bytes <= min(room)


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "engine": f"fake, {STEP_S} s a step",
        "max_model_len": MODEL_TOKENS,
        "streams": STREAMS,
        "largest body": _BODY_BYTES,
        "largest message": MAX_MESSAGE_BYTES,
        "warm_up": "two seconds of streams",
    }
    config = stack_config()
    async with LocalStack(config) as stack:
        streams = Streams(Doors(stack.http_targets[0], stack.target))
        try:
            loops = {name: Loop(stack.process(name).pid, config.metrics_port_of(name)) for name in stack.instance_ids}
            with LoopProbe(loops) as probe:
                await asyncio.sleep(2.0)
                await probe.begin()
                await streams.longest_gap_s()
                await asyncio.sleep(3.0)
                quiet = max(stalls.answer_s for stalls in (await probe.longest()).values())
                report.row("slowest answer, streams alone", [1e3 * quiet], "ms")
                report.row("longest gap, streams alone", [1e3 * await streams.longest_gap_s()], "ms")
                names = options.choose(list(CASES), _WORST)
                held = []
                for name in names:
                    repeats = range(options.choose(REPEATS, 1))
                    outcomes = [await drive(name, stack, probe, streams) for _ in repeats]
                    held.append(report_case(name, outcomes, report))
        finally:
            streams.end()
        report.note("a process keeps what it has freed: a later peak shows only what exceeds the former ones'")
        report.ratio("pairs within the rule, of all", sum(held) / len(held), 1.0)


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.limits", measure, description=__doc__)
