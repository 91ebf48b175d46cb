"""Starts the ranks of a vLLM engine as copies, by fork, of the engine's process, which has imported vLLM.

That takes a core a second instead of ten. Services start their ranks anew: vLLM's CPU backend binds OpenMP's threads,
which do not survive a fork. A process of the tests has one thread of arithmetic.
"""

import os
import stat
import time
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess

_READ_EVERY_S = 0.0005


def fork_ranks() -> None:
    """Have vLLM in this process fork its ranks, and have these leave the cores to others while they wait.

    Ranks close the sockets that are open now: whoever uses this process sees by their end that it has ended.
    """
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
    """Return the process's open sockets, without the standard streams."""
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
