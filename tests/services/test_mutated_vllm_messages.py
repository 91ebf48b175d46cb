"""Thousands of mutated messages to the router's vllm.grpc.engine, while requests are served over it.

Each is answered, or refused with an error that a caller may see. No other request is disturbed, and nothing is left.
"""

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest
import structlog
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from tests.services.conftest import eventually
from tests.services.mutations import Mutator
from tests.services.prompts import prompt
from tests.services.session_client import WAIT_S, SessionRouters

MESSAGES = 1_500
TOGETHER = 16
CALL_TIMEOUT_S = 0.5
NOT_FOR_CALLERS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
ANSWER_TOKENS = 60


def _generate(rng: random.Random, request_id: str) -> Any:
    """A valid request that uses many fields."""
    params = vllm_engine_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, max_tokens=12, stop=["x"], stop_token_ids=[7], skip_special_tokens=True
    )
    params.n, params.seed, params.logprobs = rng.choice((1, 1, 2)), 3, 2
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=prompt(3))
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id, tokenized=tokenized, sampling_params=params, stream=rng.random() < 0.5
    )


class EngineAttack:
    """Mutated calls, and what is answered."""

    def __init__(self, rng: random.Random, stub: Any) -> None:
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._rng = rng
        self._stub = stub
        self._mutator = Mutator(rng, ["attacked", "{}", "fake"], [b"bytes"])

    async def run(self, count: int) -> None:
        left = iter(range(count))

        async def send_some() -> None:
            for number in left:
                await self._send(number)

        await asyncio.gather(*(send_some() for _ in range(TOGETHER)))

    async def _send(self, number: int) -> None:
        # One id in two is used again.
        request_id = f"attacked-{number if self._rng.random() < 0.5 else number % 8}"
        makes: dict[str, Any] = {
            "Abort": vllm_engine_pb2.AbortRequest(request_ids=[request_id, "nothing"]),
            "GetModelInfo": vllm_engine_pb2.GetModelInfoRequest(),
            "GetLoads": vllm_engine_pb2.GetLoadsRequest(),
            "HealthCheck": vllm_engine_pb2.HealthCheckRequest(),
            "GetTokenizer": common_pb2.GetTokenizerRequest(),
        }
        name = self._rng.choice(("Generate",) * 12 + tuple(makes))
        message = makes.get(name) or _generate(self._rng, request_id)
        if message.DESCRIPTOR.fields and self._rng.random() < 0.97:
            message = self._mutator.mutated(message)
        if self._rng.random() < 0.05:
            # A field of a newer package.
            message = type(message).FromString(message.SerializeToString() + b"\xc0\x3e\x01")
        try:
            call = getattr(self._stub, name)(message, timeout=CALL_TIMEOUT_S)
            if isinstance(call, aio.UnaryStreamCall):
                await call.read()
                call.cancel()
            else:
                await call
            self.answers[f"{name} OK"] += 1
        except aio.AioRpcError as error:
            self.answers[f"{name} {error.code().name}"] += 1
            if error.code() in NOT_FOR_CALLERS:
                self.wrong.append(f"{name}: {error.code().name} {error.details()} for {str(message)[:300]}")


@pytest.mark.timeout(300)
async def test_mutated_messages_to_the_fields_grpc_are_refused_and_leave_nothing(cluster: Any, tokenizer: Any) -> None:
    seed = random.randrange(2**30)
    print(f"seed {seed}")
    cluster.needs_fake_engines("thousands of calls at the fake engine's speed")
    await cluster.prefill()
    for name in ("decode-0", "decode-1"):
        await cluster.decode(name, fake_step_s=0.002)
    routers = SessionRouters(cluster, tokenizer)
    attacking = True

    async def serve(stub: Any, number: int) -> int:
        """One request after the other, each exact."""
        count = 0
        while attacking:
            token_ids = prompt(1000 * number + count)
            params = vllm_engine_pb2.SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=0)
            tokenized = vllm_engine_pb2.TokenizedInput(input_ids=token_ids)
            request = vllm_engine_pb2.GenerateRequest(
                request_id=f"served-{number}", tokenized=tokenized, sampling_params=params, stream=True
            )
            got = [each.chunk.token_ids async for each in stub.Generate(request, timeout=WAIT_S)]
            assert [token_id for part in got for token_id in part] == cluster.expected(token_ids, ANSWER_TOKENS)
            count += 1
        return count

    with structlog.testing.capture_logs() as logs:
        try:
            router = await routers.start("router-0", vllm_grpc=True)
            stub = vllm_engine_pb2_grpc.VllmEngineStub(routers._channels["router-0"])
            serving = [asyncio.create_task(serve(stub, number)) for number in range(3)]
            attack = EngineAttack(random.Random(seed), stub)
            await attack.run(MESSAGES)
            attacking = False
            assert min(await asyncio.gather(*serving)) > 0
            print(sorted(attack.answers.items()))
            assert not attack.wrong, attack.wrong[:5]
            assert sum(attack.answers.values()) == MESSAGES
            assert attack.answers["Generate OK"]
            assert attack.answers["Generate INVALID_ARGUMENT"]
            await eventually(lambda: not len(router.table), "the router forgets its requests")
            await cluster.all_free(within_s=60)
        finally:
            attacking = False
            await routers.close()
    errors = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not errors, errors[:5]
