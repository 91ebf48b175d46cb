import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.router.cluster_script import ScriptedCluster

VALUES = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
BODIES = {"/v1/completions": {"prompt": [300, 301, 302]}, "/v1/chat/completions": CHAT}


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "generation_config.json").write_text(json.dumps(VALUES))
    return str(tmp_path)


def sent(cluster: ScriptedCluster) -> list[dict[str, Any]]:
    return [
        {name: round(getattr(request.params, name), 6) for name in NEUTRAL if request.params.HasField(name)}
        for request in cluster.taken()
    ]


@pytest.mark.parametrize("door", BODIES)
async def test_what_a_body_leaves_out_is_the_models_and_what_it_says_wins(
    cluster: ScriptedCluster, path: str, door: str
) -> None:
    async with run_gateway(cluster, generation_config=path) as gateway:
        for given, expected in (
            ({}, VALUES),
            (dict.fromkeys(VALUES), VALUES),
            ({"n": 3, "seed": 5}, VALUES),
            ({"stream": True}, VALUES),
            ({"temperature": 1.0, "top_p": 1, "top_k": -1}, NEUTRAL),
            ({"temperature": 0}, VALUES | {"temperature": 0.0}),
            ({"top_k": 0}, VALUES | {"top_k": 0}),
            ({"top_p": 0.5, "n": 2}, VALUES | {"top_p": 0.5}),
        ):
            before = len(sent(cluster))
            answer = await gateway.ask(door, BODIES[door] | {"max_tokens": 3} | given)
            assert answer.status == 200, answer.body
            assert sent(cluster)[before:] == [expected] * (given.get("n") or 1)
        listed = (await gateway.ask("/v1/models")).json["data"]
        one = (await gateway.ask("/v1/models/kaveri-tiny")).json
    assert [model["default_sampling_params"] for model in (*listed, one)] == [VALUES, VALUES]


async def test_the_length_of_a_chat_is_the_models_and_that_of_a_completion_openais(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"max_new_tokens": 19}))
    async with run_gateway(cluster, generation_config=str(path)) as gateway:
        lengths = [(await gateway.ask(door, body)).json["usage"]["completion_tokens"] for door, body in BODIES.items()]
        shown = (await gateway.ask("/v1/models")).json["data"]
    assert lengths == [16, 19]
    assert [model["default_sampling_params"] for model in shown] == [{"max_tokens": 19}]


async def test_a_model_without_values_is_shown_with_none_and_draws_as_ever(
    cluster: ScriptedCluster, gateway: GatewayUnderTest
) -> None:
    assert (await gateway.ask("/v1/models/kaveri-tiny")).json["default_sampling_params"] == {}
    await gateway.ask("/v1/completions", BODIES["/v1/completions"])
    assert sent(cluster) == [NEUTRAL]
