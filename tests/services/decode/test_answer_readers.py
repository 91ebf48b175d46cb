"""Direct reads of answers at a decode instance: permissions, content, and what the router gets meanwhile."""

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from kaveri.domain.owner import Ownership, Term
from kaveri.domain.sampling import FinishReason
from kaveri.engine.contract import TokenStep
from kaveri.errors import InvalidArgument, RequestNotFound, Unavailable, Unsupported
from kaveri.feeds.feed import RouterFeeds
from kaveri.lives.decoding import RequestTimes
from kaveri.models import KAVERI_TINY, resolve_model
from kaveri.text.answer import Answer
from kaveri.text.tokenizer import ModelTokenizer
from services.decode.answer_readers import AnswerAsked, CallerStream, ReadPart
from services.decode.metrics import DecodeMetrics
from services.decode.owners import RequestOwners
from services.decode.requests import READ_HERE_TOKENS, DecodeRequest
from tests.services.decode.built import WAIT_S, built_request, next_batch

READER = "reader-of-the-test"
SECRET = b"s" * 16
ROUTER = "router"
FIRST = 65


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(KAVERI_TINY)


class AnswerReadHere:
    def __init__(self, tokenizer: ModelTokenizer | None, **params: Any) -> None:
        self.params = params
        self.metrics = DecodeMetrics(CollectorRegistry())
        self.owners = RequestOwners(10.0, lambda name: None, self.metrics, tokenizer, RouterFeeds(10.0))
        self.readers = self.owners.readers
        self.router = self.owners.feeds.open(ROUTER)
        self.request = self.add("a")

    def add(self, request_id: str) -> DecodeRequest:
        request = built_request(request_id, Ownership(Term(2, 1), ROUTER, SECRET), **self.params)
        self.owners.add(request)
        return request

    async def ask(self, **changes: Any) -> None:
        asked = AnswerAsked(READER, "a", 2, SECRET, [FIRST], 1)._replace(**changes)
        await self.readers.read(asked)

    def draw(self, index: int, finish: FinishReason | None = None, request: DecodeRequest | None = None) -> None:
        times = RequestTimes(0.1, 0.2, 0) if finish is not None else None
        request = request or self.request
        self.owners.gain(
            request, TokenStep(request.engine_request.key, index, FIRST + index % 100, None, finish), times
        )

    async def parts(self, stream: CallerStream) -> list[ReadPart]:
        return await asyncio.wait_for(self.readers.next_parts(stream, 0.01), WAIT_S)

    async def routers(self) -> list[Any]:
        return await next_batch(self.router, 0.01)


async def test_the_caller_gets_each_token_and_the_router_some_at_a_time(tokenizer: ModelTokenizer) -> None:
    reading = AnswerReadHere(tokenizer)
    stream = reading.readers.open(READER)
    await reading.ask()
    (told,) = await reading.routers()
    assert told.read_here
    assert not told.token_ids
    for index in range(1, READ_HERE_TOKENS):
        reading.draw(index)
        (read,) = await reading.parts(stream)
        assert (read.part.first_index, read.part.token_ids) == (index, [FIRST + index])
        assert not read.ended
    assert await reading.routers() == []
    reading.draw(READ_HERE_TOKENS)
    (gained,) = await reading.routers()
    assert gained.token_ids == [FIRST + index for index in range(1, READ_HERE_TOKENS + 1)]
    assert gained.read_here


async def test_a_token_that_ends_the_answer_as_stop_comes_from_the_router_alone(tokenizer: ModelTokenizer) -> None:
    reading = AnswerReadHere(tokenizer)
    stream = reading.readers.open(READER)
    await reading.ask()
    reading.draw(1)
    reading.draw(2, FinishReason.STOP)
    (read,) = await reading.parts(stream)
    assert read.part.token_ids == [FIRST + 1]
    assert read.ended
    (gained,) = await reading.routers()
    assert gained.token_ids == [FIRST + 1, FIRST + 2]
    assert gained.end.finish is FinishReason.STOP
    assert reading.metrics.read_tokens._value.get() == 1


async def test_the_router_sends_the_answer_again_when_the_callers_stream_ends(tokenizer: ModelTokenizer) -> None:
    reading = AnswerReadHere(tokenizer)
    stream = reading.readers.open(READER)
    await reading.ask()
    await reading.routers()
    reading.draw(1)
    reading.readers.close(stream)
    (gained,) = await reading.routers()
    assert gained.token_ids == [FIRST + 1]
    assert not gained.read_here
    reading.draw(2)
    (gained,) = await reading.routers()
    assert gained.token_ids == [FIRST + 2]
    with pytest.raises(Unavailable, match="no stream"):
        await reading.ask()


async def test_only_the_requests_own_caller_in_its_present_session_may_read(tokenizer: ModelTokenizer) -> None:
    reading = AnswerReadHere(tokenizer)
    reading.readers.open(READER)
    for secret in (b"", b"t" * 16):
        with pytest.raises(InvalidArgument, match="secret"):
            await reading.ask(secret=secret)
    with pytest.raises(RequestNotFound):
        await reading.ask(session=1)
    with pytest.raises(RequestNotFound):
        await reading.ask(request_id="b")
    # Its first token comes through the router, and nothing beyond was drawn.
    for token_ids in ([], [FIRST, 1]):
        with pytest.raises(RequestNotFound, match="is not drawn here"):
            await reading.ask(token_ids=token_ids)
    assert reading.request.reader is None
    assert await reading.routers() == []


async def test_an_answer_with_log_probabilities_is_left_to_its_router(tokenizer: ModelTokenizer) -> None:
    reading = AnswerReadHere(tokenizer, logprobs=0)
    reading.readers.open(READER)
    with pytest.raises(Unsupported, match="at its router"):
        await reading.ask()
    assert reading.request.reader is None


async def test_without_a_tokenizer_nothing_is_read_here() -> None:
    with pytest.raises(Unsupported, match="--direct-answers"):
        AnswerReadHere(None).readers.open(READER)


async def test_a_reader_that_others_could_guess_is_refused(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InvalidArgument, match="reader_id"):
        AnswerReadHere(tokenizer).readers.open("short")


async def test_a_stop_text_ends_the_reading_and_the_router_hears_at_once(tokenizer: ModelTokenizer) -> None:
    stop = tokenizer.token_piece(FIRST + 2).text
    reading = AnswerReadHere(tokenizer, stop=(stop,))
    stream = reading.readers.open(READER)
    await reading.ask(characters=0)
    await reading.routers()
    for index in range(1, 4):
        reading.draw(index)
    (read,) = await reading.parts(stream)
    assert read.ended
    assert read.part.token_ids == [FIRST + 1, FIRST + 2]
    (gained,) = await reading.routers()
    assert gained.token_ids == [FIRST + 1, FIRST + 2, FIRST + 3]
    assert not gained.read_here


async def test_special_tokens_are_shown_to_a_reader_of_a_request_that_asked_for_them() -> None:
    plain = AutoTokenizer.from_pretrained(resolve_model(KAVERI_TINY))
    plain.add_special_tokens({"additional_special_tokens": [plain.convert_ids_to_tokens(FIRST + 2)]})
    tokenizer = ModelTokenizer(plain, len(plain))
    texts = {}
    for skips in (True, False):
        reading = AnswerReadHere(tokenizer, skip_special_tokens=skips)
        stream = reading.readers.open(READER)
        await reading.ask(characters=0)
        await reading.routers()
        for index in range(1, 4):
            reading.draw(index)
        texts[skips] = "".join([read.part.text for read in await reading.parts(stream)])
    ids = [FIRST + 1, FIRST + 2, FIRST + 3]
    for skips in (True, False):
        whole = tokenizer.backend.decode([FIRST, *ids], skip_special_tokens=skips)
        assert whole.endswith(texts[skips])
    assert tokenizer.token_piece(FIRST + 2).text in texts[False]
    assert tokenizer.token_piece(FIRST + 2).text not in texts[True]
    tokenizer.close()


async def test_what_is_made_and_read_at_once_is_bounded_for_any_number_of_answers_and_tokens(
    tokenizer: ModelTokenizer,
) -> None:
    reading = AnswerReadHere(tokenizer)
    stream = reading.readers.open(READER)
    names = [f"request-{number}" for number in range(100)]
    for name in names:
        request = reading.add(name)
        await reading.ask(request_id=name)
        for index in range(1, 201):
            reading.draw(index, FinishReason.LENGTH if index == 200 else None, request)
    gained: dict[str, list[int]] = {name: [] for name in names}
    ended: list[str] = []
    while len(ended) < len(names):
        parts = await reading.parts(stream)
        assert 0 < len(parts) <= 32
        assert max(len(read.part.token_ids) for read in parts) <= 64
        for read in parts:
            assert read.part.first_index == 1 + len(gained[read.request_id])
            gained[read.request_id] += read.part.token_ids
            assert read.ended == (len(gained[read.request_id]) == 200)
            ended += [read.request_id] if read.ended else []
    assert ended == names
    assert set(map(tuple, gained.values())) == {tuple(FIRST + index % 100 for index in range(1, 201))}


async def test_callers_that_bring_many_tokens_take_turns(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, most = 0, 0
    original = Answer.go_on_after

    async def counted(self: Answer, *args: Any) -> None:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await original(self, *args)
        working -= 1

    monkeypatch.setattr(Answer, "go_on_after", counted)
    reading = AnswerReadHere(tokenizer)
    reading.readers.open(READER)
    received = [FIRST + index % 100 for index in range(2_001)]
    for name in "bcdef":
        request = reading.add(name)
        for index in range(1, 2_001):
            reading.draw(index, request=request)
    asking = (reading.ask(request_id=name, token_ids=received, characters=0) for name in "bcdef")
    await asyncio.wait_for(asyncio.gather(*asking), WAIT_S)
    assert most == 1
