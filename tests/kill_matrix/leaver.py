"""A client that sends requests and abandons streams, for the kill matrix to kill. Arguments: SEED TARGET..."""

import asyncio
import random
import sys

from kaveri import AsyncClient, SamplingParams
from kaveri.errors import KaveriError
from tests.support.scripted_ports import use_inherited_tls

_CLIENTS = 3


async def _ask(client: AsyncClient, rng: random.Random) -> None:
    while True:
        params = SamplingParams(max_tokens=rng.randint(1, 300), temperature=0, ignore_eos=True)
        leaves_behind = rng.choice((0, rng.randint(1, 60), 1000))
        prompt = [rng.randint(1, 250) for _ in range(rng.randint(1, 300))]
        count = 0
        try:
            async with client.stream(prompt_token_ids=prompt, params=params, timeout_s=60) as stream:
                async for chunk in stream:
                    count += len(chunk.token_ids)
                    if count >= leaves_behind:
                        break
        except KaveriError:
            # What its answers should be is checked by others.
            await asyncio.sleep(0.2)


async def _run(seed: str, targets: list[str]) -> None:
    async with AsyncClient(targets) as client:
        await asyncio.gather(*(_ask(client, random.Random(f"{seed} {number}")) for number in range(_CLIENTS)))


if __name__ == "__main__":
    use_inherited_tls()
    asyncio.run(_run(sys.argv[1], sys.argv[2:]))
