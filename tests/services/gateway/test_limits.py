"""What a request costs is bounded where two limits meet: a long prompt and n, a large body and its values."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kaveri.domain.sampling import MAX_COPIED_CHARACTERS, MAX_COPIED_TOKENS
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from kaveri.text.tokenizer import ModelTokenizer
from services.gateway import body
from services.gateway.body import MAX_FRACTIONS, MAX_NESTED, MAX_VALUES, parse_object
from services.gateway.http_errors import HttpError
from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.gateway.test_api_keys import _NO_REDIS, _bearer
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "one two three"}),
        ("/v1/completions", {"prompt": ["one two three", "four"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two three"}]}),
    ],
)
async def test_a_prompt_with_several_answers_is_tokenized_once(
    gateway: GatewayUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    stream: bool,
) -> None:
    tokenized: list[str] = []
    for name in ("encode", "encode_chat"):
        original = getattr(ModelTokenizer, name)

        async def counted(self: ModelTokenizer, *args: Any, original: Callable[..., Any] = original) -> Any:
            tokenized.append(original.__name__)
            return await original(self, *args)

        monkeypatch.setattr(ModelTokenizer, name, counted)
    fields = {**asked, "max_tokens": 3, "temperature": 0}
    single = await gateway.ask(path, fields)
    assert single.status == 200
    prompts = len(tokenized)
    tokenized.clear()
    several = await gateway.ask(path, {**fields, "n": 5, "stream": stream})
    assert several.status == 200
    assert len(tokenized) == prompts
    if not stream:
        # Greedy: all answers to a prompt are the same.
        assert several.json["usage"]["prompt_tokens"] == single.json["usage"]["prompt_tokens"]
        assert len(several.json["choices"]) == 5 * prompts


async def test_n_is_refused_where_the_prompt_would_be_copied_too_often(gateway: GatewayUnderTest) -> None:
    tokens = MAX_COPIED_TOKENS // 128 + 1
    got = await gateway.complete(prompt=[300] * tokens, n=128)
    assert (got.status, got.error["param"]) == (400, "n")
    assert f"{tokens} tokens" in got.error["message"]
    characters = MAX_COPIED_CHARACTERS // 128 + 1
    for asked in (
        await gateway.complete(prompt="x" * characters, n=128),
        await gateway.chat(messages=[{"role": "user", "content": "x" * characters}], n=128),
    ):
        assert (asked.status, asked.error["param"]) == (400, "n")
        assert f"{characters} characters" in asked.error["message"]


async def test_a_prompt_alone_is_as_long_as_the_model_allows(gateway: GatewayUnderTest) -> None:
    """Not as short as the limit on copies."""
    got = await gateway.complete(prompt=[300] * (MAX_COPIED_TOKENS // 2 - 10))
    assert got.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([1] * (MAX_VALUES + 2), "values"),
        ([[]] * (MAX_NESTED + 1), "objects, lists"),
        ({str(number): 1 for number in range(MAX_NESTED)}, "objects, lists"),
        ([0.5] * (MAX_FRACTIONS + 1), "fraction"),
    ],
)
def test_json_of_too_many_values_is_refused_before_it_is_made(value: Any, what: str) -> None:
    with pytest.raises(HttpError) as refused:
        parse_object(json.dumps({"prompt": value}).encode())
    assert refused.value.status == 400
    assert what in refused.value.message


@pytest.mark.parametrize("text", ["," * (MAX_VALUES + 10), "[{:" * MAX_NESTED, '\\",:"[{' * MAX_NESTED])
def test_what_stands_in_a_text_is_no_value(text: str) -> None:
    assert parse_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


async def test_a_large_body_is_read_on_a_thread(gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def parsed(data: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return parse_object(data)

    monkeypatch.setattr(body, "parse_object", parsed)
    for size in (10, 1_000_000):
        asked = await gateway.complete(user="x" * size)
        assert asked.status == 200
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("body")


async def test_a_key_that_holds_a_quarter_of_all_gets_503_and_the_others_go_on(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    keys_file = str(tmp_path / "keys.toml")
    greedy, other = (add_key(keys_file, name, KeyLimits()) for name in ("greedy", "other"))
    cluster.decodes["decode-0"].may_step.clear()
    async with run_gateway(cluster, keys_file=keys_file, redis_url=_NO_REDIS, max_bodies_bytes=16_384) as gateway:
        asked = {"prompt": "x " * 1_200, "max_tokens": 4}
        first = asyncio.create_task(gateway.ask("/v1/completions", asked, headers=_bearer(greedy)))
        await eventually(lambda: bool(gateway.gateway.answering))
        second = await gateway.ask("/v1/completions", asked, headers=_bearer(greedy))
        assert second.status == 503
        assert "API key greedy" in second.error["message"]
        assert int(second.headers["retry-after"]) >= 1
        others = asyncio.create_task(gateway.ask("/v1/completions", asked, headers=_bearer(other)))
        await eventually(lambda: len(gateway.gateway.answering) == 2)
        cluster.let_all_go()
        assert [(await each).status for each in (first, others)] == [200, 200]
