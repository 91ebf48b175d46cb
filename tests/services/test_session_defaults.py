"""Routers with other sampling defaults: an answer that goes on through another one is drawn as it began."""

import json
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import ResolvedParams, SamplingParams
from services.prefill.role import PrefillRole
from tests.services.conftest import eventually
from tests.services.prompts import prompt
from tests.services.session_client import GRACE_S, SessionClient, SessionRouters, computed

FIRST = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "max_new_tokens": 60}
SECOND = {"temperature": 1.25, "top_p": 0.5, "max_new_tokens": 6}


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[ResolvedParams]:
    """The parameters of every placement at prefill."""
    accept: Callable[..., Any] = PrefillRole.accept
    seen: list[ResolvedParams] = []

    @wraps(accept)
    def noted(*args: Any, params: ResolvedParams, **more: Any) -> Any:
        seen.append(params)
        return accept(*args, params=params, **more)

    monkeypatch.setattr(PrefillRole, "accept", noted)
    return seen


async def start(cluster: Any, **prefill: Any) -> None:
    """One prefill and two decode instances."""
    await cluster.prefill(orphan_grace_s=GRACE_S, chunk_tokens=16, **prefill)
    for number in range(2):
        await cluster.decode(f"decode-{number}", orphan_grace_s=GRACE_S, fake_step_s=0.01)


async def start_router(
    routers: SessionRouters, name: str, folder: Path, values: dict[str, float], port: int = 0
) -> None:
    """One with values of its own."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(values))
    await routers.start(name, generation_config=str(path), port=port)


async def lose(instance: Any) -> None:
    instance.host.break_off("it is killed")
    await eventually(instance.serving.done, "it is gone")


def owner_of(cluster: Any) -> Any:
    """The decode instance of the only request."""
    (owner,) = [instance for instance in cluster.instances[1:] if instance.held_blocks]
    return owner


def drawn(params: ResolvedParams) -> dict[str, Any]:
    return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}


async def test_a_client_takes_the_values_along_when_nothing_is_left_of_its_request(
    cluster: Any, routers: SessionRouters, placed: list[ResolvedParams], tmp_path: Path
) -> None:
    await start(cluster)
    await start_router(routers, "router-0", tmp_path, FIRST)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    async with AsyncClient([routers.address("router-0"), f"127.0.0.1:{port}"]) as client:
        stream = client.stream(prompt_token_ids=prompt(1), params=SamplingParams(top_k=7), timeout_s=60)
        async with stream:
            token_ids: list[int] = []
            while len(token_ids) < 20:
                token_ids += (await anext(stream)).token_ids
            await routers.cut("router-0")
            for instance in (owner_of(cluster), cluster.instances[0]):
                await lose(instance)
            await cluster.prefill("prefill-1")
            await start_router(routers, "router-1", tmp_path, SECOND, port)
            async for chunk in stream:
                token_ids += chunk.token_ids
    assert len(token_ids) == 60, "as long as the first router has said"
    assert len(placed) == 2
    assert drawn(placed[0]) == drawn(placed[1]) == {"temperature": 0.5, "top_p": 0.75, "top_k": 7}
    assert placed[0].seed == placed[1].seed


async def test_a_client_that_has_heard_nothing_gets_what_the_instances_have(
    cluster: Any, routers: SessionRouters, placed: list[ResolvedParams], tmp_path: Path
) -> None:
    await start(cluster, fake_step_s=0.05)
    await start_router(routers, "router-0", tmp_path, FIRST)
    await start_router(routers, "router-1", tmp_path, SECOND)
    client = SessionClient(prompt(2, 200), {})
    call = routers.generate("router-0", client.message())
    await eventually(lambda: computed(cluster) > 0, "the prompt is computed")
    await routers.cut("router-0")
    call.cancel()
    client.session = 1
    call = routers.generate("router-1", client.message())
    await client.read(call, 20)
    await lose(owner_of(cluster))
    await client.finish(call)
    assert len(client.token_ids) == 60
    assert len(placed) == 2
    assert drawn(placed[0]) == drawn(placed[1]) == {"temperature": 0.5, "top_p": 0.75, "top_k": 20}
