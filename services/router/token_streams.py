"""One StreamTokens subscription per decode instance: demultiplexes tokens to requests, and tells whose stream broke."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine

from grpc import aio

from kaveri.domain.view import ClusterView, InstanceRecord, Role
from kaveri.errors import InternalError, KaveriError, Unavailable
from kaveri.telemetry.logs import get_logger
from kaveri.v1 import decode_pb2
from kaveri.wire.status import error_of
from services.router.channels import Channels
from services.router.requests import Attempt, RequestTable

CONNECT_GRACE_S = 2.0
"""A request may be placed on an instance before its stream stands, for so long; then the attempt counts as lost."""
ABORT_TIMEOUT_S = 2.0
_ABORT_AGAIN_S = ABORT_TIMEOUT_S
"""Tokens that come so long after an Abort show that it was lost, or came before the request."""
_ABORTED_COUNT = 4096
"""Aborts that are remembered: more than are on their way at once."""
_RECONNECT_MIN_S = 0.05
_RECONNECT_MAX_S = 1.0


class TokenStreams:
    """The subscriptions of one router, one for each instance in the view that decodes."""

    def __init__(
        self,
        stream_id: str,
        channels: Channels,
        table: RequestTable,
        relayed: Callable[[int], object],
    ) -> None:
        """stream_id: the router_id of the decode protocol. relayed: called with each message's number of tokens."""
        self._stream_id = stream_id
        self._channels = channels
        self._table = table
        self._relayed = relayed
        self._subscriptions: dict[str, _Subscription] = {}
        # When each of the newest aborts was sent, by (instance, request, attempt), and those under way that no request
        # waits for.
        self._aborted: OrderedDict[tuple[str, str, int], float] = OrderedDict()
        self._disowning: dict[asyncio.Task[None], None] = {}

    def update(self, view: ClusterView) -> None:
        """Subscribes to new instances; drops those that left or began a new life, losing their attempts."""
        records = {
            instance_id: status.record
            for instance_id, status in view.instances.items()
            if status.record.role in (Role.DECODE, Role.COLOCATED)
        }
        for instance_id, subscription in tuple(self._subscriptions.items()):
            record = records.get(instance_id)
            if record is None:
                # Without a record prefill has named it. Its attempts are lost after the grace.
                if subscription.record is not None or not subscription.attempts:
                    subscription.stop("has left the cluster")
                    del self._subscriptions[instance_id]
            elif subscription.record is None:
                subscription.start(record, self._follow(subscription, record))
            elif (record.incarnation, record.address) != (subscription.record.incarnation, subscription.record.address):
                subscription.stop("has restarted")
                del self._subscriptions[instance_id]
        for instance_id, record in records.items():
            if instance_id not in self._subscriptions:
                subscription = self._subscriptions[instance_id] = _Subscription(instance_id)
                subscription.start(record, self._follow(subscription, record))

    def place(self, attempt: Attempt, instance_id: str, incarnation: int, stream_losses: int | None = None) -> None:
        """Ties an attempt to the life of a decode instance that reserved room: if its stream breaks, the attempt is
        lost. So it is, at once, when the view names another life, or the stream began after a loss of tokens.

        stream_losses: the instance's count when it reserved. None: it has reserved nothing yet.
        """
        former = self._subscriptions.get(attempt.decode_instance_id)
        if former is not None and former.instance_id != instance_id:
            # Its push there has failed: what becomes of that instance is nothing to the attempt any more.
            former.attempts.pop(attempt, None)
        subscription = self._subscriptions.get(instance_id)
        if subscription is None:
            # Prefill saw the instance first; the view will name it here as well, or the grace ends.
            subscription = self._subscriptions[instance_id] = _Subscription(instance_id)
        attempt.place_on(instance_id, incarnation, subscription.losses if stream_losses is None else stream_losses)
        subscription.place(attempt)

    async def abort(self, attempt: Attempt) -> None:
        """Tells the decode instance of an attempt to end it, or all of them when nobody has said which it is. Best
        effort: a lost instance has ended it already."""
        named = attempt.decode_instance_id
        records = [
            subscription.record
            for subscription in self._subscriptions.values()
            if subscription.record is not None and named in ("", subscription.instance_id)
        ]
        await asyncio.gather(*(self._abort_at(record, attempt.request_id, attempt.number) for record in records))

    def _disown(self, record: InstanceRecord, update: decode_pb2.RequestTokens) -> None:
        """Has an instance end an attempt that is of no use here any more, unless that has just been asked of it."""
        if update.finish_reason or update.error:
            return
        sent_s = self._aborted.get((record.instance_id, update.request_id, update.attempt))
        if sent_s is None or time.monotonic() - sent_s > _ABORT_AGAIN_S:
            task = asyncio.create_task(self._abort_at(record, update.request_id, update.attempt))
            self._disowning[task] = None
            task.add_done_callback(lambda ended: self._disowning.pop(ended, None))

    async def _abort_at(self, record: InstanceRecord, request_id: str, number: int) -> None:
        self._aborted[record.instance_id, request_id, number] = time.monotonic()
        if len(self._aborted) > _ABORTED_COUNT:
            self._aborted.popitem(last=False)
        name = decode_pb2.AttemptId(request_id=request_id, attempt=number, router_id=self._stream_id)
        message = decode_pb2.AbortRequest(attempts=[name], by_router=True)
        with contextlib.suppress(aio.AioRpcError):
            await self._channels.decode(record.address).Abort(message, timeout=ABORT_TIMEOUT_S)

    def check_integrity(self) -> None:
        """Asserts, while no request is in flight, that no attempt is tied to any stream."""
        for subscription in self._subscriptions.values():
            assert not subscription.attempts, (subscription.instance_id, subscription.attempts)

    async def close(self) -> None:
        """Ends all subscriptions; their attempts are lost."""
        tasks = [subscription.stop("is not followed any more") for subscription in self._subscriptions.values()]
        self._subscriptions.clear()
        await asyncio.gather(*(task for task in tasks if task is not None), *self._disowning, return_exceptions=True)

    async def _follow(self, subscription: "_Subscription", record: InstanceRecord) -> None:
        backoff_s = _RECONNECT_MIN_S
        log = get_logger().bind(decode_instance_id=record.instance_id, incarnation=record.incarnation)
        while True:
            try:
                await self._read(subscription, record)
                error: KaveriError = Unavailable(f"decode instance {record.instance_id} ended its token stream")
            except aio.AioRpcError as rpc_error:
                error = error_of(rpc_error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                error = Unavailable(f"the channel to decode instance {record.instance_id} was closed")
            except Exception as unexpected:
                log.exception("token_stream_failed", requests=len(subscription.attempts))
                error = Unavailable(f"the token stream failed in the router: {unexpected!r}")
            if subscription.connected:
                backoff_s = _RECONNECT_MIN_S
                log.warning("token_stream_broken", error=str(error), requests=len(subscription.attempts))
            subscription.disconnect(f"broke its token stream: {error}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _RECONNECT_MAX_S)

    async def _read(self, subscription: "_Subscription", record: InstanceRecord) -> None:
        call = self._channels.decode(record.address).StreamTokens(
            decode_pb2.StreamTokensRequest(router_id=self._stream_id)
        )
        try:
            async for message in call:
                if not subscription.connected:
                    if message.incarnation != record.incarnation:
                        # Another life answers at this address; the view will bring its record.
                        return
                    subscription.connect(message.stream_losses)
                token_count = 0
                for update in message.requests:
                    token_count += len(update.token_ids)
                    self._deliver(record, update)
                if token_count:
                    self._relayed(token_count)
        finally:
            call.cancel()

    def _deliver(self, record: InstanceRecord, update: decode_pb2.RequestTokens) -> None:
        entry = self._table.get(update.request_id)
        if entry is None or (entry.attempt is not None and update.attempt < entry.attempt.number):
            # Its placement may have come after the request or the attempt had ended.
            self._disown(record, update)
            return
        try:
            entry.take_tokens(record.instance_id, update)
        except Exception:  # One bad answer must not end the stream of all others.
            get_logger().exception(
                "request_failed_unexpectedly",
                request_id=update.request_id,
                attempt=update.attempt,
                decode_instance_id=record.instance_id,
            )
            entry.fail(InternalError(f"the router could not take in the tokens of request {update.request_id!r}"))


class _Subscription:
    """One decode instance: its record once the view names it, its stream, the attempts placed there."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.record: InstanceRecord | None = None
        self.connected = False
        self.losses = 0
        """The instance's count of stream losses when the last stream began."""
        # Ordered: they are lost in the order in which they were placed.
        self.attempts: dict[Attempt, None] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, record: InstanceRecord, follow: Coroutine[None, None, None]) -> None:
        self.record = record
        for attempt in tuple(self.attempts):
            self._check_life(attempt)
        self._task = asyncio.create_task(follow, name=f"tokens of {self.instance_id}")

    def stop(self, reason: str) -> asyncio.Task[None] | None:
        """Ends the stream and loses the attempts; returns the task that ends."""
        if self._task is not None:
            self._task.cancel()
        self.disconnect(reason)
        return self._task

    def connect(self, losses: int) -> None:
        self.connected = True
        self.losses = losses
        for attempt in tuple(self.attempts):
            self._check_losses(attempt)

    def disconnect(self, reason: str) -> None:
        self.connected = False
        lost, self.attempts = self.attempts, {}
        for attempt in lost:
            attempt.lose(Unavailable(f"decode instance {self.instance_id} {reason}"))

    def place(self, attempt: Attempt) -> None:
        self.attempts[attempt] = None
        attempt.over.add_done_callback(lambda _: self.attempts.pop(attempt, None))
        self._check_life(attempt)
        self._check_losses(attempt)
        if not self.connected:
            asyncio.get_running_loop().call_later(CONNECT_GRACE_S, self._check, attempt)

    def _check_life(self, attempt: Attempt) -> None:
        if self.record is not None and attempt.decode_incarnation != self.record.incarnation:
            # The tokens would come on no stream.
            attempt.lose(Unavailable(f"decode instance {self.instance_id} has restarted since it reserved room"))

    def _check_losses(self, attempt: Attempt) -> None:
        if self.connected and attempt.stream_losses < self.losses:
            # The instance may have ended it already, and its last tokens were dropped or lost on their way.
            attempt.lose(Unavailable(f"tokens of decode instance {self.instance_id} were lost before the stream stood"))

    def _check(self, attempt: Attempt) -> None:
        if not self.connected and attempt in self.attempts:
            attempt.lose(Unavailable(f"no token stream from decode instance {self.instance_id}"))
