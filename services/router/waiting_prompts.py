"""The attempts that prefill instances have not begun. Asks instances that drain to give them back.

An instance does not know whether another one takes requests; the router does. What the instance has begun meanwhile
goes on there. The router asks until the instance has answered, or none of the attempts waits there any more.
"""

import asyncio
import contextlib

from grpc import aio

from kaveri.domain.view import ClusterView, InstanceRecord, InstanceState, Phase
from kaveri.rpc.channels import Channels
from kaveri.timeouts import CALL_TIMEOUT_S
from kaveri.v1 import decode_pb2, feed_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.wire.attempts import ownership_to_proto
from services.router.lifecycle_values import Attempt
from services.router.requests import RequestEntry

_MOST_TRIES = 6
_FIRST_PAUSE_S = 0.05
"""Between two tries. It doubles."""
_MOST_AT_ONCE = 4096
"""Of one message: less than half of the largest, when every id is as long as it may be."""


class WaitingPrompts:
    """Of one router. For one event loop; it calls over channels that others close."""

    def __init__(self, model: str, stream_id: str, channels: Channels) -> None:
        self._model = model
        self._stream_id = stream_id
        self._channels = channels
        self._waiting: dict[tuple[RequestEntry, int], InstanceRecord] = {}
        self._asked: dict[tuple[RequestEntry, int], None] = {}
        """Those that a draining instance is asked for, or has answered about."""
        self._asking: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, attempt: tuple[RequestEntry, int]) -> bool:
        return attempt in self._waiting

    def add(self, entry: RequestEntry, attempt: Attempt, record: InstanceRecord) -> None:
        """The attempt waits at this instance."""
        self._waiting[entry, attempt.number] = record

    def remove(self, entry: RequestEntry, attempt: Attempt) -> None:
        """It was begun, or is over. Idempotent."""
        self._waiting.pop((entry, attempt.number), None)
        self._asked.pop((entry, attempt.number), None)

    def update(self, view: ClusterView) -> None:
        """Asks for what waits at instances that drain, when another one takes requests. Their reports end."""
        if not self._waiting or not view.ready(Phase.PREFILL, self._model):
            return
        due: dict[str, list[tuple[RequestEntry, int]]] = {}
        for attempt, record in self._waiting.items():
            status = view.instances.get(record.instance_id)
            if (
                status is None
                or status.record.incarnation != record.incarnation
                or status.load.state is not InstanceState.DRAINING
            ):
                # It may drain again.
                self._asked.pop(attempt, None)
            elif attempt not in self._asked:
                self._asked[attempt] = None
                due.setdefault(record.address, []).append(attempt)
        for address, attempts in due.items():
            task = asyncio.create_task(self._ask(address, attempts), name=f"waiting prompts at {address}")
            self._asking[task] = None
            task.add_done_callback(self._asking.pop)

    async def close(self) -> None:
        """Waits until no instance is asked."""
        if self._asking:
            await asyncio.wait(self._asking)

    async def _ask(self, address: str, attempts: list[tuple[RequestEntry, int]]) -> None:
        for first in range(0, len(attempts), _MOST_AT_ONCE):
            await self._ask_until_answered(address, attempts[first : first + _MOST_AT_ONCE])

    async def _ask_until_answered(self, address: str, attempts: list[tuple[RequestEntry, int]]) -> None:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_MOST_TRIES):
            names = [self._name(attempt) for attempt in attempts if attempt in self._asked]
            if not names:
                return
            message = feed_pb2.AbortRequest(attempts=names, give_back=True)
            with contextlib.suppress(aio.AioRpcError):
                await self._channels.stub(FeedServiceStub, address).Abort(message, timeout=CALL_TIMEOUT_S)
                return
            await asyncio.sleep(pause_s)
            pause_s *= 2
        for attempt in attempts:
            # The next view asks again.
            self._asked.pop(attempt, None)

    def _name(self, attempt: tuple[RequestEntry, int]) -> decode_pb2.AttemptId:
        entry, number = attempt
        return ownership_to_proto(entry.request_id, entry.ownership(number, self._stream_id))
