import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from kaveri.errors import DeadlineExceeded, InvalidArgument
from kaveri.rpc.server import MAX_MESSAGE_BYTES
from kaveri.text.conversation import Conversation
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import inference_pb2, sampling_pb2
from kaveri.v1.inference_pb2 import Message
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import answer, ask, collect, invalid, tokens_of
from tests.support.scripted_ports import plain_channel

FULL = MAX_MESSAGE_BYTES - 1_000
"""Max input bytes of one message, less its framing."""


def text(content: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=content)


def conversation(count: int, role: str = "", content: str = "") -> inference_pb2.GenerateRequest:
    turns = [inference_pb2.Message(role=role, content=content)] * count
    return inference_pb2.GenerateRequest(messages=inference_pb2.Messages(messages=turns))


def params(**fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text="hello", params=sampling_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


HUGE: dict[str, tuple[Callable[[], inference_pb2.GenerateRequest], str]] = {
    "one text": (lambda: text("count the words " * (FULL // 16)), "prompt.text"),
    "one text without a space": (lambda: text("<" * FULL), "prompt.text"),
    "empty messages": (lambda: conversation(700_000), "prompt.messages"),
    "messages of one letter": (lambda: conversation(300_000, "user", "a"), "prompt.messages"),
    "one message": (lambda: conversation(1, "user", "a " * (FULL // 2)), "prompt.messages"),
    "one role": (lambda: conversation(1, "a" * FULL), "prompt.messages[0].role"),
    "a thousand roles": (lambda: conversation(1_000, "a" * (FULL // 1_010)), "prompt.messages[0].role"),
    "token ids": (lambda: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7] * FULL)), "prompt"),
    "stop token ids": (lambda: params(stop_token_ids=[7] * FULL), "params.stop_token_ids"),
    "stop texts": (lambda: params(stop=[""] * (FULL // 2)), "params.stop"),
    "request id": (lambda: inference_pb2.GenerateRequest(text="hello", request_id="a" * FULL), "request_id"),
}


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    """Long leases: instances share this process's event loop, which huge messages block."""
    async with scripted_cluster(tokenizer, 2, 2, lease_ttl_s=30.0) as cluster:
        yield cluster


class Ticks:
    def __init__(self) -> None:
        self.longest_cpu_s = 0.0
        self.turns = 0

    async def count(self) -> None:
        before_cpu_s = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            self.turns += 1
            now_cpu_s = time.thread_time()
            self.longest_cpu_s = max(self.longest_cpu_s, now_cpu_s - before_cpu_s)
            before_cpu_s = now_cpu_s


@pytest.mark.parametrize("case", HUGE)
async def test_huge_input_without_pause_is_refused_and_stops_no_other_stream(
    cluster: ScriptedCluster, case: str
) -> None:
    make, field = HUGE[case]
    message, ticks = make().SerializeToString(), Ticks()
    options = (("grpc.max_send_message_length", -1),)
    async with cluster.router() as router, plain_channel(router.address, options) as channel:
        generate = channel.unary_stream(
            "/kaveri.v1.InferenceService/Generate",
            request_serializer=bytes,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        counting = asyncio.create_task(ticks.count())
        responses, *errors = await asyncio.gather(
            collect(router.ask(max_tokens=200)), *(invalid(collect(generate(message, timeout=60))) for _ in range(4))
        )
        counting.cancel()
    assert tokens_of(responses) == answer((300, 301, 302), 200)
    for error in errors:
        assert error.field == field
        assert error.limit
        assert len(str(error)) < 1_000
    assert len(cluster.taken()) == 1, "none of them was placed"
    # CPU time hardly depends on load. Without bounds one request takes 3 to 16 s; benchmarks/serving/huge_input.py
    # measures the delay of other clients.
    assert ticks.longest_cpu_s < 1.0, ticks.longest_cpu_s


async def test_a_long_text_is_tokenized_while_the_loop_turns(tokenizer: ModelTokenizer) -> None:
    long = "<" * 1_000_000 + " count the words" * 100_000
    ticks = Ticks()
    counting = asyncio.create_task(ticks.count())
    deadline_s = time.monotonic() + 120
    with pytest.raises(InvalidArgument, match="tokens"):
        await tokenizer.encode(long, 300_000, deadline_s)
    assert ticks.turns > 20, "the interpreter is free meanwhile"
    messages = [Message(role="user", content=long[:500_000])] * 4 + [Message(role="user", content="<|end|>" * 10_000)]
    with pytest.raises(InvalidArgument, match="tokens"):
        await tokenizer.encode_chat(Conversation(messages), 300_000, deadline_s)
    counting.cancel()
    assert ticks.longest_cpu_s < 0.5, ticks.longest_cpu_s


async def test_as_much_input_as_fits_is_taken(tokenizer: ModelTokenizer) -> None:
    deadline_s = time.monotonic() + 60
    longest = max(tokenizer.backend.get_vocab(), key=lambda token: len(token.encode()))
    text = tokenizer.backend.decode([tokenizer.backend.token_to_id(longest)], skip_special_tokens=False)
    count = len(tokenizer.backend.encode(text * 50).ids)
    assert len(await tokenizer.encode(text * 50, count, deadline_s)) == count
    with pytest.raises(InvalidArgument) as caught:
        await tokenizer.encode(text * 50, count - 1, deadline_s)
    assert caught.value.field in ("prompt", "prompt.text")
    messages = [Message(role="user", content="a")] * 100
    ids, _ = await tokenizer.encode_chat(Conversation(messages), 10_000, deadline_s)
    assert (await tokenizer.encode_chat(Conversation(messages), len(ids), deadline_s))[0] == ids
    with pytest.raises(InvalidArgument) as caught:
        await tokenizer.encode_chat(Conversation(messages), len(ids) - 1, deadline_s)
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidArgument) as caught:
        await tokenizer.encode_chat(Conversation(messages), 99, deadline_s)
    assert (caught.value.field, caught.value.limit) == ("prompt.messages", "at most 99 messages")
    half = [Message(role="user", content="a" * (50 * tokenizer.longest_token_bytes + 1))]
    with pytest.raises(InvalidArgument, match="bytes") as caught:
        await tokenizer.encode_chat(Conversation(2 * half), 100, deadline_s)
    assert caught.value.field == "prompt.messages"


async def test_tokenizing_ends_with_the_requests_deadline(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(DeadlineExceeded):
        await tokenizer.encode("count the words " * 50_000, 1_000_000, time.monotonic() + 0.001)


async def test_token_ids_in_several_slices_arrive_whole(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.intake._SLICE_TOKENS", 100)
    prompt = tuple(300 + number % 1_000 for number in range(1_050))
    async with cluster.router() as router:
        responses = await collect(router.stub.Generate(ask(prompt, max_tokens=3), timeout=20))
        assert tokens_of(responses) == answer(prompt, 3)
        assert tuple(cluster.taken()[0].token_ids) == prompt
        outside = ask((*prompt, 1_536), max_tokens=3)
        with pytest.raises(grpc.aio.AioRpcError, match="1536"):
            await collect(router.stub.Generate(outside, timeout=20))
