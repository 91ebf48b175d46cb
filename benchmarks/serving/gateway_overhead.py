"""What a gateway adds: CPU per streamed token beside the router's in the same run, and time to tokens beside the SDK's.

Real processes: a gateway, a router, a prefill and a decode instance with the fake engine, which draws a token for each
request every 10 ms. All requests of a round start together, once over HTTP, once over the SDK, and once over HTTP at a
gateway of another cluster that reads tokens at its decode instance (--direct). The clients run in this process, and all
share the machine, so CPU time is compared, and only within one run.

Beside them in the same rounds, HTTP servers of other projects, where `--program NAME=PATH` says where they are: `smg`
over the same router by vLLM's gRPC, `vllm-router` over the same gateway, and `vllm`, a Python whose vLLM serves the
same model with its own engine. Tried with smg 1.13.0, vllm-router 0.1.17 and vLLM 0.32, each in an environment of its
own.
"""

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from benchmarks.support import front_doors
from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import KAVERI_TINY, resolve_model

STEP_S = 0.010
PROMPT = tuple(range(300, 332))
TEXT = "Count from 1 to 9. Spell turtle and umbrella. Count on from 9 to 12."
"""For servers that do not take token ids."""
STREAMS = (1, 16, 48, 256)
MOST_CPU_OF_ROUTER = 0.9
TOKENS_PER_CORE = 12_000
MOST_TTFT_ADDED_MS = 2.0
MOST_TPOT = 1.05
PROGRAMS = {"smg": "smg", "vllm-router": "vllm-router", "vllm": "vllm serve"}
WHY_MORE = (
    "Why the gateway costs more than other projects' servers: smg and vllm-router are Rust, and vllm-router passes "
    "bytes on. vLLM's server is Python, and gets the tokens of all answers of a step in one message of its engine, as "
    "the gateway does on the direct path; from routers the gateway gets a gRPC message for each answer. smg and vLLM's "
    "server make text of token ids, which Kaveri's routers or decode instances do for the gateway."
)
_COUNTED = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True)
class FrontDoor:
    """An HTTP server, and the processes whose CPU counts: its own first."""

    address: str
    processes: Mapping[str, int]
    prompt: tuple[int, ...] | str = PROMPT


@dataclass
class GatewayRound:
    """Times of one round's streams, and the CPU of the processes while it lasted."""

    first_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, begun_s: float, at_s: list[float], tokens: int) -> None:
        """One stream: when its pieces came, and how many tokens they had."""
        self.first_s.append(at_s[0] - begun_s)
        self.tpot_s.append((at_s[-1] - at_s[0]) / (tokens - 1))
        self.tokens += tokens

    def spent_us(self, *names: str) -> float:
        """CPU of these processes together, for each token."""
        return 1e6 * sum(self.cpu_s[name] for name in names or self.cpu_s) / self.tokens


async def over_http(door: FrontDoor, tokens: int, found: GatewayRound) -> None:
    """One stream, read as plain bytes: the client costs as little as it can."""
    host, _, port = door.address.rpartition(":")
    body = {"prompt": door.prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"model": KAVERI_TINY, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    begun_s, at_s, counted = time.monotonic(), [], None
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"choices":[]' in line:
                counted = _COUNTED.search(line)
            else:
                at_s += [time.monotonic()]
    writer.close()
    if counted is None or int(counted[1]) != tokens:
        raise RuntimeError(f"{door.address} did not send {tokens} tokens")
    found.add(begun_s, at_s, tokens)


async def over_sdk(client: AsyncClient, tokens: int, found: GatewayRound) -> None:
    """One stream of the SDK."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    begun_s, at_s = time.monotonic(), []
    async with client.stream(prompt_token_ids=PROMPT, params=params) as stream:
        async for chunk in stream:
            if chunk.token_ids:
                at_s += [time.monotonic()]
    found.add(begun_s, at_s, tokens)


async def one_round(door: FrontDoor, streams: int, tokens: int, client: AsyncClient | None = None) -> GatewayRound:
    """client: asks in place of the door; the same processes count."""
    found = GatewayRound()
    processes = {name: psutil.Process(pid) for name, pid in door.processes.items()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(over_sdk(client, tokens, found) if client else over_http(door, tokens, found))
    found.cpu_s = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    return found


async def first_tokens_ms(door: FrontDoor, count: int, client: AsyncClient | None = None) -> float:
    """TTFT p50 of requests one after the other."""
    found = GatewayRound()
    for _ in range(count):
        await (over_sdk(client, 4, found) if client else over_http(door, 4, found))
    return 1e3 * statistics.median(found.first_s)


def _gateway_of(stack: LocalStack) -> FrontDoor:
    return FrontDoor(stack.http_targets[0], {name: stack.process(f"{name}-0").pid for name in ("gateway", "router")})


@contextlib.contextmanager
def other_doors(options: Options, report: Report, stack: LocalStack) -> Iterator[dict[str, FrontDoor]]:
    """Those of other projects that are there, before the router and the gateway of this stack."""
    ours, found = _gateway_of(stack), {}
    with contextlib.ExitStack() as running:
        for name, shown in PROGRAMS.items():
            path = options.programs.get(name)
            if path is None:
                report.note(f"{shown}: left out, as no --program {name}=PATH said where it is")
                continue
            behind: dict[str, int] = {}
            if name == "smg":
                command, address = front_doors.smg(path, stack.target)
                behind = {"router": ours.processes["router"]}
            elif name == "vllm-router":
                command, address = front_doors.vllm_router(path, ours.address)
                behind = dict(ours.processes)
            else:
                command, address = front_doors.vllm_serve(path, Path(resolve_model(KAVERI_TINY)), max(STREAMS))
            pid = running.enter_context(front_doors.running(command, address))
            found[shown] = FrontDoor(address, {shown: pid, **behind}, TEXT)
        yield found


async def measure_async(options: Options, report: Report) -> None:
    # Fewer with other projects' servers: a run is to end within ten minutes.
    full = (3, 192) if options.programs else (5, 256)
    repeats, tokens = options.choose(full, (2, 64))
    report.workload = {
        "engine": "fake",
        "step_s": STEP_S,
        "streams": STREAMS,
        "prompt_tokens": len(PROMPT),
        "tokens_per_stream": tokens,
    }
    common = {"engine": "fake", "gateway_count": 1, "prefill_count": 1, "decode_count": 1, "restart": False}
    flags = ("--fake-step-s", str(STEP_S), "--max-batch", str(max(STREAMS)))
    relaying = StackConfig.of(
        **common,
        decode_flags=(*flags, "--direct-answers", "off"),
        gateway_flags=("--direct", "off"),
        router_flags=("--vllm-grpc",) if "smg" in options.programs else (),
        start_timeout_s=300.0,
    )
    reading = StackConfig.of(
        **common,
        decode_flags=(*flags, "--direct-answers", "on"),
        gateway_flags=("--direct", "on"),
        start_timeout_s=300.0,
    )
    async with (
        LocalStack(relaying) as stack,
        AsyncClient(stack.target, timeout_s=300) as client,
        LocalStack(reading) as direct_stack,
    ):
        gateway, direct = _gateway_of(stack), _gateway_of(direct_stack)
        # Servers start in a thread: this loop keeps the client's connections alive.
        with contextlib.ExitStack() as ends:
            others = await asyncio.to_thread(ends.enter_context, other_doors(options, report, stack))
            for door in (gateway, direct, *others.values()):
                await one_round(door, 8, 16)
            await one_round(gateway, 8, 16, client)
            await _measure_first_tokens(options, report, gateway, direct, client)
            for streams in STREAMS:
                rounds: dict[str, list[GatewayRound]] = {name: [] for name in ("HTTP", "SDK", "direct", *others)}
                for _ in range(repeats):
                    rounds["HTTP"].append(await one_round(gateway, streams, tokens))
                    rounds["SDK"].append(await one_round(gateway, streams, tokens, client))
                    rounds["direct"].append(await one_round(direct, streams, tokens))
                    for name, door in others.items():
                        rounds[name].append(await one_round(door, streams, tokens))
                ours = {"gateway's": _report(report, streams, rounds["HTTP"], rounds["SDK"])}
                ours["gateway's, direct"] = _report_direct(report, streams, rounds["SDK"], rounds["direct"])
                for name in others:
                    _report_other(report, streams, name, rounds[name], ours)
            if others:
                report.note(WHY_MORE)


async def _measure_first_tokens(
    options: Options, report: Report, gateway: FrontDoor, direct: FrontDoor, client: AsyncClient
) -> None:
    count = options.choose(30, 10)
    found: dict[str, list[float]] = {"SDK": [], "HTTP": [], "HTTP, direct": []}
    for _ in range(options.choose(3, 2)):
        found["SDK"].append(await first_tokens_ms(gateway, count, client))
        found["HTTP"].append(await first_tokens_ms(gateway, count))
        found["HTTP, direct"].append(await first_tokens_ms(direct, count))
    median_ms = {
        name: report.row("TTFT p50, one request after the other", values, "ms", by=name)
        for name, values in found.items()
    }
    for name in ("HTTP", "HTTP, direct"):
        most_ms = median_ms["SDK"] + MOST_TTFT_ADDED_MS
        report.ratio(f"2 ms and the SDK's TTFT p50 / {name}'s, one after the other", most_ms / median_ms[name], 1.0)


def _report_other(
    report: Report, streams: int, name: str, rounds: list[GatewayRound], ours_us: Mapping[str, float]
) -> None:
    own = report.row(
        "CPU of another project's server",
        [each.spent_us(name) for each in rounds],
        "us/token",
        by=name,
        streams=streams,
    )
    behind = [each for each in rounds[0].cpu_s if each != name]
    if behind:
        spent = [each.spent_us() for each in rounds]
        report.row(f"its CPU with that of {' and '.join(behind)}", spent, "us/token", by=name, streams=streams)
    for what, values in (("TTFT p50", "first_s"), ("TPOT p50", "tpot_s")):
        times = [1e3 * statistics.median(getattr(each, values)) for each in rounds]
        report.row(what, times, "ms", by=name, streams=streams)
    for shown, spent_us in ours_us.items():
        report.ratio(f"{name}'s CPU / {shown}, {streams} streams", own / spent_us)


def _report_direct(report: Report, streams: int, sdk: list[GatewayRound], direct: list[GatewayRound]) -> float:
    """Returns the gateway's CPU, in us for each token."""
    alone = report.row("router CPU, SDK", [each.spent_us("router") for each in sdk], "us/token", streams=streams)
    gateway, _ = (
        report.row(f"{name} CPU, direct", [each.spent_us(name) for each in direct], "us/token", streams=streams)
        for name in ("gateway", "router")
    )
    both = report.row(
        "gateway and router CPU, direct", [each.spent_us() for each in direct], "us/token", streams=streams
    )
    tpot_ms = [1e3 * statistics.median(each.tpot_s) for each in direct]
    report.row("TPOT p50", tpot_ms, "ms", by="HTTP, direct", streams=streams)
    report.ratio(f"router's CPU alone / gateway's and router's, direct, {streams} streams", alone / both, 1.0)
    return gateway


def _report(report: Report, streams: int, http: list[GatewayRound], sdk: list[GatewayRound]) -> float:
    """Returns the gateway's CPU, in us for each token."""
    gateway = report.row("gateway CPU", [each.spent_us("gateway") for each in http], "us/token", streams=streams)
    router = report.row("router CPU", [each.spent_us("router") for each in http], "us/token", streams=streams)
    for name, rounds in (("HTTP", http), ("SDK", sdk)):
        report.row(
            "TTFT p50", [1e3 * statistics.median(each.first_s) for each in rounds], "ms", by=name, streams=streams
        )
        report.row(
            "TPOT p50", [1e3 * statistics.median(each.tpot_s) for each in rounds], "ms", by=name, streams=streams
        )
    pairs = list(zip(http, sdk, strict=True))
    added_ms = [1e3 * (statistics.median(a.first_s) - statistics.median(b.first_s)) for a, b in pairs]
    report.row("TTFT p50 added over the SDK", added_ms, "ms", streams=streams)
    slower = [statistics.median(a.tpot_s) / statistics.median(b.tpot_s) for a, b in pairs]
    slower_median = report.row("TPOT p50 over the SDK's", slower, "x", streams=streams)
    report.ratio(f"1.05 / TPOT p50 over the SDK's, {streams} streams", MOST_TPOT / slower_median, 1.0)
    report.ratio(f"0.9 of the router's CPU / gateway's, {streams} streams", MOST_CPU_OF_ROUTER * router / gateway, 1.0)
    report.ratio(f"tokens/s per core / 12000, {streams} streams", 1e6 / gateway / TOKENS_PER_CORE, 1.0)
    return gateway


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.gateway_overhead", measure, description=__doc__)
