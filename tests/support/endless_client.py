"""A client that asks for a long answer and reads it: a process of its own, for tests that kill it.

usage: python -m tests.support.endless_client TARGET...
"""

import asyncio
import subprocess
import sys
from collections.abc import Sequence

from kaveri import Client, SamplingParams
from tests.support.scripted_ports import use_inherited_tls


async def start_endless_client(targets: Sequence[str]) -> asyncio.subprocess.Process:
    """Starts it with these routers. The caller ends it."""
    command = (sys.executable, "-m", __name__, *targets)
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    use_inherited_tls()
    with Client(sys.argv[1:]) as client:
        params = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
        for chunk in client.stream(prompt_token_ids=range(1, 601), params=params):
            print(chunk.index)
