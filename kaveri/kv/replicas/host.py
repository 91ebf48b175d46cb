"""Replicas in this process's memory, with a receiver and a sender of their own.

Neither blocks nor credit are shared with the pushes of prompts: replicas cannot delay them.
"""

from collections.abc import Sequence
from dataclasses import replace

from kaveri.errors import ConfigError
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.replicas import Replicas
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver, ReceiverOptions
from kaveri.kv.transfer.sender import KvSender
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transfer.transport import Transport


class HostReplicas(Replicas):
    """A ReplicaStore in host memory: as many whole blocks of `layout` as fit into `memory_bytes`, allocated here.

    layout: of the engine that resumes from replicas, and of their owners. listen: addresses where owners push, best
    first. epoch: this incarnation; differs from earlier ones at the same addresses. transports: transports of KV, in
    the order in which pushes to engines prefer them. receiving: options for the pushes of owners. Raises ConfigError
    when not even one block fits, when the memory cannot be allocated, or when it cannot listen.
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
            layout,
            block_count,
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
        )
