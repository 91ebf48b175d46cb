import asyncio
import gzip
import json

import pytest

from tests.services.gateway.conftest import (
    WITHIN_S,
    GatewayUnderTest,
    HttpAnswer,
    read_answer,
    read_head,
    request_bytes,
)
from tests.services.gateway.recorded_requests import OFFERS, PLAIN
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually

_BODY = b'{"prompt": [300, 301, 302], "max_tokens": 20, "temperature": 0}'
_STREAM = _BODY.replace(b"}", b', "stream": true}')
_COMMENT = b":\n\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def in_pieces(request: bytes, way: str) -> list[bytes]:
    head_bytes = request.index(b"\r\n\r\n") + 4
    if way == "one packet":
        return [request]
    if way == "body behind":
        return [request[:head_bytes], request[head_bytes:]]
    return [request[number : number + 1] for number in range(len(request))]


def texts(answer: HttpAnswer) -> list[str]:
    if b"data: " in answer.body:
        return ["".join(event["choices"][0]["text"] for event in answer.events)]
    return [choice["text"] for choice in answer.json["choices"]]


@pytest.mark.parametrize("way", ["one packet", "body behind", "byte by byte"])
async def test_a_clients_bytes_get_an_answer_whatever_protocol_they_offer(gateway: GatewayUnderTest, way: str) -> None:
    expected = texts(await gateway.complete())
    for client, request_sent in {**OFFERS, **PLAIN}.items():
        reader, writer = await gateway.connect()
        # Twice: the connection stays usable, unless the client speaks HTTP/1.0.
        for _ in range(1 if "1.0" in client else 2):
            for piece in in_pieces(request_sent, way):
                writer.write(piece)
                await asyncio.sleep(0)
            if "Expect" in client:
                assert (await read_head(reader))[0] == 100
            answer = await asyncio.wait_for(read_answer(reader), WITHIN_S)
            assert (answer.status, texts(answer)) == (200, expected), client
        writer.close()


_OFFER = OFFERS["Java 17, length"].replace(b'"temperature": 0}', b'"max_tokens": 8000}').replace(b": 62", b": 64")


@pytest.mark.parametrize(
    ("request_sent", "early"),
    [(_OFFER, 0), (request_bytes("POST", "/v1/completions", _BODY).replace(b"connection: close\r\n", b""), 2)],
    ids=["offers to upgrade", "early requests"],
)
async def test_a_client_that_leaves_is_missed(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, request_sent: bytes, early: int
) -> None:
    cluster.decodes["decode-0"].pause_at = 5
    _, writer = await gateway.connect()
    writer.write(request_sent)
    await eventually(lambda: cluster.decodes["decode-0"].is_paused)
    writer.write(request_sent * early)
    await writer.drain()
    writer.close()
    await eventually(lambda: not gateway.gateway.app.answering)
    cluster.let_all_go()


@pytest.mark.parametrize("body", [_BODY, _STREAM], ids=["whole", "streamed"])
async def test_http_1_0_gets_no_chunks(gateway: GatewayUnderTest, body: bytes) -> None:
    expected = texts(await gateway.complete(max_tokens=20))
    for connection in ("", "Connection: close\r\n", "Connection: keep-alive\r\n"):
        reader, writer = await gateway.connect()
        head = f"POST /v1/completions HTTP/1.0\r\n{connection}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(read_answer(reader), WITHIN_S)
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        assert (answer.status, texts(answer)) == (200, expected)
        writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("when", ["before the first token", "between tokens", "at once"])
@pytest.mark.parametrize("body", [_BODY, _STREAM], ids=["whole", "streamed"])
async def test_a_client_that_has_closed_its_sending_half_gets_its_answer(
    gateway: GatewayUnderTest, cluster: ScriptedCluster, body: bytes, when: str, version: str
) -> None:
    expected = texts(await gateway.complete(max_tokens=20))
    prefill, decode = cluster.prefills["prefill-0"], cluster.decodes["decode-0"]
    if when == "before the first token":
        prefill.hold.add("first_token")
    elif when == "between tokens":
        decode.pause_at = 5
    reader, writer = await gateway.connect()
    writer.write(
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    if when == "before the first token":
        await eventually(lambda: bool(prefill.waiting_requests))
    elif when == "between tokens":
        await eventually(lambda: decode.is_paused)
    writer.write_eof()
    if when != "at once":
        await eventually(lambda: gateway.connection._has_eof)
        assert gateway.gateway.app.answering
    cluster.let_all_go()
    answer = await asyncio.wait_for(read_answer(reader), WITHIN_S)
    assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
    # One, between two events, shows whether the client is there.
    answer.body = answer.body.replace(_COMMENT, b"", 1)
    assert (answer.status, texts(answer)) == (200, expected)
    writer.close()


async def test_requests_that_come_early_are_answered_in_their_order(
    gateway: GatewayUnderTest, cluster: ScriptedCluster
) -> None:
    cluster.decodes["decode-0"].pause_at = 5
    reader, writer = await gateway.connect()
    for count in (20, 1, 2):
        body = json.dumps({"prompt": [300], "max_tokens": count, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
    await eventually(lambda: cluster.decodes["decode-0"].is_paused)
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    writer.write_eof()
    await eventually(lambda: gateway.connection._has_eof)
    cluster.let_all_go()
    for count in (20, 1, 2):
        answer = await asyncio.wait_for(read_answer(reader), WITHIN_S)
        assert answer.json["usage"]["completion_tokens"] == count
    assert "version" in (await read_answer(reader)).json
    assert await reader.read() == b""
    writer.close()


async def test_a_request_without_its_rest_ends_with_its_connection(gateway: GatewayUnderTest) -> None:
    for start in (b"POST /v1/comp", request_bytes("POST", "/v1/completions", _BODY)[:-3]):
        reader, writer = await gateway.connect()
        writer.write(start)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
        writer.close()


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip"])
async def test_a_compressed_body_is_415(gateway: GatewayUnderTest, coding: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        got = await gateway.ask(path, gzip.compress(_BODY), headers={"Content-Encoding": coding})
        assert (got.status, got.error["code"]) == (415, "unsupported_content_encoding")
        assert got.headers["accept-encoding"] == "identity"
        assert coding in got.error["message"]
    assert (await gateway.ask("/v1/completions", _BODY, headers={"Content-Encoding": "identity"})).status == 200


async def test_a_request_id_that_cannot_be_used_is_replaced(gateway: GatewayUnderTest) -> None:
    for request_id in ("", "a" * 129, "with space", "ümlaut"):
        got = await gateway.ask("/v1/completions", _BODY, headers={"X-Request-ID": request_id})
        assert got.status == 200
        assert got.headers["x-request-id"] not in ("", request_id)
    assert (await gateway.ask("/version", headers={"X-Request-ID": "mine"})).headers["x-request-id"] == "mine"


async def test_a_head_gets_the_status_that_the_rfcs_give_it(gateway: GatewayUnderTest) -> None:
    for request_head, status in (
        (b"GET http://x/version HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /version HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /version HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /version HTTP/1.1\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (_POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (_POST + b"Content-Length: -5\r\n\r\n", 400),
        (_POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (_POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (_POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ):
        reader, writer = await gateway.connect()
        writer.write(request_head)
        found, headers = await asyncio.wait_for(read_head(reader), WITHIN_S)
        assert found == status, request_head
        if status != 200:
            assert headers["connection"] == "close"
            refusal = json.loads(await reader.readexactly(int(headers["content-length"])))
            assert refusal["error"]["code"] == "invalid_http"
        writer.close()


async def test_what_is_wrong_after_a_good_request_is_400(gateway: GatewayUnderTest) -> None:
    reader, writer = await gateway.connect()
    writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await asyncio.wait_for(read_answer(reader), WITHIN_S)).status == 200
    writer.write(b"\0\r\n\r\n")
    assert (await asyncio.wait_for(read_answer(reader), WITHIN_S)).status == 400
    writer.close()


async def test_a_body_that_goes_wrong_after_its_answer_ends_the_connection(gateway: GatewayUnderTest) -> None:
    reader, writer = await gateway.connect()
    writer.write(_POST.replace(b"completions", b"nope") + b"Transfer-Encoding: chunked\r\n\r\n")
    assert (await asyncio.wait_for(read_answer(reader), WITHIN_S)).status == 404
    writer.write(b"ZZ\r\n")
    assert await asyncio.wait_for(reader.read(), WITHIN_S) == b""
    writer.close()


async def test_a_body_of_tiny_chunks_is_parsed_in_turns(gateway: GatewayUnderTest) -> None:
    """A megabyte of tiny chunks may arrive at once, and takes the parser a second."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 40_000 + _BODY) + b"0\r\n\r\n"
    reader, writer = await gateway.connect()
    writer.write(_POST + b"Transfer-Encoding: chunked\r\n\r\n")
    await eventually(lambda: bool(gateway.gateway.server.state.connections) and gateway.connection.cycle is not None)
    connection = gateway.connection
    at_once: list[int] = []
    receive = connection.conn.receive_data

    def count(data: bytes) -> None:
        at_once.append(len(data))
        receive(data)

    connection.conn.receive_data = count
    writer.write(chunks)
    assert (await asyncio.wait_for(read_answer(reader), WITHIN_S)).status == 200
    assert sum(at_once) == len(chunks)
    assert max(at_once) <= 16 * 1024
    writer.close()
