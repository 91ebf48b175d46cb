"""The store of copies of one simulated instance: the real account over simulated memory, verified whenever it grows."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kaveri.engine.stepwise.fake import FakeModel, StaleKv
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.replicas import OWNER_ENDED, Replicas
from kaveri.kv.replicas.store import ReplicaEvent, ReplicaGrew, ReplicaKey, ReplicaListener, ReplicaOrphaned
from kaveri.kv.tiers.pool import BlockAllocator
from kaveri.kv.transfer.ticket import Ticket
from tests.simulation.cluster.draws import DrawRecord
from tests.simulation.cluster.kv_memory import KvMemory
from tests.simulation.cluster.kv_receiver import SimulatedReceiver
from tests.simulation.cluster.kv_sender import SimulatedSender
from tests.simulation.cluster.kv_wire import KvWire


class SimulatedReplicas(Replicas):
    """A ReplicaStore. Constructed within its simulated process. Reports copies that are not what they say."""

    def __init__(
        self,
        model: FakeModel,
        layout: KvLayout,
        memory: KvMemory,
        allocator: BlockAllocator,
        wire: KvWire,
        rng: random.Random,
        draws: DrawRecord,
        min_free: int = 0,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        """rng: of this life alone. draws: what is wrong is reported to it. min_free, on_freed: as for Replicas."""
        self._memory = memory
        self._model = model
        self._draws = draws
        super().__init__(
            layout,
            allocator,
            partial(SimulatedReceiver, self._memory, layout, wire, rng.getrandbits(63), report=draws.report),
            partial(SimulatedSender, self._memory, layout, wire),
            min_free=min_free,
            on_freed=on_freed,
            token_bytes=rng.randbytes,
        )

        self._pushed: set[ReplicaKey] = set()
        self._finished: set[ReplicaKey] = set()
        """Those whose owner has ended its push, so that nothing is computed again."""

    def seal(self, key: ReplicaKey) -> None:
        let_go = self._draws.let_go.get(key.request_id, 0)
        if key in self._finished and self.watermark(key) < let_go:
            self._draws.report(f"{key.request_id} was let go with {let_go} tokens, and {self.watermark(key)} are held")
        super().seal(key)

    def push(self, key: ReplicaKey, ticket: Ticket) -> "Future[None]":
        self._pushed.add(key)
        return super().push(key, ticket)

    def drop(self, key: ReplicaKey) -> None:
        self._pushed.discard(key)
        self._finished.discard(key)
        super().drop(key)

    def start(self, listener: ReplicaListener) -> None:
        def verified(event: ReplicaEvent) -> None:
            # That its owner's push has ended is news, too, and changes nothing.
            if event.key in self._pushed and not isinstance(event, ReplicaOrphaned):
                self._draws.report(
                    f"{type(event).__name__} of {event.key.request_id} while it is resumed from the copy"
                )
            match event:
                case ReplicaGrew():
                    self._verify(event.key, event.token_count)
                case ReplicaOrphaned():
                    if event.reason == OWNER_ENDED:
                        self._finished.add(event.key)
                    # Its owner may have let it go, with a tail.
                    self._verify(event.key, self.watermark(event.key))
            listener(event)

        super().start(verified)

    def _verify(self, key: ReplicaKey, token_count: int) -> None:
        """The blocks hold the KV of just the tokens that their marks have named."""
        replica = self._replicas.get(key)
        if replica is None:
            return
        token_ids = tuple(replica.token_ids[:token_count])
        try:
            chain = self._memory.read(replica.block_ids, token_count)
        except StaleKv as error:
            self._draws.report(f"the copy of {key.request_id} has wrong KV: {error}")
            return
        if len(token_ids) != token_count or chain != self._model.chain(token_ids):
            self._draws.report(
                f"the copy of {key.request_id} does not hold the KV of the {token_count} tokens it names"
            )
