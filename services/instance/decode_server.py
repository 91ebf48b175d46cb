"""DecodeService of an instance that can serve both phases: no pushes while it prefills; aborts in either phase."""

from typing import Any

from grpc import aio

from kaveri.domain.view import Phase
from kaveri.errors import Unavailable
from kaveri.hosting.served_phases import ServedPhases
from kaveri.v1 import decode_pb2
from kaveri.wire.attempts import ownership_from_proto
from kaveri.wire.status import abort
from services.decode.holder import ReplicaHolder
from services.decode.instance import DecodeInstance
from services.decode.server import DecodeServer
from services.prefill.role import PrefillRole


class PhasesDecodeServer(DecodeServer):
    """The decode side of one engine whose prefill side is `prefill`."""

    def __init__(
        self,
        prefill: PrefillRole,
        decode: DecodeInstance,
        phases: ServedPhases,
        incarnation: int,
        holder: ReplicaHolder | None = None,
    ) -> None:
        """holder: None where replicas are off."""
        super().__init__(decode, incarnation, holder)
        self._prefill = prefill
        self._phases = phases

    async def Reserve(  # noqa: N802
        self, request: decode_pb2.ReserveRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ReserveResponse:
        if self._phases.is_ordered(Phase.PREFILL):
            await abort(context, Unavailable("an instance that prefills takes no pushes"))
        return await super().Reserve(request, context)

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: aio.ServicerContext[Any, Any]
    ) -> decode_pb2.AbortResponse:
        # A router's Abort may arrive before the cancellation of its Prefill call; without this the request would be
        # adopted in between.
        for attempt in request.attempts:
            self._prefill.abort(attempt.request_id, ownership_from_proto(attempt))
        return await super().Abort(request, context)
