"""Starts vLLM's tensor-parallel ranks by forking the engine's process, which has imported vLLM: one core-second instead
of ten. Services do not fork: threads that vLLM's CPU backend binds with OpenMP do not survive it. Test processes use
one thread."""

import os
import stat
import time
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess

_READ_EVERY_S = 0.0005


def fork_ranks() -> None:
    """Make vLLM in this process fork its ranks, and make idle ranks sleep instead of spinning. Ranks close the sockets
    open now, so that their peers notice when this process ends."""
    # Not at the top: an engine's process sets vLLM's environment before it imports vLLM.
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.v1.executor import multiproc_executor

    sockets = _open_sockets()

    class Rank(ForkProcess):
        def run(self) -> None:
            for descriptor in sockets:
                os.close(descriptor)
            super().run()

    context = ForkContext()
    context.Process = Rank  # type: ignore[method-assign,assignment]
    multiproc_executor.get_mp_context = lambda: context
    # For a second after each step they would read in a busy loop, with which four ranks keep two cores from all others.
    shm_broadcast.sched_yield = partial(time.sleep, _READ_EVERY_S)  # type: ignore[assignment]


def _open_sockets() -> list[int]:
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            # The folder that was just read.
            continue
        if is_socket and descriptor > 2:
            found.append(descriptor)
    return found
