"""Client process of the traced request: `python -m tests.figures.client HOST:PORT`. Prints "ready", sends the request
when it reads a line, prints "answered", and exits at the end of its input."""

import asyncio
import sys

from kaveri import AsyncClient, SamplingParams

_PROMPT = "river " * 180
_TOKENS = 60


async def _read_line() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def _main(target: str) -> None:
    async with AsyncClient(target) as client:
        print("ready", flush=True)
        await _read_line()
        count = 0
        async for chunk in client.stream(_PROMPT, params=SamplingParams(max_tokens=_TOKENS, ignore_eos=True)):
            count += len(chunk.token_ids)
        assert count == _TOKENS
        print("answered", flush=True)
        await _read_line()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
