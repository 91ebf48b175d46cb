"""How long one client's huge requests delay another client's stream: the longest gap between its tokens.

A real router with instances on the fake engine. One client reads a steady stream; another process sends requests of
nearly gRPC's 4 MiB without pause, which are refused or take long to check. Rounds with and without them alternate.
"""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Callable

import grpc

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.single_requests import ask
from kaveri import AsyncClient
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.v1 import inference_pb2
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub

STEP_S = 0.02
TARGET_EXTRA_S = 0.1
_BYTES = 3_900_000
_TIMEOUT_S = 60.0


def _messages(count: int, role: str, content: str) -> inference_pb2.GenerateRequest:
    turns = [inference_pb2.Message(role=role, content=content) for _ in range(count)]
    return inference_pb2.GenerateRequest(messages=inference_pb2.Messages(messages=turns))


CASES: dict[str, Callable[[], inference_pb2.GenerateRequest]] = {
    "a text of 3.9 MB": lambda: inference_pb2.GenerateRequest(text="words " * (_BYTES // 6)),
    "700,000 empty messages": lambda: _messages(700_000, "", ""),
    "a thousand long roles": lambda: _messages(1_000, "a" * (_BYTES // 1_010), ""),
    "a thousand long contents": lambda: _messages(1_000, "user", "word " * (_BYTES // 5_050)),
    "1.9 million token ids": lambda: inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[300] * (_BYTES // 2))
    ),
}


def flood(target: str, case: str, refused: "multiprocessing.sharedctypes.Synchronized[int]") -> None:
    """Sends one request after another until it is killed."""
    request = CASES[case]()
    with grpc.insecure_channel(target) as channel:
        stub = InferenceServiceStub(channel)
        while True:
            try:
                for _ in stub.Generate(request, timeout=_TIMEOUT_S):
                    pass
            except grpc.RpcError:
                refused.value += 1


async def longest_gap_s(client: AsyncClient, answer_tokens: int, seed: int) -> float:
    """Of one answer, from its second token on."""
    answer = await ask(client, 32, answer_tokens, 900, seed)
    times_s = answer.token_times_s[1:]
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


async def measure_async(options: Options, report: Report) -> None:
    repeats, answer_tokens = options.choose(5, 2), options.choose(200, 100)
    report.workload = {
        "engine": f"fake, {STEP_S} s a step",
        "answer_tokens": answer_tokens,
        "request_bytes": _BYTES,
        "repeats": repeats,
        "warm_up": "one answer",
    }
    step = ("--fake-step-s", str(STEP_S))
    config = StackConfig.of(engine="fake", prefill_count=1, decode_count=1, prefill_flags=step, decode_flags=step)
    context = multiprocessing.get_context("spawn")
    async with LocalStack(config) as stack, AsyncClient(stack.target) as client:
        await ask(client, 32, answer_tokens, 900, 0)
        for case in CASES:
            alone_s, beside_s = [], []
            refused = context.Value("q", 0)
            for repeat in range(repeats):
                alone_s.append(await longest_gap_s(client, answer_tokens, repeat))
                sender = context.Process(target=flood, args=(stack.target, case, refused), daemon=True)
                before = refused.value
                sender.start()
                try:
                    until_s = time.monotonic() + _TIMEOUT_S
                    while refused.value == before:
                        assert time.monotonic() < until_s, f"{case}: not one was refused"
                        await asyncio.sleep(0.05)
                    beside_s.append(await longest_gap_s(client, answer_tokens, repeat))
                finally:
                    sender.kill()
                    sender.join()
            report.row("longest gap, alone", [1e3 * value for value in alone_s], "ms", case=case)
            report.row("longest gap, beside", [1e3 * value for value in beside_s], "ms", case=case)
            extra_s = [beside - alone for beside, alone in zip(beside_s, alone_s, strict=True)]
            report.ratio(f"asked for (100 ms) / extra gap, {case}", TARGET_EXTRA_S / max(0.001, *extra_s), target=1.0)
            report.row("extra gap", [1e3 * value for value in extra_s], "ms", case=case)
    report.note(f"the ratio is that of the worst of {repeats} turns; the sender's process shares the machine's cores")


def measure(options: Options, report: Report) -> None:
    """See the module's docstring."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.huge_input", measure, description=__doc__)
