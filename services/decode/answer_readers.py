"""Direct reads: clients stream answers from this decode instance instead of through a router. The router still owns the
request and receives its tokens in larger batches, and all of them once the client stops. Text is detokenized as in
routers, so a client may switch between the two at any token."""

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
"""Limits on parts per message and tokens per part: a message is encoded in one turn of the event loop."""
MAX_READERS = 1024
"""Max clients with an open stream."""


class AnswerTokenizer(Protocol):
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
    """Client's request to read an answer from this decode instance, not its router, after the tokens that it has."""

    reader_id: str
    request_id: str
    session: int
    secret: bytes
    token_ids: Sequence[int]
    characters: int


class ReadPart(NamedTuple):
    """New output of one answer, for a client that reads it from this decode instance and not its router."""

    request_id: str
    session: int
    part: AnswerPart
    ended: bool
    """True for the last part that this instance sends."""


class AnswerReader:
    """Server side of a direct read: sends one answer from this decode instance to one client, without a router."""

    def __init__(self, request: DecodeRequest, stream: "CallerStream", answer: Answer, asked: AnswerAsked) -> None:
        """stream: shared by the client's answers. answer: detokenizer state after the tokens that the client has."""
        self.request = request
        self._stream = stream
        self._answer = answer
        self._next_index = len(asked.token_ids)
        self._session = asked.session
        self._left = False

    def changed(self) -> None:
        """Schedule a message to the client after the request's log of tokens has grown or ended."""
        self._stream.add(self)

    def leave(self) -> None:
        """Detach the client from the answer; output so far is still sent to it. Idempotent."""
        if not self._left:
            self._pull()
            self._left = True
            self.request.reader = None
            self._stream.add(self)

    def take(self) -> ReadPart:
        """Return unread output, up to the size limit of one message part, and schedule the rest."""
        has_rest = not self._left and self._pull(_MOST_PART_TOKENS)
        answer = self._answer
        part = answer.take()
        ended = self._left or answer.stopped or self.request.log.has_ended
        if answer.has_output or (has_rest and not answer.stopped):
            self._stream.add(self)
            ended = False
        return ReadPart(self.request.request_id, self._session, part, ended)

    def _pull(self, most_tokens: int | None = None) -> bool:
        """Detokenize up to `most_tokens` new tokens of the request's log (None: all). Returns True if more remain."""
        log = self.request.log
        tokens = log.token_ids[self._next_index - log.first_index :]
        if log.end.finish is FinishReason.STOP:
            # The router sends the last token with the end. A client with the token alone would attach again.
            tokens = tokens[:-1]
        if taken := tokens[:most_tokens]:
            self._next_index += len(taken)
            self._answer.append(taken, (), None, 0.0)
        return len(taken) < len(tokens)


class CallerStream(Feed[AnswerReader]):
    """Stream to a client that reads answers from this decode instance. Its backlog is at most their unread rest."""

    def __init__(self, reader_id: str) -> None:
        super().__init__()
        self.reader_id = reader_id
        self.readers: dict[DecodeRequest, AnswerReader] = {}


class AnswerReaders:
    """Streams of all clients that read answers directly from one decode instance. Not thread-safe."""

    def __init__(
        self,
        find: Callable[[str], DecodeRequest | None],
        send: Callable[[DecodeRequest], None],
        tokenizer: AnswerTokenizer | None,
        count_read: Callable[[int], object],
    ) -> None:
        """find: returns a running request by its id. send: sends a request's unsent tokens to its router. tokenizer:
        None disables direct reads. count_read: called with the number of tokens of each message to a client."""
        self._find = find
        self._send = send
        self._tokenizer = tokenizer
        self._count_read = count_read
        self._streams: dict[str, CallerStream] = {}
        self._turn = asyncio.Lock()
        """Held while a long prefix of an answer is detokenized, over several turns of the event loop."""

    @property
    def count(self) -> int:
        """Number of clients with an open stream."""
        return len(self._streams)

    def open(self, reader_id: str) -> CallerStream:
        """Open a client's stream and end its earlier one. Raises Unsupported without a tokenizer, InvalidArgument for
        an id of a wrong length, and Unavailable when MAX_READERS is reached."""
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
        return stream

    def close(self, stream: CallerStream) -> None:
        """End a client's stream; routers send the rest of its answers. Idempotent."""
        if self._streams.get(stream.reader_id) is stream:
            del self._streams[stream.reader_id]
        stream.close()
        for reader in tuple(stream.readers.values()):
            self._end(stream, reader)

    async def read(self, asked: AnswerAsked) -> None:
        """Add an answer to its client's stream, in place of another client that reads it from this instance. Raises
        InvalidArgument (wrong secret), RequestNotFound (unknown request, session or token position), Unsupported
        (log-probabilities were requested) and Unavailable (the client has no stream)."""
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
        # The request may have ended during the await.
        stream, request, _ = self._check(asked)
        if request.reader is not None:
            request.reader.leave()
        reader = request.reader = AnswerReader(request, stream, answer, asked)
        stream.readers[request] = reader
        reader.changed()
        # Inform the router at once that the answer is read here.
        self._send(request)

    def _check(self, asked: AnswerAsked) -> tuple["CallerStream", DecodeRequest, AnswerTokenizer]:
        stream, tokenizer = self._streams.get(asked.reader_id), self._tokenizer
        if stream is None or tokenizer is None:
            raise Unavailable("the reader has no stream here")
        request = self._find(asked.request_id)
        if request is None or request.ownership.term.session != asked.session:
            raise RequestNotFound(asked.request_id)
        if not asked.secret or not compare_digest(asked.secret, request.ownership.secret):
            raise wrong_secret()
        log = request.log
        if not log.first_index <= len(asked.token_ids) <= log.next_index:
            raise RequestNotFound(asked.request_id, f"its token {len(asked.token_ids)} is not drawn here")
        if request.engine_request.params.logprobs is not None:
            raise Unsupported("an answer with log-probabilities is read at its router")
        return stream, request, tokenizer

    async def next_parts(self, stream: CallerStream, beat_s: float = BEAT_S) -> list[ReadPart]:
        """Return new output for one message, one part per answer, after waiting up to `beat_s` seconds for it."""
        parts = []
        for reader in await stream.take(beat_s, _MOST_PARTS):
            read = reader.take()
            if read.ended:
                self._end(stream, reader)
            if read.ended or read.part.token_ids or read.part.text:
                parts.append(read)
        if parts:
            self._count_read(sum(len(read.part.token_ids) for read in parts))
        return parts

    def _end(self, stream: CallerStream, reader: AnswerReader) -> None:
        request = reader.request
        if stream.readers.get(request) is reader:
            del stream.readers[request]
        if request.reader is reader:
            request.reader = None
            self._send(request)
