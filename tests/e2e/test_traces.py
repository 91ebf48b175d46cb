"""Traces of real processes, sent to a real OTLP receiver over gRPC."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kaveri import AsyncClient, SamplingParams
from tests.support.local_cluster import LocalCluster, run_cluster

_TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
_PARENT_ID = "b7ad6b7169203331"
_WITHIN_S = 60.0


class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(named["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SpanReceiver]:
    receiver = SpanReceiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield receiver
    server.stop(None).wait()


def _trace_id(cluster: LocalCluster) -> str:
    (line,) = [line for line in cluster.log_text("router-0").splitlines() if "by-name" in line and "trace_id" in line]
    return str(json.loads(line)["trace_id"])


async def test_one_trace_over_gateway_router_prefill_and_decode(receiver: SpanReceiver) -> None:
    async with run_cluster(gateway_count=1) as cluster:
        body = {"model": "kaveri-tiny", "prompt": "Count from 1 to 9.", "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{cluster.stack.http_targets[0]}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "traceparent": f"00-{_TRACE_ID}-{_PARENT_ID}-01"},
        )
        answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=_WITHIN_S)))
        assert answer["usage"]["completion_tokens"] == 8
        # A line is written when the answer has gone out.
        for name in ("gateway-0", "router-0"):
            async with asyncio.timeout(_WITHIN_S):
                while f'"trace_id": "{_TRACE_ID}"' not in cluster.log_text(name):  # noqa: ASYNC110 - a file
                    await asyncio.sleep(0.05)
        async with AsyncClient(cluster.target, timeout_s=_WITHIN_S) as client:
            await client.generate("Count", params=SamplingParams(max_tokens=8, ignore_eos=True), request_id="by-name")
        status, shown, _ = await cluster.command("trace", "by-name")
        assert status == 0
        for text in ("by-name: length, ", "attempt 1 to prefill-0", f"trace {_trace_id(cluster)}", "decode-0"):
            assert text in shown
    by_service: dict[str, set[str]] = {}
    spans = [(service, span) for service, span in receiver.spans if span.trace_id.hex() == _TRACE_ID]
    assert len({span.trace_id for _, span in receiver.spans}) == 2
    for service, span in spans:
        by_service.setdefault(service, set()).add(span.name)
    assert by_service == {
        "kaveri-gateway": {"POST /v1/completions"},
        "kaveri-router": {"generate", "tokenize", "claim", "place", "relay", "attempt"},
        "kaveri-prefill": {"prefill.queue", "prefill.chunk", "prefill", "prefill.place", "kv.push", "prefill.request"},
        "kaveri-decode": {"decode.room", "kv.landing", "decode.admission", "decode"},
    }
    ids = {span.span_id: span.name for _, span in spans}
    parents = {span.name: ids.get(span.parent_span_id, span.parent_span_id.hex()) for _, span in spans}
    assert parents["POST /v1/completions"] == _PARENT_ID
    assert parents["generate"] == "POST /v1/completions"
    assert parents["attempt"] == "generate"
    assert {parents[name] for name in (*by_service["kaveri-prefill"], *by_service["kaveri-decode"])} == {"attempt"}
