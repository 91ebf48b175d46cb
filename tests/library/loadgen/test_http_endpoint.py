import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kaveri.errors import ConfigError, Unavailable
from kaveri.loadgen.driver import RequestSettings, run_closed
from kaveri.loadgen.http_endpoint import HttpEndpoint, base_url
from kaveri.workload.prompts import RequestPrompt
from kaveri.workload.requests import PlannedRequest, RequestLengths

_STREAM = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_GOOD = (
    'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
    ": a comment\n\n"
    'data: {"choices": [{"text": ""}]}\n\n'
    'data: {"choices": [{"text": "bc"}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
)


@dataclass
class _Server:
    """HTTP server that answers each request with the same bytes, and records requests."""

    answer: bytes
    hangs: bool = False
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            self.heads.append(head)
            if "content-length: " in head:
                size = int(head.split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(size)))
            writer.write(self.answer)
            await writer.drain()
            if self.hangs:
                await reader.read()
        writer.close()


@contextlib.asynccontextmanager
async def _serving(answer: str, hangs: bool = False) -> AsyncIterator[_Server]:
    script = _Server(answer.encode(), hangs)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()


async def _ask(script: _Server, prompt: RequestPrompt | None = None, **settings: Any) -> Any:
    planned = PlannedRequest(0, 0.0, RequestLengths(4, 3), prompt)
    given = {"model": "tiny", "vocab_size": 1000, "seed": 1, "timeout_s": 30.0, **settings}
    async with HttpEndpoint(script.url, "sk-secret") as endpoint:
        run = await run_closed(endpoint, [planned], RequestSettings(**given), 1, lambda _: None)
    return run.records[0]


async def test_an_answer_is_recorded_with_the_servers_own_count_of_tokens() -> None:
    async with _serving(_STREAM + _GOOD + "data: [DONE]\n\n") as script:
        record = await _ask(script)
    assert (record.error, record.received_tokens, record.prompt_tokens) == (None, 3, 4)
    assert 0 <= record.sent_s <= record.first_s <= record.last_s
    assert len(record.arrivals_s) == 2
    (body,) = script.bodies
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("tiny", 3, True, True)
    assert len(body["prompt"]) == 4
    assert "authorization: bearer sk-secret" in script.heads[0]


async def test_a_conversation_goes_to_chat_completions_and_a_natural_end_is_left_to_the_model() -> None:
    answer = (
        'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\ndata: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    )
    async with _serving(_STREAM + answer + "data: [DONE]\n\n") as script:
        prompt = RequestPrompt("messages", [{"role": "user", "content": "hello"}])
        record = await _ask(script, prompt, natural_length=True)
    assert (record.error, record.received_tokens) == (None, 1)
    assert script.heads[0].startswith("post /v1/chat/completions ")
    assert script.bodies[0]["messages"] == prompt.content
    assert "ignore_eos" not in script.bodies[0]


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (
            "HTTP/1.1 429 Too Many\r\nconnection: close\r\ncontent-length: 4\r\n\r\nbusy",
            "Http429",
            "busy",
        ),
        (_STREAM + 'data: {"error": {"type": "overloaded", "message": "later"}}\n\n', "overloaded", "later"),
        (_STREAM + 'data: {"error": "later"}\n\n', "Error", "later"),
        (_STREAM + _GOOD, "Truncated", "without"),
        (_STREAM + "data: no json\n\n", "BadEvent", "no json"),
        (_STREAM + "data: [1]\n\n", "BadEvent", "[1]"),
        ("no http at all\r\n\r\n", "RemoteProtocolError", ""),
        ("", "RemoteProtocolError", ""),
        ("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n<p>hello", "SSEError", "text/html"),
    ],
)
async def test_what_goes_wrong_is_the_requests_error_and_never_the_runs(answer: str, error: str, reason: str) -> None:
    async with _serving(answer) as script:
        record = await _ask(script)
    assert record.error == error
    assert reason in record.reason


async def test_a_stream_that_stands_still_ends_at_the_requests_deadline() -> None:
    began_s = time.monotonic()
    async with _serving(_STREAM + _GOOD, hangs=True) as script:
        record = await _ask(script, timeout_s=0.3)
    assert record.error == "DeadlineExceeded"
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize(
    "answer", ["", "HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]
)
async def test_an_endpoint_that_lists_no_models_is_refused_in_one_sentence(answer: str) -> None:
    async with _serving(answer) as script, HttpEndpoint(script.url) as endpoint:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
            await endpoint.models()


def test_a_url_is_taken_with_and_without_its_version() -> None:
    for text in ("http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/v1/"):
        assert base_url(text) == "http://host:8000/v1"
    assert base_url("https://host/openai") == "https://host/openai/v1"
    for text in ("host:8000", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="--http"):
            base_url(text)
