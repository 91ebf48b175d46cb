"""ReplicaStores in this process's memory, each with a receiver and a sender of its own.

Replicas share no flow-control credit with the pushes of prompts, so they cannot delay these.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.tiers.pool import BlockAllocator, KvPool
from kaveri.kv.transfer.receiver import KvReceiver, ReceiverOptions
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport


class PoolReplicas(Replicas):
    """Stores replicas (copies of other instances' KV caches) in blocks of a pool that may have other users.

    listen: addresses for owners' pushes, in order of preference. epoch: incarnation, different from earlier ones at the
    same addresses. transports: in order of preference for pushes to engines. receiving: options for incoming pushes.
    Others as for Replicas. Raises ConfigError when listening fails.
    """

    def __init__(
        self,
        pool: KvPool,
        allocator: BlockAllocator,
        *,
        listen: Sequence[KvEndpoint],
        transports: Sequence[Transport],
        epoch: int,
        receiving: ReceiverOptions = ReceiverOptions(),  # noqa: B008 - it is frozen
        min_free: int = 0,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            pool.layout,
            allocator,
            lambda told: KvReceiver(
                pool,
                told,
                listen=listen,
                epoch=epoch,
                transports=transports,
                digests=receiving.digests,
                credit_bytes=receiving.credit_bytes,
            ),
            lambda told: KvSender(pool, told, transports=transports),
            min_free=min_free,
            on_freed=on_freed,
        )


class HostReplicas(PoolReplicas):
    """Stores replicas (copies of other instances' KV caches) in up to `memory_bytes` of host memory, allocated here.

    layout: of the engine that resumes from replicas, and of the instances that push them. Others as for PoolReplicas.
    Raises ConfigError when not even one block fits, the memory cannot be allocated, or listening fails.
    """

    def __init__(
        self,
        layout: KvLayout,
        memory_bytes: int,
        *,
        listen: Sequence[KvEndpoint],
        transports: Sequence[Transport],
        epoch: int,
        receiving: ReceiverOptions = ReceiverOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        # The ranks of an engine push their heads into one pool here, and receive them from it.
        layout = replace(layout, tensor_ranks=1)
        block_bytes = layout.layer_count * layout.block_bytes
        block_count = memory_bytes // block_bytes
        if block_count < 1:
            raise ConfigError("replica_memory", f"is {memory_bytes} bytes; one block takes {block_bytes}")
        try:
            pool = KvPool(layout, block_count)
        except (OSError, MemoryError, OverflowError, ValueError) as error:
            raise ConfigError("replica_memory", f"{memory_bytes} bytes cannot be allocated here: {error}") from error
        super().__init__(
            pool,
            BlockAllocator(block_count),
            listen=listen,
            transports=transports,
            epoch=epoch,
            receiving=receiving,
        )
