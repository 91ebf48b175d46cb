import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from kaveri.errors import ConfigError
from kaveri.telemetry import metrics
from kaveri.telemetry.metrics import MAX_CONNECTIONS, MAX_REQUEST_BYTES, serve_metrics
from tests.support.redis_fixture import free_port

_WITHIN_S = 60.0


class _MetricsPort:
    def __init__(self) -> None:
        self.number = free_port()
        self.ready = True
        self.registry = CollectorRegistry()
        Counter("tests_asked", "Asked.", registry=self.registry).inc(3)


@pytest.fixture
async def port() -> AsyncIterator[_MetricsPort]:
    port = _MetricsPort()
    async with serve_metrics("127.0.0.1", port.number, lambda: port.ready, port.registry):
        yield port


async def _connect(port: _MetricsPort) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port.number)


async def _send(port: _MetricsPort, request: str) -> tuple[int, dict[str, str], str]:
    """Send a request; return status, headers by lower-case name, and body of the response."""
    async with asyncio.timeout(_WITHIN_S):
        reader, writer = await _connect(port)
        writer.write(request.encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split(" ")[1]), headers, body


async def _ask(port: _MetricsPort, path: str, method: str = "GET", *headers: str) -> tuple[int, dict[str, str], str]:
    lines = "".join(f"{header}\r\n" for header in headers)
    return await _send(port, f"{method} {path} HTTP/1.1\r\nHost: here\r\n{lines}\r\n")


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Wait until the other side closes the connection; drop what it sent before."""
    async with asyncio.timeout(_WITHIN_S):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    return True


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("text/plain", "text/plain"), ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text")],
)
async def test_metrics_are_served_in_the_format_that_is_asked_for(
    port: _MetricsPort, accept: str, content_type: str
) -> None:
    status, headers, body = await _ask(port, "/metrics?debug=1", "GET", f"Accept: {accept}")
    assert status == HTTPStatus.OK
    assert headers["content-type"].startswith(content_type)
    assert int(headers["content-length"]) == len(body)
    assert "tests_asked_total 3.0" in body
    if content_type == "text/plain":
        (family,) = text_string_to_metric_families(body)
        assert [sample.name for sample in family.samples] == ["tests_asked_total"], "with the time of its birth"


async def test_head_is_get_without_a_body(port: _MetricsPort) -> None:
    for path in ("/metrics", "/livez", "/nowhere"):
        got, headers, body = await _ask(port, path)
        status, head_headers, head_body = await _ask(port, path, "HEAD")
        assert (status, head_headers, head_body) == (got, headers, "")
        assert int(headers["content-length"]) == len(body) > 0


async def test_ready_is_what_the_process_says_and_alive_is_any_answer(port: _MetricsPort) -> None:
    assert (await _ask(port, "/readyz"))[0] == HTTPStatus.OK
    port.ready = False
    assert (await _ask(port, "/readyz"))[0] == HTTPStatus.SERVICE_UNAVAILABLE
    assert (await _ask(port, "/livez"))[0] == HTTPStatus.OK


@pytest.mark.parametrize("path", ["/", "/metric", "/metrics/", "/readyz/x", "*"])
async def test_any_other_path_is_not_found(port: _MetricsPort, path: str) -> None:
    assert (await _ask(port, path))[0] == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("method", ["POST", "DELETE", "get"])
async def test_any_other_method_is_not_allowed(port: _MetricsPort, method: str) -> None:
    status, headers, _ = await _ask(port, "/metrics", method)
    assert status == HTTPStatus.METHOD_NOT_ALLOWED
    assert headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "request_text", ["\r\n\r\n", "GET\r\n\r\n", "GET /metrics FTP/1.1\r\n\r\n", "\x00\xff\r\n\r\n"]
)
async def test_what_is_no_request_is_refused(port: _MetricsPort, request_text: str) -> None:
    assert (await _send(port, request_text))[0] == HTTPStatus.BAD_REQUEST


async def test_connection_whose_request_never_ends_is_closed(port: _MetricsPort) -> None:
    reader, writer = await _connect(port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 4 * MAX_REQUEST_BYTES)
        await writer.drain()
    assert await _is_closed(reader)
    writer.close()


async def test_silent_connection_is_closed_after_a_while(port: _MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.1)
    reader, writer = await _connect(port)
    assert await _is_closed(reader)
    writer.close()


async def test_connection_that_does_not_read_its_answer_is_closed_after_a_while(
    port: _MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "RESPONSE_TIMEOUT_S", 0.2)
    wide = Gauge("tests_wide", "Wide.", ["label"], registry=port.registry)
    for number in range(40_000):
        # More than the buffers of two sockets hold.
        wide.labels(label="x" * 200 + str(number)).set(1)
    with socket.create_connection(("127.0.0.1", port.number)) as slow:
        slow.setblocking(False)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(_WITHIN_S):
            # The first byte: the answer has begun.
            await asyncio.get_running_loop().sock_recv(slow, 1)
            while any(task.get_name() == "metrics connection" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            received = 0
            with contextlib.suppress(ConnectionError):
                while chunk := await asyncio.get_running_loop().sock_recv(slow, 65_536):
                    received += len(chunk)
        assert received < 40_000 * 200


async def test_silent_connections_neither_pile_up_nor_lock_a_scrape_out(port: _MetricsPort) -> None:
    async with contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(MAX_CONNECTIONS + 8):
            reader, writer = await _connect(port)
            stack.callback(writer.close)
            readers.append(reader)
        for reader in readers[:8]:
            assert await _is_closed(reader)
        assert (await _ask(port, "/metrics"))[0] == HTTPStatus.OK
        assert not any(reader.at_eof() for reader in readers[9:]), "the oldest goes first, and no other"


async def test_many_scrapes_at_once_are_all_answered(port: _MetricsPort) -> None:
    answers = await asyncio.gather(*(_ask(port, "/metrics") for _ in range(MAX_CONNECTIONS)))
    assert {status for status, _, _ in answers} == {HTTPStatus.OK}


@pytest.mark.parametrize("request_text", ["", "GET /met", "GET /metrics HTTP/1.1\r\n\r\n"])
async def test_early_hang_up_prints_nothing(
    port: _MetricsPort, request_text: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(5):
        _, writer = await _connect(port)
        writer.write(request_text.encode())
        writer.transport.abort()
    assert (await _ask(port, "/livez"))[0] == HTTPStatus.OK
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


async def test_end_of_the_context_ends_the_port_and_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 600.0)
    port = _MetricsPort()
    async with serve_metrics("127.0.0.1", port.number, lambda: True, port.registry):
        reader, writer = await _connect(port)
        # The earlier connection is taken by then.
        assert (await _ask(port, "/livez"))[0] == HTTPStatus.OK
    assert await _is_closed(reader)
    writer.close()
    with pytest.raises(ConnectionError):
        await _connect(port)


async def test_port_that_is_taken_is_a_config_error_and_port_0_serves_nothing(port: _MetricsPort) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-port: cannot listen on 127\.0\.0\.1"):
        async with serve_metrics("127.0.0.1", port.number, lambda: True):
            pass
    async with serve_metrics("no such host", 0, lambda: True):
        pass
