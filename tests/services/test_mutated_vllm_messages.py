"""Thousands of mutated messages to the router's vllm.grpc.engine, while requests are served over it: each is answered
or refused properly, no other request is disturbed, and nothing leaks."""

import random
from typing import Any

import grpc
import pytest
import structlog
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.services.conftest import eventually
from tests.services.mutations import Attack, Mutator
from tests.services.prompts import prompt
from tests.services.session_client import WAIT_S, SessionRouters

MESSAGES = 1_500
NOT_FOR_CALLERS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
ANSWER_TOKENS = 60


def _generate(rng: random.Random, request_id: str) -> Any:
    params = vllm_engine_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, max_tokens=12, stop=["x"], stop_token_ids=[7], skip_special_tokens=True
    )
    params.n, params.seed, params.logprobs = rng.choice((1, 1, 2)), 3, 2
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=prompt(3))
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id, tokenized=tokenized, sampling_params=params, stream=rng.random() < 0.5
    )


class EngineAttack(Attack):
    def __init__(self, rng: random.Random, stub: Any) -> None:
        super().__init__(rng, Mutator(rng, ["attacked", "{}", "fake"], [b"bytes"]), NOT_FOR_CALLERS)
        self._stub = stub

    async def send(self, number: int) -> None:
        # One id in two is used again.
        request_id = f"attacked-{number if self.rng.random() < 0.5 else number % 8}"
        makes: dict[str, Any] = {
            "Abort": vllm_engine_pb2.AbortRequest(request_ids=[request_id, "nothing"]),
            "GetModelInfo": vllm_engine_pb2.GetModelInfoRequest(),
            "GetLoads": vllm_engine_pb2.GetLoadsRequest(),
            "HealthCheck": vllm_engine_pb2.HealthCheckRequest(),
            "GetTokenizer": common_pb2.GetTokenizerRequest(),
        }
        name = self.rng.choice(("Generate",) * 12 + tuple(makes))
        message = makes.get(name) or _generate(self.rng, request_id)
        if message.DESCRIPTOR.fields and self.rng.random() < 0.97:
            message = self.mutator.mutated(message)
        if self.rng.random() < 0.05:
            # A field of a newer package.
            message = type(message).FromString(message.SerializeToString() + b"\xc0\x3e\x01")
        await self.call(name, getattr(self._stub, name), message)


@pytest.mark.timeout(300)
async def test_mutated_messages_to_the_fields_grpc_are_refused_and_leave_nothing(
    cluster: Any, routers: SessionRouters
) -> None:
    seed = random.randrange(2**30)
    print(f"seed {seed}")
    cluster.needs_fake_engines("thousands of calls at the fake engine's speed")
    await cluster.prefill()
    for name in ("decode-0", "decode-1"):
        await cluster.decode(name, fake_step_s=0.002)

    with structlog.testing.capture_logs() as logs:
        router = await routers.start("router-0", vllm_grpc=True)
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(routers._channels["router-0"])

        async def serve(client: int, number: int) -> None:
            token_ids = prompt(1000 * client + number)
            params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=0)
            tokenized = vllm_engine_pb2.TokenizedInput(input_ids=token_ids)
            request = vllm_engine_pb2.GenerateRequest(
                request_id=f"served-{client}", tokenized=tokenized, sampling_params=params, stream=True
            )
            got = [each.chunk.token_ids async for each in stub.Generate(request, timeout=WAIT_S)]
            assert [token_id for part in got for token_id in part] == cluster.expected(token_ids, ANSWER_TOKENS)

        attack = EngineAttack(random.Random(seed), stub)
        await attack.run(MESSAGES, 3, serve)
        assert attack.answers["Generate OK"]
        assert attack.answers["Generate INVALID_ARGUMENT"]
        await eventually(lambda: not len(router.table), "the router forgets its requests")
        await cluster.all_free(within_s=60)
        await routers.close()
    errors = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not errors, errors[:5]
