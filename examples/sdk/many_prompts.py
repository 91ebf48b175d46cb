"""Answers a file of prompts, one a line, 16 at a time. The answers come in the file's order.

python examples/sdk/many_prompts.py [ROUTER,ROUTER] < prompts.txt
"""

import asyncio
import sys

from kaveri import AsyncClient, Completion, NoCapacity, SamplingParams

AT_A_TIME = 16
PARAMS = SamplingParams(temperature=0, max_tokens=32)


async def answer(client: AsyncClient, prompt: str, turns: asyncio.Semaphore) -> Completion:
    """The answer to one prompt. When the cluster is full it says how long to wait."""
    async with turns:
        for _ in range(20):
            try:
                return await client.generate(prompt, params=PARAMS, timeout_s=120)
            except NoCapacity as full:
                await asyncio.sleep(full.retry_after_s)
        raise SystemExit("the cluster stayed full")


async def main() -> None:
    """Asks for all, and prints each answer when its turn has come."""
    targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
    turns = asyncio.Semaphore(AT_A_TIME)
    async with AsyncClient(targets) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(client, line.strip(), turns)) for line in sys.stdin]
        for task in tasks:
            done = await task
            print(f"{done.usage.completion_tokens} tokens: {done.text!r}")


asyncio.run(main())
