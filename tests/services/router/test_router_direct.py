"""What a router sends to clients that may read their answers at decode instances."""

from collections.abc import AsyncIterator

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import ask, rest_of

SECRET = b"s" * 16
WITHIN_S = 60.0


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    """One prefill and one decode instance, of which no silence is noticed on a busy machine."""
    cluster = ScriptedCluster(tokenizer, lease_ttl_s=WITHIN_S)
    await cluster.add_prefill("prefill-0")
    (await cluster.add_decode("decode-0")).beats = False
    yield cluster
    await cluster.close()


@pytest.mark.parametrize(("logprobs", "offers"), [(None, 1), (0, 0)])
async def test_answers_with_log_probabilities_are_read_at_the_router(
    cluster: ScriptedCluster, logprobs: int | None, offers: int
) -> None:
    decode = cluster.decodes["decode-0"]
    decode.pause_at = 5
    async with cluster.router() as router:
        call = router.stub.Generate(ask(direct=True, secret=SECRET, logprobs=logprobs), timeout=WITHIN_S)
        responses = []
        while sum(len(response.token_ids) for response in responses) < 5:
            responses.append(await call.read())
        decode.may_step.set()
        responses += await rest_of(call)
    assert sum(response.HasField("tokens_at") for response in responses) == offers
    assert sum(len(response.token_ids) for response in responses) == 20
