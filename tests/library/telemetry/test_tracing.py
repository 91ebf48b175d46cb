import asyncio
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kaveri.errors import ConfigError, NoCapacity
from kaveri.telemetry import tracing
from kaveri.telemetry.tracing import (
    begin_span,
    configure_tracing,
    current_traceparent,
    error_in_span,
    is_tracing,
    spans_below,
    use_provider,
)

_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_WITHOUT_SDK = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from kaveri.errors import ConfigError
from kaveri.telemetry.tracing import configure_tracing
try:
    configure_tracing("router", "router-0")
except ConfigError as error:
    print(error)
"""
_TO_THE_CONSOLE = """
from kaveri.telemetry.tracing import begin_span, close_tracing, configure_tracing
configure_tracing("router", "router-0")
begin_span("generate", "", 0.0, request_id="a").end(1.0, session=None)
close_tracing()
"""
_NOWHERE = """
import time
from kaveri.telemetry.tracing import begin_span, close_tracing, configure_tracing
configure_tracing("router", "router-0")
begin_span("generate", "", 0.0).end(1.0)
began_s = time.monotonic()
close_tracing()
assert time.monotonic() - began_s < 8
"""


@pytest.fixture(autouse=True)
def _no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def _run(code: str, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stdout + ran.stderr


def test_nothing_is_traced_unless_an_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_tracing("router", "router-0")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    configure_tracing("router", "router-0")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    configure_tracing("router", "router-0")
    assert not is_tracing()
    assert begin_span("generate", _PARENT, 0.0) is None
    assert spans_below(_PARENT) is None


def test_an_unknown_exporter_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER.*'zipkin' is none of otlp, console, none"):
        configure_tracing("router", "router-0")


def test_without_the_extra_the_error_names_what_to_install() -> None:
    assert "[otel]'" in _run(_WITHOUT_SDK, OTEL_TRACES_EXPORTER="otlp")


def test_the_console_shows_spans_with_service_and_instance() -> None:
    shown = _run(_TO_THE_CONSOLE, OTEL_TRACES_EXPORTER="console")
    for text in ('"name": "generate"', '"kaveri.request_id": "a"', "kaveri-router", "router-0"):
        assert text in shown
    assert "session" not in shown


def test_a_collector_that_is_away_or_never_answers_holds_up_no_process_for_long() -> None:
    _run(_NOWHERE, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for protocol in ("grpc", "http/protobuf"):
            _run(_NOWHERE, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "'http/json' is none of grpc, http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "could not convert string to float: 'soon'"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10", "max_queue_size"),
    ],
)
def test_a_variable_that_the_sdk_cannot_use_is_one_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, refusal: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=refusal):
        configure_tracing("router", "router-0")
    assert not is_tracing()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use_provider(provider)
    yield exporter
    use_provider(None)


def test_a_duration_is_exact_though_the_thread_loses_its_core_between_the_clocks(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, count = time.time_ns(), itertools.count()
    monkeypatch.setattr(tracing.time, "time_ns", lambda: first - 10_000_000 * next(count))
    span = begin_span("generate", _PARENT, 1.0)
    assert span is not None
    span.write("tokenize", 1.0, 1.001)
    span.end(1.002)
    assert [span.end_time - span.start_time for span in spans.get_finished_spans()] == [
        pytest.approx(1_000_000, abs=2),
        pytest.approx(2_000_000, abs=2),
    ]


def test_an_error_that_was_not_raised_on_purpose_shows_only_its_name() -> None:
    assert error_in_span(ValueError("a prompt")) == "ValueError"
    assert "no room" in str(error_in_span(NoCapacity("router", 0.5)))
    assert "client" in str(error_in_span(asyncio.CancelledError()))
    assert error_in_span(None) is None


def test_a_program_that_does_not_trace_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_traceparent() == ""
    monkeypatch.delitem(tracing.sys.modules, "opentelemetry.trace", raising=False)
    assert current_traceparent() == ""
