"""Whether full load makes processes suspect one another. No process fails, so every suspicion is false.

Real processes on the machine's own cores: two routers, a prefill and two decode instances with the transformers engine
and kaveri-tiny, under as many requests as they take, for ten minutes. Routers count the token streams that they gave up
because of silence; clients count how often they changed routers, and how often their request was placed again.
"""

import asyncio
import re
import time
import urllib.request
from collections import Counter

from benchmarks.support.harness import Options, Report, run
from kaveri import AsyncClient, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import KAVERI_TINY

CLIENTS = 48
PROMPT_TOKENS = 96
ANSWER_TOKENS = 64
ROUTERS = 2
DURATION_S = 600.0
METRICS_PORT = 19_350
"""Of the first router; the others follow."""
_SUSPICIONS = re.compile(r"^kaveri_router_suspicions_total (\S+)$", re.MULTILINE)


def suspicions() -> float:
    """By all routers, of decode instances."""
    count = 0.0
    for port in range(METRICS_PORT, METRICS_PORT + ROUTERS):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            count += sum(float(found) for found in _SUSPICIONS.findall(answer.read().decode()))
    return count


async def ask_until(client: AsyncClient, number: int, end_s: float, seen: Counter[str]) -> None:
    """Asks for one answer after another."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    while time.monotonic() < end_s:
        prompt = [1 + (31 * number + 7 * seen["answers"] + place) % 900 for place in range(PROMPT_TOKENS)]
        completion = await client.generate(prompt_token_ids=prompt, params=params, timeout_s=300)
        server = completion.timing.server
        seen["answers"] += 1
        seen["tokens"] += len(completion.token_ids)
        seen["placed again"] += server.attempts > 1
        seen["changed routers"] += server.reattaches > 0


async def measure_async(options: Options, report: Report) -> None:
    duration_s = options.choose(DURATION_S, 20.0)
    report.workload = {
        "model": KAVERI_TINY,
        "clients": CLIENTS,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "duration_s": duration_s,
    }
    config = StackConfig.of(
        model=KAVERI_TINY,
        router_count=ROUTERS,
        prefill_count=1,
        decode_count=2,
        metrics_port=METRICS_PORT,
        restart=False,
    )
    seen: Counter[str] = Counter()
    async with LocalStack(config) as stack, AsyncClient(stack.targets, timeout_s=300) as client:
        end_s = time.monotonic() + duration_s
        await asyncio.gather(*(ask_until(client, number, end_s, seen) for number in range(CLIENTS)))
        count = await asyncio.to_thread(suspicions)
    report.row("suspicions", [count], "", of="decode instances, by routers")
    report.row("answers", [seen["placed again"]], "", which="placed again")
    report.row("answers", [seen["changed routers"]], "", which="changed routers")
    report.note(f"{seen['answers']} answers, {seen['tokens'] / duration_s:.0f} tokens a second")
    disturbed = seen["placed again"] + seen["changed routers"]
    report.ratio("undisturbed, of all answers", 1 - disturbed / seen["answers"], 1.0)
    report.ratio("1 / (1 + suspicions)", 1 / (1 + count), 1.0)


def measure(options: Options, report: Report) -> None:
    """Full load without a fault."""
    asyncio.run(measure_async(options, report))


if __name__ == "__main__":
    run("serving.false_suspicion", measure, description=__doc__)
