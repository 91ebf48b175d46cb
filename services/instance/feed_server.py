"""FeedService over gRPC: streams tokens and prompt reports to routers, and answers to clients; attaches and aborts."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from grpc import aio

from kaveri.errors import KaveriError, SlowReader, Unavailable
from kaveri.feeds.feed import RouterFeeds
from kaveri.hosting.read_limit import read_limit
from kaveri.telemetry.logs import get_logger
from kaveri.text.answer import MAX_OUTPUT_BYTES
from kaveri.timeouts import BEAT_S
from kaveri.v1 import decode_pb2, feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceServicer
from kaveri.wire.attempts import (
    attached_to_proto,
    attachment_from_proto,
    check_router_id,
    ownership_from_proto,
    term_from_proto,
)
from kaveri.wire.status import abort
from services.decode.answer_readers import AnswerAsked, ReadPart
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.owners import Awaited
from services.decode.requests import DecodeRequest, GainedTokens
from services.decode.server import messages_of, tokens_to_proto
from services.prefill.requests import PrefillRequest, PromptNews
from services.prefill.role import PrefillRole
from services.prefill.server import reports_of

SERVICE_NAME = feed_pb2.DESCRIPTOR.services_by_name["FeedService"].full_name
_BEAT = feed_pb2.FollowResponse()
_QUIET = feed_pb2.FollowResponse(quiet=True)
SLOW_READER_S = 10.0
"""Limit on the time to write one message to a client. Slower clients get their answers from routers."""
_REPORTS_TOGETHER = 64
"""Max reports in one message. One with log-probabilities of a prompt ends its message: it is large."""


class FeedServer(FeedServiceServicer):
    """gRPC FeedService of one instance, for routers and for clients that read answers from it."""

    def __init__(
        self,
        feeds: RouterFeeds,
        prefill: PrefillRole,
        decode: DecodeInstance,
        incarnation: int,
        holder: ReplicaHolder | None = None,
    ) -> None:
        """feeds: streams of both phases to routers. holder: replicas of other instances; None: replication is off."""
        self._feeds = feeds
        self._prefill = prefill
        self._decode = decode
        self._incarnation = incarnation
        self._holder = holder

    async def Follow(  # type: ignore[override]  # noqa: N802
        self, request: feed_pb2.FollowRequest, context: aio.ServicerContext[Any, Any]
    ) -> None:
        # Writes messages instead of yielding them, to limit writes to slow clients.
        follow = self._follow_text if request.form == feed_pb2.FORM_TEXT else self._follow_tokens
        try:
            await follow(request, context)
        except KaveriError as error:
            await abort(context, error)

    async def Attach(  # noqa: N802
        self, request: feed_pb2.AttachRequest, context: aio.ServicerContext[Any, Any]
    ) -> feed_pb2.AttachResponse:
        attached = None
        try:
            if request.incarnation not in (0, self._incarnation):
                raise Unavailable("the instance has restarted")
            if request.form == feed_pb2.FORM_TEXT:
                await self._decode.owners.readers.read(_asked_from_proto(request))
            else:
                attachment = attachment_from_proto(request)
                phase = self._prefill if attachment.at_prefill else self._decode.owners
                attached = attached_to_proto(phase.attach(attachment))
        except KaveriError as error:
            await abort(context, error)
        return feed_pb2.AttachResponse(attached=attached)

    async def Abort(  # noqa: N802
        self, request: feed_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> feed_pb2.AbortResponse:
        for name in request.attempts:
            if request.give_back:
                self._prefill.give_back(name.request_id, ownership_from_proto(name))
            else:
                self._abort(name, request.by_router)
        return feed_pb2.AbortResponse()

    async def _follow_tokens(self, request: feed_pb2.FollowRequest, context: aio.ServicerContext[Any, Any]) -> None:
        router_id = request.router_id
        check_router_id(router_id)
        unknown = self._repeat(request)
        feed = self._feeds.open(router_id)
        context.add_done_callback(lambda _: self._feeds.close(feed))  # type: ignore[arg-type]
        for notice in unknown:
            feed.add(notice)
        await context.write(feed_pb2.FollowResponse(incarnation=self._incarnation))
        prefill, decode = self._prefill, self._decode.owners
        is_quiet = False
        while not feed.ended:
            news = feed.drain()
            if not news:
                beats = prefill.has_requests_of(router_id) or decode.has_requests_of(router_id)
                if not (beats or is_quiet):
                    await context.write(_QUIET)
                    is_quiet = True
                    continue
                news = await feed.take(BEAT_S if beats else None)
                if not news and (beats or prefill.has_requests_of(router_id) or decode.has_requests_of(router_id)):
                    await context.write(_BEAT)
                    is_quiet = False
            for message in _messages(news):
                await context.write(message)
                is_quiet = False

    async def _follow_text(self, request: feed_pb2.FollowRequest, context: aio.ServicerContext[Any, Any]) -> None:
        readers = self._decode.owners.readers
        stream = readers.open(request.reader_id)
        context.add_done_callback(lambda _: readers.close(stream))  # type: ignore[arg-type]
        try:
            async with read_limit(SLOW_READER_S) as writes:
                await context.write(feed_pb2.FollowResponse(incarnation=self._incarnation))
                while not stream.closed:
                    for message in _answer_messages(await readers.next_parts(stream)):
                        writes.ticks = 0
                        await context.write(message)
                        writes.ticks = None
        except SlowReader as error:
            readers.close(stream)
            get_logger().warning("reader_too_slow", slow_reader_s=error.limit_s)
            raise

    def _abort(self, name: decode_pb2.AttemptId, by_router: bool) -> None:
        ownership = ownership_from_proto(name)
        # At prefill first: otherwise the request would be adopted in between.
        if by_router:
            self._prefill.abort(name.request_id, ownership)
        # The owner of a copy means that copy, and a prefill instance that gives room back knows nothing of copies.
        if not name.replica:
            self._decode.abort(name.request_id, ownership, by_router, name.term.placement)
        if self._holder is not None and not name.term.placement:
            self._holder.close(name.request_id, ownership, name.replica)

    def _repeat(self, request: feed_pb2.FollowRequest) -> list[Hashable]:
        """Queue lost messages of the requests that a new stream names again. Returns errors for requests that are not
        here, or belong to another router."""
        awaited = [
            Awaited(named.request_id, term_from_proto(named.term), named.next_index)
            for named in request.requests
            if not named.at_prefill
        ]
        prompts = {named.request_id: term_from_proto(named.term) for named in request.requests if named.at_prefill}
        router_id = request.router_id
        return [*self._decode.owners.repeat(router_id, awaited), *self._prefill.repeat(router_id, prompts)]


def _messages(news: Sequence[Hashable]) -> Iterator[feed_pb2.FollowResponse]:
    gained: list[GainedTokens] = []
    for each in news:
        if isinstance(each, DecodeRequest):
            gained.append(each.log.take(each.request_id, each.ownership.term, each.reader is not None))
        elif isinstance(each, GainedTokens):
            gained.append(each)
    for entries in messages_of(gained):
        yield feed_pb2.FollowResponse(requests=map(tokens_to_proto, entries))
    message = feed_pb2.FollowResponse()
    for each in news:
        if isinstance(each, PrefillRequest | PromptNews):
            for report in reports_of(
                each if isinstance(each, PromptNews) else each.log.take(each.request_id, each.ownership.term)
            ):
                message.reports.append(report)
                if report.HasField("prompt_logprobs") or len(message.reports) >= _REPORTS_TOGETHER:
                    yield message
                    message = feed_pb2.FollowResponse()
    if message.reports:
        yield message


def _asked_from_proto(request: feed_pb2.AttachRequest) -> AnswerAsked:
    return AnswerAsked(
        request.reader_id,
        request.request_id,
        request.term.session,
        request.secret,
        request.token_ids,
        request.characters,
    )


def _answer_messages(parts: Sequence[ReadPart]) -> Iterator[feed_pb2.FollowResponse]:
    """Encode parts of answers into messages to a client; without parts, one heartbeat."""
    if not parts:
        yield _BEAT
    message, room = feed_pb2.FollowResponse(), 2 * MAX_OUTPUT_BYTES
    for read in parts:
        size = _part_to_proto(read, message.parts.add())
        room -= size
        if room <= 0:
            yield message
            message, room = feed_pb2.FollowResponse(), 2 * MAX_OUTPUT_BYTES
    if message.parts:
        yield message


def _part_to_proto(read: ReadPart, message: feed_pb2.AnswerPart) -> int:
    """Copy part of an answer into `message`. Returns the message's approximate size in bytes."""
    part, response = read.part, message.response
    message.request_id = read.request_id
    message.session = read.session
    message.ended = read.ended
    response.index = part.first_index
    response.first_character = part.first_character
    response.token_ids.extend(part.token_ids)
    response.text = part.text
    return 64 + 5 * len(part.token_ids) + 4 * len(part.text)
