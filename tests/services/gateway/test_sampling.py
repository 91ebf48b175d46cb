"""Which requests over HTTP are traced."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler, SamplingResult

from kaveri.telemetry.tracing import use_provider
from tests.services.gateway.conftest import GatewayUnderTest


class CountingSampler(Sampler):
    """Leaves every trace out, and counts them."""

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
