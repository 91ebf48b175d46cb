"""Fixtures of the router's tests."""

from collections.abc import AsyncIterator

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.services.router.cluster_script import ScriptedCluster


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    """Two scripted prefill and two scripted decode instances."""
    cluster = ScriptedCluster(tokenizer)
    for name in ("prefill-0", "prefill-1"):
        await cluster.add_prefill(name)
    for name in ("decode-0", "decode-1"):
        await cluster.add_decode(name)
    yield cluster
    await cluster.close()
