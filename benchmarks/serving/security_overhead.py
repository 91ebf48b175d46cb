"""What security costs in CPU time: an API key for each request, and TLS for each token that gRPC streams.

Keys: what the port of a gateway or a router does with one, around an empty request, the limits counted in this process.
TLS: servers of this process, with the options and certificates of a cluster, stream answers of one token per message to
clients of this process; nothing else is done with a token, so the share of TLS is the largest that there is. With and
without take turns. CPU time of the whole process is compared, of both ends.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.support.harness import Options, Report, run
from kaveri.rpc.server import RpcServer, open_channel
from kaveri.rpc.tls import RpcTls, use_tls
from kaveri.security.api_keys import KeyLimits
from kaveri.security.callers import Callers, make_callers
from kaveri.security.keys_file import add_key
from kaveri.v1 import inference_pb2, inference_pb2_grpc
from tests.support.certificates import Authority

MOST_US_PER_REQUEST = 20.0
MOST_OF_TLS = 1.15
STREAMS = 16
KEY_COUNT = 100
UNREACHED = 10**9
LIMITS = {
    "no limits": KeyLimits(),
    "requests in flight": KeyLimits(in_flight=1000),
    "all limits": KeyLimits(requests_per_s=UNREACHED, tokens_per_min=UNREACHED, in_flight=1000),
}


class SecuredAnswers(inference_pb2_grpc.InferenceServiceServicer):
    """Streams as many tokens as are asked for."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        for index in range(request.params.max_tokens):
            await context.write(inference_pb2.GenerateResponse(index=index, token_ids=(1000,), text=" token"))


async def key_us(callers: Callers, secret: str, requests: int) -> float:
    """CPU time of one request's key."""
    header = f"Bearer {secret}".encode()
    begun_s = time.process_time()
    for _ in range(requests):
        async with callers.admit(header) as caller:
            caller.tokens = 100
    return 1e6 * (time.process_time() - begun_s) / requests


async def measure_keys(options: Options, report: Report, folder: Path) -> None:
    keys_file = str(folder / "keys.toml")
    secrets = {name: add_key(keys_file, name.replace(" ", "-"), limits) for name, limits in LIMITS.items()}
    for number in range(KEY_COUNT):
        add_key(keys_file, f"other-{number}", KeyLimits())
    callers = make_callers(keys_file, "", "benchmark")
    assert callers is not None
    requests = options.choose(2000, 500)
    took_us: dict[str, list[float]] = {name: [] for name in LIMITS}
    for repeat in range(options.choose(7, 3) + 1):
        for name, secret in secrets.items():
            found = await key_us(callers, secret, requests)
            if repeat:
                took_us[name].append(found)
    for name, values in took_us.items():
        median = report.row("API key", values, "us/request", limits=name)
        report.ratio(f"asked for (20 us) / API key, {name}", MOST_US_PER_REQUEST / median, 1.0)


@contextlib.asynccontextmanager
async def serving(tls: RpcTls | None) -> AsyncIterator[Any]:
    use_tls(tls)
    server = RpcServer("127.0.0.1", 0, ())
    server.add(partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, SecuredAnswers()))
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
    await server.stop(0)
    use_tls(None)


async def token_us(stub: Any, tokens: int) -> float:
    """CPU time of one token, at both ends."""
    request = inference_pb2.GenerateRequest()
    request.params.max_tokens = tokens

    async def read() -> None:
        async for _ in stub.Generate(request):
            pass

    begun_s = time.process_time()
    await asyncio.gather(*(read() for _ in range(STREAMS)))
    return 1e6 * (time.process_time() - begun_s) / (STREAMS * tokens)


async def measure_tls(options: Options, report: Report, folder: Path) -> None:
    tls = RpcTls(Authority(folder).certify("benchmark"))
    tokens = options.choose(100, 50)
    took_us: dict[str, list[float]] = {"plain": [], "tls": []}
    async with serving(None) as plain, serving(tls) as encrypted:
        for repeat in range(options.choose(40, 3) + 1):
            pairs = [("plain", plain), ("tls", encrypted)]
            for name, stub in pairs if repeat % 2 else reversed(pairs):
                found = await token_us(stub, tokens)
                if repeat:
                    took_us[name].append(found)
    for name, values in took_us.items():
        report.row("gRPC stream", values, "us/token", by=name, streams=STREAMS)
    over = [with_tls / without for with_tls, without in zip(took_us["tls"], took_us["plain"], strict=True)]
    report.row("TLS / plain, each turn", over, "x", streams=STREAMS)
    # Of all turns together: how many messages gRPC sends at once depends on the machine's other work.
    share = sum(took_us["tls"]) / sum(took_us["plain"])
    report.ratio("TLS / plain, CPU per token", share)
    report.ratio("asked for (1.15) / TLS over plain, CPU per token", MOST_OF_TLS / share, 1.0)


async def measure_async(options: Options, report: Report) -> None:
    report.workload = {
        "keys": KEY_COUNT + len(LIMITS),
        "requests": options.choose(2000, 500),
        "streams": STREAMS,
        "tokens_per_stream": options.choose(100, 50),
        "tokens_per_message": 1,
    }
    with tempfile.TemporaryDirectory(prefix="kaveri-benchmark-") as folder:
        await measure_keys(options, report, Path(folder))
        await measure_tls(options, report, Path(folder))
    report.note(
        "Look at the spread of the turns before the ratio: a busy machine moves each of them by a factor of two."
    )
    report.note("Limits are counted in the process. With Redis each limited request waits for it, in both directions.")


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    uvloop.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.security_overhead", measure, description=__doc__)
