"""Traces requests over all processes with OpenTelemetry. Off unless the standard OTEL_* variables name an exporter. A
span is written after its end, from times that the services record anyway, so untraced requests cost only a comparison
with None. W3C's `traceparent` travels as an HTTP header, as metadata to the router, and as a field of Prefill, Reserve
and Resume. Times are time.monotonic()'s."""

import contextlib
import os
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from typing import Any

from kaveri.errors import ConfigError, KaveriError
from kaveri.extras import install_command

HEADER = "traceparent"
"""Name of the HTTP header and of the gRPC metadata: https://www.w3.org/TR/trace-context."""
MAX_TRACEPARENT_BYTES = 128
"""Max length; longer values are ignored. Version 00 has 55."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_EXPORTERS = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("grpc", "http/protobuf")
_CLOSE_S = 3.0
_MOST_ERROR_CHARACTERS = 500
_CLOCKS_WITHIN_S = 50e-6
"""Max time between the reads of two clocks; after a longer one they are read again."""


class _Process:
    provider: Any = None
    tracer: Any = None


class Spans:
    """Writes this process's spans of one request, all with the same parent."""

    __slots__ = ("_context", "trace_id", "traceparent")

    def __init__(self, context: Any, traceparent: str) -> None:
        self._context = context
        self.traceparent = traceparent
        """Context of the parent span."""
        self.trace_id = traceparent.split("-")[1]
        """Trace id for log lines, 32 hexadecimal digits."""

    def write(self, name: str, start_s: float, end_s: float, error: object = None, **attributes: Any) -> None:
        """Write a finished span. error: reason of a failure, or None. Omits attributes that are None. Never raises."""
        with contextlib.suppress(Exception):
            named, began_ns = _named(attributes), _wall_ns(start_s)
            span = _Process.tracer.start_span(name, self._context, attributes=named, start_time=began_ns)
            _end(span, began_ns + _ns(end_s - start_s), error)


class OpenSpan(Spans):
    """Span that has started and not ended; the parent of the spans that it writes."""

    __slots__ = ("_began_ns", "_began_s", "_span")

    def __init__(self, span: Any, began_s: float, began_ns: int) -> None:
        """began_s, began_ns: the start on the monotonic and the wall clock. The end is computed from both, so durations
        are exact and never negative."""
        from opentelemetry import trace

        super().__init__(trace.set_span_in_context(span), _traceparent_of(span))
        self._span, self._began_s, self._began_ns = span, began_s, began_ns

    def begin(self, name: str, start_s: float, after: "OpenSpan | None" = None, **attributes: Any) -> "OpenSpan | None":
        """Start a child span; return None on failure. after: an earlier span to link to."""
        with contextlib.suppress(Exception):
            from opentelemetry import trace

            links = [trace.Link(after._span.get_span_context())] if after is not None else None
            began_ns = _wall_ns(start_s)
            span = _Process.tracer.start_span(
                name, self._context, attributes=_named(attributes), links=links, start_time=began_ns
            )
            return OpenSpan(span, start_s, began_ns)
        return None

    @property
    def spans(self) -> "OpenSpan":
        """This span: lets trace_fields() accept an OpenSpan."""
        return self

    def end(self, end_s: float, error: object = None, **attributes: Any) -> None:
        with contextlib.suppress(Exception):
            self._span.set_attributes(_named(attributes))
            _end(self._span, self._began_ns + _ns(end_s - self._began_s), error)


def configure_tracing(service: str, instance_id: str) -> None:
    """Start tracing if the environment names an exporter: OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_TRACES_EXPORTER as otlp
    or console. The SDK reads its other variables itself. Raises ConfigError for an unknown exporter or protocol, for
    values that the SDK refuses, and if the extra [otel] is not installed."""
    named = os.environ.get(_EXPORTERS, "").strip() or ("otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none")
    if named == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    if named not in ("otlp", "console"):
        raise ConfigError(_EXPORTERS, f"{named!r} is none of otlp, console, none")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        exporter = ConsoleSpanExporter(out=sys.stderr) if named == "console" else _otlp_exporter()
        resource = {"service.name": f"kaveri-{service}", "service.instance.id": instance_id}
        if "OTEL_SERVICE_NAME" in os.environ:
            del resource["service.name"]
        provider = TracerProvider(resource=Resource.create(resource))
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(_EXPORTERS, f"tracing needs OpenTelemetry: {install_command('otel')} ({error})") from error
    except Exception as error:
        # The SDK's own errors, of many types: an invalid timeout, queues smaller than batches.
        raise ConfigError("OTEL_*", f"OpenTelemetry refuses a variable: {error}") from error
    use_provider(provider)


def use_provider(provider: Any) -> None:
    """Use this OpenTelemetry tracer provider from now on; None: stop tracing."""
    _Process.provider = provider
    _Process.tracer = None if provider is None else provider.get_tracer("kaveri")


def is_tracing() -> bool:
    return _Process.tracer is not None


def close_tracing() -> None:
    """Flush the remaining spans, for a few seconds at most."""
    provider = _Process.provider
    use_provider(None)
    if provider is not None:
        # An unresponsive exporter would delay the process's exit too long.
        closing = threading.Thread(target=provider.shutdown, name="kaveri-tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def begin_span(name: str, traceparent: str, start_s: float, **attributes: Any) -> OpenSpan | None:
    """Start a span for a received call, as a child of `traceparent`, or in a new trace if it is empty. Returns None if
    tracing is off or the request is not sampled."""
    return _begun(name, traceparent, start_s, attributes)[0]


@contextlib.contextmanager
def calls_below(name: str, traceparent: str, start_s: float, **attributes: Any) -> Iterator[OpenSpan | None]:
    """Context manager: start a span as begin_span() does, and make it the parent of a Kaveri client's calls within. For
    an unsampled request those calls carry that decision, so routers do not decide again. The caller ends the span."""
    begun, span = _begun(name, traceparent, start_s, attributes)
    if span is None:
        yield None
        return
    from opentelemetry import trace

    with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
        yield begun


def _begun(
    name: str, traceparent: str, start_s: float, attributes: dict[str, Any]
) -> tuple[OpenSpan | None, Any | None]:
    """Start a span. Returns it if sampled, and the SDK's span in any case; None if tracing is off."""
    if _Process.tracer is None:
        return None, None
    with contextlib.suppress(Exception):
        from opentelemetry import trace

        began_ns = _wall_ns(start_s)
        span = _Process.tracer.start_span(
            name, _context_of(traceparent), trace.SpanKind.SERVER, attributes=_named(attributes), start_time=began_ns
        )
        return OpenSpan(span, start_s, began_ns) if span.is_recording() else None, span
    return None, None


def spans_below(traceparent: str) -> Spans | None:
    """Return a writer of child spans of `traceparent`; None if tracing is off or the request is not sampled."""
    if not traceparent or _Process.tracer is None:
        return None
    with contextlib.suppress(Exception):
        from opentelemetry import trace

        context = _context_of(traceparent)
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid and parent.trace_flags.sampled:
            return Spans(context, traceparent)
    return None


def traceparent_of(metadata: Iterable[tuple[str, Any]] | None) -> str:
    """Return the `traceparent` in a call's metadata; empty if missing or tracing is off."""
    if _Process.tracer is None:
        return ""
    return next((str(value) for name, value in metadata or () if name == HEADER), "")


def trace_fields(traced: Any) -> dict[str, str]:
    """Return a log line's trace_id field. traced: an object with `spans`; None, for no field, if not traced."""
    return {} if traced is None else {"trace_id": traced.spans.trace_id}


def current_traceparent() -> str:
    """Return the traceparent of the caller's span, if the program traces with OpenTelemetry; else empty."""
    trace = sys.modules.get("opentelemetry.trace")
    # Another thread may be importing it.
    with contextlib.suppress(Exception):
        span = trace.get_current_span() if trace is not None else None
        if span is not None and span.get_span_context().is_valid:
            return _traceparent_of(span)
    return ""


def error_in_span(error: BaseException | None) -> str | None:
    """Describe the error that ended a span; None without an error. Unexpected errors are described by type only: their
    texts may contain anything, and are in the log."""
    match error:
        case None:
            return None
        case KaveriError():
            return repr(error)
        case CancelledError():
            return "the client has gone, or the process ends"
        case _:
            return type(error).__name__


def _traceparent_of(span: Any) -> str:
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"


def _context_of(traceparent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if len(traceparent) > MAX_TRACEPARENT_BYTES:
        traceparent = ""
    # Do not use the caller's context.
    return TraceContextTextMapPropagator().extract({HEADER: traceparent}, Context())


def _otlp_exporter() -> Any:
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    name = next((each for each in names if os.environ.get(each)), "")
    protocol = os.environ.get(name, "").strip() or "grpc"
    if protocol not in _PROTOCOLS:
        raise ConfigError(name, f"{protocol!r} is none of {', '.join(_PROTOCOLS)}")
    if protocol != "grpc":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _end(span: Any, end_ns: int, error: object) -> None:
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, str(error)[:_MOST_ERROR_CHARACTERS]))
    span.end(end_ns)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"kaveri.{name}": value for name, value in attributes.items() if value is not None}


def _wall_ns(monotonic_s: float) -> int:
    for _ in range(3):
        before_s = time.monotonic()
        now_ns = time.time_ns()
        after_s = time.monotonic()
        if after_s - before_s < _CLOCKS_WITHIN_S:
            break
    return now_ns - _ns((before_s + after_s) / 2 - monotonic_s)


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)
