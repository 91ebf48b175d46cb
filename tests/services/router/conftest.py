from collections.abc import AsyncIterator

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.engine_door import EngineDoor, open_door


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    async with scripted_cluster(tokenizer, 2, 2) as cluster:
        yield cluster


@pytest.fixture
async def door(cluster: ScriptedCluster) -> AsyncIterator[EngineDoor]:
    async with open_door(cluster) as door:
        yield door
