"""Thousands of mutated messages to every RPC of router, prefill and decode, while requests are served: each is refused
with an error that a caller may see, no other request is disturbed, and nothing leaks. Not the KV protocol, see
tests/library/kv/test_wire_marks.py."""

import asyncio
import random
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.message import Message
from grpc import aio

from kaveri.domain.owner import Ownership
from kaveri.domain.replica import ReplicaOffer, Resumption
from kaveri.domain.sampling import ResolvedParams, SamplingParams
from kaveri.v1 import decode_pb2, feed_pb2, inference_pb2, prefill_pb2, term_pb2
from kaveri.v1.decode_pb2_grpc import DecodeServiceStub
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub
from kaveri.v1.prefill_pb2_grpc import PrefillServiceStub
from kaveri.wire.attempts import term_from_proto
from kaveri.wire.messages import layout_to_proto, params_to_proto
from kaveri.wire.replicas import offer_to_proto, resumption_to_proto
from tests.services.conftest import eventually
from tests.services.mutations import Attack, Mutator
from tests.services.prompts import prompt
from tests.services.session_client import SECRET, SessionClient, SessionRouters

MESSAGES = 4_000
DECODE = {
    "replication": "ring",
    "replica_min_tokens": 16,
    "replica_memory": 2**20,
    "fake_step_s": 0.002,
    "reservation_ttl_s": 1.0,
}
OTHER_SECRET = b"another-secret-1"
STRANGER = "stranger.0123456789abcdef"
_BEGIN = ("Reserve", "Submit")
NOT_FOR_CALLERS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED)


class PeerAttack(Attack):
    def __init__(
        self, rng: random.Random, cluster: Any, router: aio.Channel, served: list[str], incarnations: list[int]
    ) -> None:
        self._ids = [f"attacked-{number}" for number in range(8)]
        words = [*self._ids, *served, STRANGER, "decode-0", "decode-1", "prefill-0"]
        super().__init__(rng, Mutator(rng, words, [OTHER_SECRET]), NOT_FOR_CALLERS)
        self._cluster = cluster
        self._router = InferenceServiceStub(router)
        self._served = served
        self._incarnations = incarnations

    async def send(self, number: int) -> None:
        instances = {each.instance_id: each for each in self._cluster.instances}
        decode = DecodeServiceStub(instances[self.rng.choice(("decode-0", "decode-1"))].channel)
        feed = FeedServiceStub(instances[self.rng.choice(sorted(instances))].channel)
        prefill = PrefillServiceStub(instances["prefill-0"].channel)
        name, make, method = self.rng.choice(
            (
                ("Reserve", self._reserve, decode.Reserve),
                ("Abort", self._abort, feed.Abort),
                ("Follow", self._follow, feed.Follow),
                ("Attach", self._attach, feed.Attach),
                ("OpenReplica", self._open_replica, decode.OpenReplica),
                ("OpenReplica", self._open_replica, decode.OpenReplica),
                ("Resume", self._resume, decode.Resume),
                ("AwaitResumed", self._await_resumed, decode.AwaitResumed),
                ("Resume", self._resume, decode.Resume),
                ("Submit", self._submit, prefill.Submit),
                ("Attach", self._attach, feed.Attach),
                ("Abort", self._abort, feed.Abort),
                ("Generate", self._generate, self._router.Generate),
                ("Generate", self._generate, self._router.Generate),
            )
        )
        message: Any = make()
        if self.rng.random() < 0.97:
            message = self.mutator.mutated(message)
        if name in _BEGIN and message.request_id in self._served:
            # Of two requests with one id, sent by peers, the later one replaces the other. Routers keep clients apart.
            message.request_id = self._ids[0]
        await self.call(name, method, message)

    def _owner(self) -> dict[str, Any]:
        return {
            "request_id": self.rng.choice(self._ids),
            "term": term_pb2.Term(session=self.rng.choice((0, 0, 1, 2)), attempt=self.rng.choice((1, 1, 2, 3))),
            "router_id": STRANGER,
            "secret": OTHER_SECRET,
        }

    def _ownership(self) -> tuple[str, Ownership]:
        owner = self._owner()
        return owner["request_id"], Ownership(term_from_proto(owner["term"]), STRANGER, OTHER_SECRET)

    def _reserve(self) -> Message:
        params = params_to_proto(SamplingParams(max_tokens=5, seed=0))
        layout = layout_to_proto(self._cluster.instances[-1].engine.info.layout)
        return decode_pb2.ReserveRequest(
            **self._owner(), token_ids=prompt(1, 20), params=params, timeout_s=5.0, layout=layout
        )

    def _abort(self) -> Message:
        name = decode_pb2.AttemptId(**self._owner())
        return feed_pb2.AbortRequest(attempts=[name], by_router=True, give_back=self.rng.random() < 0.3)

    def _follow(self) -> Message:
        owner = self._owner()
        named = feed_pb2.FollowedRequest(
            request_id=owner["request_id"], term=owner["term"], next_index=3, at_prefill=self.rng.random() < 0.5
        )
        return feed_pb2.FollowRequest(router_id=STRANGER, requests=[named])

    def _attach(self) -> Message:
        at_prefill = self.rng.random() < 0.5
        return feed_pb2.AttachRequest(
            **self._owner(), token_ids=prompt(2, 20), generated_count=2, at_prefill=at_prefill
        )

    def _open_replica(self) -> Message:
        request_id, ownership = self._ownership()
        layout = self._cluster.instances[-1].engine.info.layout
        return offer_to_proto(ReplicaOffer(request_id, ownership, "decode-7", 7, layout, 64, 5.0))

    def _await_resumed(self) -> Message:
        owner = decode_pb2.AttemptId(**self._owner(), replica=self.rng.choice((0, 1, 2)))
        return decode_pb2.AwaitResumedRequest(owner=owner)

    def _resume(self) -> Message:
        request_id, ownership = self._ownership()
        params = ResolvedParams(max_tokens=10, seed=0)
        incarnation = self.rng.choice(self._incarnations)
        resumption = Resumption(request_id, ownership, tuple(prompt(2, 30)), 2, params, 5.0, None, incarnation)
        return resumption_to_proto(resumption)

    def _submit(self) -> Message:
        params = params_to_proto(SamplingParams(max_tokens=8, seed=0))
        return prefill_pb2.SubmitRequest(**self._owner(), token_ids=prompt(2, 20), params=params, timeout_s=5.0)

    def _generate(self) -> Message:
        client = SessionClient(
            prompt(3), {"max_tokens": 12}, request_id=self.rng.choice(self._ids), secret=OTHER_SECRET, session=1
        )
        client.token_ids = prompt(4, 3)
        client.owner = inference_pb2.OwnerHint(
            prefill_instance_id="prefill-0",
            prefill_incarnation=1,
            decode_instance_id="decode-0",
            decode_incarnation=self.rng.getrandbits(64),
            holder_instance_id="decode-1",
            holder_incarnation=self.rng.getrandbits(64),
        )
        return client.message()


@pytest.mark.timeout(300)
async def test_mutated_messages_are_refused_disturb_no_request_and_leave_nothing(
    cluster: Any, routers: SessionRouters
) -> None:
    seed = random.randrange(2**30)
    print(f"seed {seed}")
    cluster.needs_fake_engines("6,000 calls at the fake engine's speed")
    await cluster.prefill()
    for name in ("decode-0", "decode-1"):
        await cluster.decode(name, **DECODE)
    incarnations = list((await cluster.router("watcher")).incarnations.values())
    served: list[str] = [f"served-{number}" for number in range(4)]

    async def serve(client: int, number: int) -> None:
        asked = SessionClient(prompt(number), {"max_tokens": 60, "ignore_eos": True}, served[client], SECRET)
        while asked.last is None:
            try:
                await asked.finish(routers.generate("router-0", asked.message()))
            except aio.AioRpcError as error:
                # The attacker may use an id that is free.
                if error.code() is not grpc.StatusCode.ALREADY_EXISTS or asked.token_ids:
                    raise
                await asyncio.sleep(0.01)
        assert asked.token_ids == cluster.expected(asked.prompt, 60)

    with structlog.testing.capture_logs() as logs:
        router = await routers.start("router-0")
        attack = PeerAttack(random.Random(seed), cluster, routers._channels["router-0"], served, incarnations)
        await attack.run(MESSAGES, len(served), serve)
        await eventually(lambda: not len(router.table), "the router forgets its requests")
        await cluster.all_free(within_s=60)
        for name, replicas in cluster.replicas.items():
            await eventually(lambda replicas=replicas: not replicas.usage().used_bytes, f"{name} holds none")
            replicas.check_integrity()
        await routers.close()
    errors = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not errors, errors[:5]
