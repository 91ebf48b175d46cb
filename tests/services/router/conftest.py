"""Fixtures of the router's tests."""

from collections.abc import AsyncIterator

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    """Two scripted prefill and two scripted decode instances."""
    async with scripted_cluster(tokenizer, 2, 2) as cluster:
        yield cluster
