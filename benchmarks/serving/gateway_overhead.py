"""What a gateway adds: CPU per streamed token beside the router's in the same run, and time to tokens beside the SDK's.

Real processes: a gateway, a router, a prefill and a decode instance with the fake engine, which draws a token for each
request every 10 ms. All requests of a round start together, once over HTTP, once over the SDK, and once over HTTP at a
gateway of another cluster that reads tokens at its decode instance (--direct). The clients run in this process, and all
share the machine, so CPU time is compared, and only within one run.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

import psutil
import uvloop

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

STEP_S = 0.010
PROMPT = tuple(range(300, 332))
STREAMS = (1, 16, 48, 256)
MOST_CPU_OF_ROUTER = 0.9
TOKENS_PER_CORE = 12_000


@dataclass
class GatewayRound:
    """Times of one round's streams, and the CPU of both processes while it lasted."""

    first_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, begun_s: float, at_s: list[float], tokens: int) -> None:
        """One stream: when its pieces came, and how many tokens they had."""
        self.first_s.append(at_s[0] - begun_s)
        self.tpot_s.append((at_s[-1] - at_s[0]) / (tokens - 1))
        self.tokens += tokens


async def over_http(address: str, tokens: int, found: GatewayRound) -> None:
    """One stream, read as plain bytes: the client costs as little as it can."""
    host, _, port = address.rpartition(":")
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    begun_s, at_s = time.monotonic(), []
    writer.write(head.encode() + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            at_s += [time.monotonic()]
    writer.close()
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


async def one_round(
    stack: LocalStack, client: AsyncClient, streams: int, tokens: int, *, is_http: bool
) -> GatewayRound:
    found = GatewayRound()
    processes = {name: psutil.Process(stack.process(name).pid) for name in ("gateway-0", "router-0")}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            work = over_http(stack.http_targets[0], tokens, found) if is_http else over_sdk(client, tokens, found)
            group.create_task(work)
    found.cpu_s = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    return found


async def measure_async(options: Options, report: Report) -> None:
    repeats, tokens = options.choose(5, 2), options.choose(256, 64)
    report.workload = {
        "engine": "fake",
        "step_s": STEP_S,
        "streams": STREAMS,
        "prompt_tokens": len(PROMPT),
        "tokens_per_stream": tokens,
    }
    common = {"engine": "fake", "gateway_count": 1, "prefill_count": 1, "decode_count": 1, "restart": False}
    flags = ("--fake-step-s", str(STEP_S), "--max-batch", str(max(STREAMS)))
    relaying = StackConfig.of(**common, decode_flags=flags)
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
        for is_http in (True, False):
            await one_round(stack, client, 8, 16, is_http=is_http)
        await one_round(direct_stack, client, 8, 16, is_http=True)
        for streams in STREAMS:
            http: list[GatewayRound] = []
            sdk: list[GatewayRound] = []
            direct: list[GatewayRound] = []
            for _ in range(repeats):
                http.append(await one_round(stack, client, streams, tokens, is_http=True))
                sdk.append(await one_round(stack, client, streams, tokens, is_http=False))
                direct.append(await one_round(direct_stack, client, streams, tokens, is_http=True))
            _report(report, streams, http, sdk)
            _report_direct(report, streams, sdk, direct)


def _report_direct(report: Report, streams: int, sdk: list[GatewayRound], direct: list[GatewayRound]) -> None:
    alone = report.row(
        "router CPU, SDK", [1e6 * each.cpu_s["router-0"] / each.tokens for each in sdk], "us/token", streams=streams
    )
    for name in ("gateway-0", "router-0"):
        spent = [1e6 * each.cpu_s[name] / each.tokens for each in direct]
        report.row(f"{name.partition('-')[0]} CPU, direct", spent, "us/token", streams=streams)
    both = report.row(
        "gateway and router CPU, direct",
        [1e6 * sum(each.cpu_s.values()) / each.tokens for each in direct],
        "us/token",
        streams=streams,
    )
    tpot_ms = [1e3 * statistics.median(each.tpot_s) for each in direct]
    report.row("TPOT p50", tpot_ms, "ms", by="HTTP, direct", streams=streams)
    report.ratio(f"router's CPU alone / gateway's and router's, direct, {streams} streams", alone / both, 1.0)


def _report(report: Report, streams: int, http: list[GatewayRound], sdk: list[GatewayRound]) -> None:
    gateway = report.row(
        "gateway CPU", [1e6 * each.cpu_s["gateway-0"] / each.tokens for each in http], "us/token", streams=streams
    )
    router = report.row(
        "router CPU", [1e6 * each.cpu_s["router-0"] / each.tokens for each in http], "us/token", streams=streams
    )
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
    report.row("TPOT p50 over the SDK's", slower, "x", streams=streams)
    report.ratio(f"0.9 of the router's CPU / gateway's, {streams} streams", MOST_CPU_OF_ROUTER * router / gateway, 1.0)
    report.ratio(f"tokens/s per core / 12000, {streams} streams", 1e6 / gateway / TOKENS_PER_CORE, 1.0)


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.gateway_overhead", measure, description=__doc__)
