"""When a process traces, and what it says when it cannot."""

import subprocess
import sys

import pytest

from kaveri.errors import ConfigError
from kaveri.telemetry import tracing
from kaveri.telemetry.tracing import begin_span, configure_tracing, current_traceparent, is_tracing, spans_below

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
    assert "pip install 'kaveri[otel]'" in _run(_WITHOUT_SDK, OTEL_TRACES_EXPORTER="otlp")


def test_the_console_shows_spans_with_service_and_instance() -> None:
    shown = _run(_TO_THE_CONSOLE, OTEL_TRACES_EXPORTER="console")
    for text in ('"name": "generate"', '"kaveri.request_id": "a"', "kaveri-router", "router-0"):
        assert text in shown
    assert "session" not in shown


def test_a_collector_that_is_away_holds_up_no_process_for_long() -> None:
    _run(_NOWHERE, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")


def test_a_program_that_does_not_trace_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_traceparent() == ""
    monkeypatch.delitem(tracing.sys.modules, "opentelemetry.trace", raising=False)
    assert current_traceparent() == ""
