"""The predictors that may be asked: those in the cluster, or the one that an operator names."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from kaveri.cluster.store import ClusterStore
from kaveri.domain.length import TokenRange
from kaveri.policy.prediction import PredictorHealth, PredictorStatus, choose_predictor
from kaveri.telemetry.logs import get_logger
from services.prefill.predictor_peers import PredictorPeers


class Predictors:
    """Chooses one to ask, and remembers how each answered. For one event loop."""

    def __init__(self, store: ClusterStore, model: str, address: str, rng: random.Random) -> None:
        """model: its name in the cluster. address: the predictor to ask, "host:port"; empty: any that is ready."""
        self._store = store
        self._model = model
        self._address = address
        self._rng = rng
        self._peers = PredictorPeers(model)
        self._health: dict[str, PredictorHealth] = {}
        self._addresses: set[str] = set()
        self._address_gone = asyncio.Event()

    async def run(self) -> None:
        """Closes channels that are not needed any more, until cancelled."""
        while True:
            await self._address_gone.wait()
            self._address_gone.clear()
            await self._peers.channels.retain(self._addresses)

    async def close(self) -> None:
        """Closes every channel; calls on them end."""
        await self._peers.channels.close()

    def choose(self, now_s: float) -> tuple[PredictorStatus, PredictorHealth] | None:
        """A predictor to ask now; None when there is none, or all rest."""
        known = self._known()
        present = {status.name for status in known}
        for name in [name for name in self._health if name not in present]:
            if self._health.pop(name).left():
                get_logger().warning("predictor_left", predictor=name)
        addresses = {status.address for status in known}
        if not self._addresses <= addresses:
            self._address_gone.set()
        self._addresses = addresses
        candidates = []
        for status in known:
            health = self._health.setdefault(status.name, PredictorHealth())
            health.reborn(status.incarnation)
            if health.may_be_asked(now_s):
                candidates.append(replace(status, waiting_prompts=status.waiting_prompts + health.outstanding_prompts))
        chosen = choose_predictor(candidates, self._rng)
        return (chosen, self._health[chosen.name]) if chosen is not None else None

    async def predict(
        self, predictor: PredictorStatus, prompts: Sequence[Sequence[int]], timeout_s: float
    ) -> list[TokenRange]:
        """See PredictorPeers.predict."""
        return await self._peers.predict(predictor.address, prompts, timeout_s)

    def _known(self) -> list[PredictorStatus]:
        if self._address:
            return [PredictorStatus(self._address, 0, self._address, 0)]
        return [
            PredictorStatus(
                status.record.instance_id,
                status.record.incarnation,
                status.record.address,
                status.load.waiting_requests,
            )
            for status in self._store.view().ready_predictors(self._model)
        ]
