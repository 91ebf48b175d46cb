import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, SamplingResult

from kaveri.telemetry.tracing import use_provider
from tests.services.gateway.conftest import GatewayUnderTest
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import eventually


class CountingSampler(Sampler):
    def __init__(self) -> None:
        self.count = 0

    def should_sample(self, *given: Any, **named: Any) -> SamplingResult:
        self.count += 1
        return ALWAYS_OFF.should_sample(*given, **named)

    def get_description(self) -> str:
        return "counts"


@pytest.fixture
def sampler() -> Iterator[CountingSampler]:
    sampler = CountingSampler()
    use_provider(TracerProvider(sampler=ParentBased(sampler)))
    yield sampler
    use_provider(None)


async def test_a_request_that_the_gateway_leaves_out_is_not_decided_on_again_by_its_router(
    gateway: GatewayUnderTest, sampler: CountingSampler
) -> None:
    assert (await gateway.complete()).status == 200
    assert sampler.count == 1


async def test_an_error_after_the_first_token_is_an_error_in_the_span(
    gateway: GatewayUnderTest, cluster: ScriptedCluster
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use_provider(provider)
    try:
        decode = cluster.decodes["decode-0"]
        decode.pause_at = 4
        got = asyncio.create_task(gateway.complete(stream=True, max_tokens=20))
        await eventually(lambda: decode.is_paused)
        (request_id,) = decode.running
        await gateway.sdk.cancel(request_id)
        decode.may_step.set()
        assert (await got).status == 200
        named = "POST /v1/completions"
        await eventually(lambda: any(span.name == named for span in exporter.get_finished_spans()))
        (ended,) = [span for span in exporter.get_finished_spans() if span.name == named]
        assert "RequestCancelled" in str(ended.status.description)
    finally:
        use_provider(None)
