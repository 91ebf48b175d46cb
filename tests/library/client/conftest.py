from collections.abc import AsyncIterator, Iterator

import pytest

from tests.library.client.inference_double import InferenceDouble, serving, serving_in_a_thread


@pytest.fixture
def service() -> InferenceDouble:
    return InferenceDouble()


@pytest.fixture
async def target(service: InferenceDouble) -> AsyncIterator[str]:
    async with serving(service) as target:
        yield target


@pytest.fixture
def running_target(service: InferenceDouble) -> Iterator[str]:
    """Address of an InferenceDouble in another thread, for tests that block their event loop."""
    with serving_in_a_thread(service) as target:
        yield target
