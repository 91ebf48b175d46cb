"""Answers that callers read here themselves: one stream per caller, small messages after each engine step.

The request stays its router's. While a caller reads, the router gets the tokens in larger pieces (RequestOwners.gain),
and all of them when the caller stops reading. A reader has its own text of the answer, made as routers make it, so that
a caller may change between the two at any token.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from hmac import compare_digest
from typing import NamedTuple, Protocol

from kaveri.domain.sampling import FinishReason
from kaveri.errors import InvalidArgument, RequestNotFound, Unavailable, Unsupported
from kaveri.feeds.feed import Feed
from kaveri.text.answer import SLICE_TOKENS, Answer, AnswerPart
from kaveri.text.detokenizer import Detokenizer
from kaveri.timeouts import BEAT_S
from kaveri.wire.attempts import wrong_secret
from services.decode.requests import DecodeRequest

MIN_READER_ID_CHARACTERS = 16
MAX_READER_ID_CHARACTERS = 128
_MOST_PARTS = 32
_MOST_PART_TOKENS = 64
"""Most parts of one message, and most tokens of a part. Decode makes the text of a message, and a caller takes the
message in, in one turn of their event loops each. The rest follows in the next messages."""
MAX_READERS = 1024
"""Callers that have a stream."""


class AnswerTokenizer(Protocol):
    """What readers need of the model's tokenizer."""

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        min_tokens: int = 0,
        known_characters: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> Detokenizer: ...


class AnswerAsked(NamedTuple):
    """Which answer a caller reads, and what it has of it."""

    reader_id: str
    request_id: str
    session: int
    secret: bytes
    token_ids: Sequence[int]
    characters: int


class ReadPart(NamedTuple):
    """What one answer gained."""

    request_id: str
    session: int
    part: AnswerPart
    ended: bool
    """Nothing more of it comes from here."""


class AnswerReader:
    """One answer as one caller reads it."""

    def __init__(self, request: DecodeRequest, stream: "CallerStream", answer: Answer, asked: AnswerAsked) -> None:
        """answer: behind what the caller has."""
        self.request = request
        self._stream = stream
        self._answer = answer
        self._next_index = len(asked.token_ids)
        self._session = asked.session
        self._left = False

    def changed(self) -> None:
        """The request's log has grown, or has ended."""
        self._stream.feed.add(self)

    def leave(self) -> None:
        """The request goes on without this caller, or was aborted. What was gained so far is still sent. Idempotent."""
        if not self._left:
            self._pull()
            self._left = True
            self.request.reader = None
            self._stream.feed.add(self)

    def take(self) -> ReadPart:
        """What was not sent; the first part of it when that would be too large for a message."""
        has_rest = not self._left and self._pull(_MOST_PART_TOKENS)
        answer = self._answer
        part = answer.take()
        ended = self._left or answer.stopped or self.request.log.has_ended
        if answer.has_output or (has_rest and not answer.stopped):
            self._stream.feed.add(self)
            ended = False
        return ReadPart(self.request.request_id, self._session, part, ended)

    def _pull(self, most_tokens: int | None = None) -> bool:
        """Takes in what the request's log has gained, at most so many tokens of it. Returns whether there are more."""
        log = self.request.log
        tokens = log.token_ids[self._next_index - log.first_index :]
        if log.end.finish is FinishReason.STOP:
            # The router sends it with the end. A caller that had it alone would re-attach behind the end of the answer.
            tokens = tokens[:-1]
        if taken := tokens[:most_tokens]:
            self._next_index += len(taken)
            self._answer.append(taken, (), None, 0.0)
        return len(taken) < len(tokens)


class CallerStream:
    """One caller's subscription. What a slow caller does not take is joined: at most the rest of an answer waits."""

    def __init__(self, reader_id: str) -> None:
        self.reader_id = reader_id
        self.feed: Feed[AnswerReader] = Feed()

    async def next_batch(self, beat_s: float = BEAT_S) -> list[AnswerReader]:
        """Take the first readers that have something; wait beat_s seconds for some."""
        return await self.feed.take(beat_s, _MOST_PARTS)


class AnswerReaders:
    """The callers' streams of one decode instance. For one event loop."""

    def __init__(
        self,
        find: Callable[[str], DecodeRequest | None],
        send: Callable[[DecodeRequest], None],
        tokenizer: AnswerTokenizer | None,
        count_read: Callable[[int], object],
    ) -> None:
        """find: a request that runs here, by its id. send: gives a request's router what it was not sent. tokenizer:
        None: answers are not read here. count_read: called with the number of tokens of each message."""
        self._find = find
        self._send = send
        self._tokenizer = tokenizer
        self._count_read = count_read
        self._streams: dict[str, CallerStream] = {}
        self._readers: dict[CallerStream, dict[DecodeRequest, AnswerReader]] = {}
        self._turn = asyncio.Lock()
        """Held while a caller's tokens are taken in that need several slices of the event loop."""

    @property
    def count(self) -> int:
        """Callers that have a stream."""
        return len(self._streams)

    def open(self, reader_id: str) -> CallerStream:
        """A stream for the caller. An older one of the same caller ends.

        Raises Unsupported without a tokenizer, InvalidArgument, and Unavailable when there are MAX_READERS."""
        if self._tokenizer is None:
            raise Unsupported("answers are not read here: --direct-answers off")
        if not MIN_READER_ID_CHARACTERS <= len(reader_id) <= MAX_READER_ID_CHARACTERS:
            limit = f"{MIN_READER_ID_CHARACTERS} to {MAX_READER_ID_CHARACTERS} characters long"
            raise InvalidArgument("reader_id", f"{len(reader_id)} characters", limit)
        former = self._streams.get(reader_id)
        if former is not None:
            self.close(former)
        elif len(self._streams) >= MAX_READERS:
            raise Unavailable(f"{MAX_READERS} callers read here")
        stream = self._streams[reader_id] = CallerStream(reader_id)
        self._readers[stream] = {}
        return stream

    def close(self, stream: CallerStream) -> None:
        """The stream is broken, cancelled or too slow: the routers of what it has read send the rest. Idempotent."""
        if self._streams.get(stream.reader_id) is stream:
            del self._streams[stream.reader_id]
        stream.feed.close()
        for request, reader in self._readers.pop(stream, {}).items():
            self._end(request, reader)

    async def read(self, asked: AnswerAsked) -> None:
        """Adds an answer to its caller's stream, in place of another reader of it.

        Raises InvalidArgument (the secret), RequestNotFound (it is not here in that session, or not with those tokens),
        Unsupported (it has log-probabilities) and Unavailable (the caller has no stream)."""
        stream, request, tokenizer = self._check(asked)
        params, prompt_ids = request.engine_request.params, request.engine_request.token_ids
        detokenizer = tokenizer.detokenizer(
            prompt_ids[: request.engine_request.prompt_tokens],
            params.stop,
            params.min_tokens,
            asked.characters,
            skip_special_tokens=params.skip_special_tokens,
        )
        answer = Answer(detokenizer)
        async with self._turn if len(asked.token_ids) > SLICE_TOKENS else contextlib.nullcontext():
            await answer.go_on_after(asked.token_ids, asked.characters, params.stop_token_ids)
        # It may have left meanwhile.
        stream, request, _ = self._check(asked)
        if request.reader is not None:
            request.reader.leave()
        reader = request.reader = AnswerReader(request, stream, answer, asked)
        self._readers[stream][request] = reader
        reader.changed()
        # The router hears at once that the answer is read here.
        self._send(request)

    def _check(self, asked: AnswerAsked) -> tuple["CallerStream", DecodeRequest, AnswerTokenizer]:
        """The caller's stream, and what it asks for. Raises as read()."""
        stream, tokenizer = self._streams.get(asked.reader_id), self._tokenizer
        if stream is None or tokenizer is None:
            raise Unavailable("the reader has no stream here")
        request = self._find(asked.request_id)
        if request is None or request.owner.session != asked.session:
            raise RequestNotFound(asked.request_id)
        if not asked.secret or not compare_digest(asked.secret, request.ownership.secret):
            raise wrong_secret()
        log = request.log
        if not log.first_index <= len(asked.token_ids) <= log.next_index:
            raise RequestNotFound(asked.request_id, f"its token {len(asked.token_ids)} is not drawn here")
        if request.engine_request.params.logprobs is not None:
            raise Unsupported("an answer with log-probabilities is read at its router")
        return stream, request, tokenizer

    def take(self, stream: CallerStream, batch: Sequence[AnswerReader]) -> list[ReadPart]:
        """What the readers of a batch have to send."""
        parts = []
        for reader in batch:
            read = reader.take()
            if read.ended:
                request = reader.request
                if self._readers.get(stream, {}).get(request) is reader:
                    del self._readers[stream][request]
                self._end(request, reader)
            if read.ended or read.part.token_ids or read.part.text:
                parts.append(read)
        if parts:
            self._count_read(sum(len(read.part.token_ids) for read in parts))
        return parts

    def _end(self, request: DecodeRequest, reader: AnswerReader) -> None:
        if request.reader is reader:
            request.reader = None
            # Its router gets what it lacks, without delay from now on.
            self._send(request)
