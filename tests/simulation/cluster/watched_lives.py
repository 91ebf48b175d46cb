"""Finds routers that take an answer of one life of a decode instance for that of another one.

Mostly nothing wrong comes of it: the requests of the other life are lost when the view changes. So no check of answers
finds it, while a plan that has the same attempt at both lives mixes their tokens. Knows who really sent a message from
the simulated connection. Does not verify what prefill instances, clients and holders take for whose.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from services.router.token_feeds import TokenFeeds
from tests.simulation.cluster.planting import replaced
from tests.simulation.cluster.world import World


@contextmanager
def watched_lives(world: World) -> Iterator[None]:
    """Adds to the world's violations what a router attributes wrongly meanwhile."""

    def compare(what: str, instance_id: str, incarnation: int) -> None:
        task = asyncio.current_task()
        process = world.network.answered_by.get(task)
        life = None if process is None else world.life_of(process)
        if life is None or life.serving is None:
            return
        if (life.name, life.serving.record.incarnation) != (instance_id, incarnation):
            violation = f"{world.loop.current} took {what} of {life.process} for that of another life of {instance_id}"
            if violation not in world.violations:
                world.violations.append(violation)

    def watch_tokens(original: Any) -> Any:
        def deliver(self: Any, life: Any, *args: Any) -> None:
            compare("the token stream", life.instance_id, life.incarnation)
            original(self, life, *args)

        return deliver

    def watch_attach(original: Any) -> Any:
        async def attach(self: Any, record: Any, *args: Any, **named: Any) -> Any:
            attached = await original(self, record, *args, **named)
            compare("the answer to Attach", record.instance_id, record.incarnation)
            return attached

        return attach

    with ExitStack() as stack:
        stack.enter_context(replaced(TokenFeeds, "_deliver", watch_tokens))
        stack.enter_context(replaced(TokenFeeds, "attach", watch_attach))
        yield
