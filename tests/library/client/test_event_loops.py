"""An AsyncClient outside the event loop that it belongs to says what to do."""

import asyncio

import pytest

from kaveri import AsyncClient, Unavailable


def test_a_client_used_by_a_second_asyncio_run_is_refused_with_advice() -> None:
    client = AsyncClient("127.0.0.1:1", timeout_s=5)

    async def ask() -> None:
        with pytest.raises(Unavailable):
            await client.list_models()

    asyncio.run(ask())
    with pytest.raises(RuntimeError, match=r"each asyncio\.run\(\) makes another one: make a client per loop"):
        asyncio.run(client.list_models())
    asyncio.run(client.close())


def test_a_client_used_outside_any_event_loop_is_refused_with_advice() -> None:
    with pytest.raises(RuntimeError, match=r"needs a running event loop; kaveri\.Client works without one"):
        AsyncClient("127.0.0.1:1").stream("hello")
