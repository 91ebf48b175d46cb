"""Levels the queues of prefill instances. Pure: no clock, no I/O.

A prompt is placed by loads that are up to two intervals old, and instances join or begin to serve prefill while others
have long queues. So each prefill instance compares its queue with the others' in the cluster monitor's broadcast, and
returns waiting prompts to their routers, which place them again. A waiting prompt is token ids only: nothing has to be
copied. All instances read the same broadcast, and each compares itself with another one.
"""

from kaveri.domain.view import ClusterView, ViewedInstance, is_late
from kaveri.policy.placement import prompt_takers

LEVEL_INTERVAL_S = 0.25
"""Min interval between two returns of prompts by one instance, in seconds: by then a broadcast shows the first."""


def queue_surplus(view: ClusterView, model: str, instance_id: str, queued_tokens: int) -> int:
    """Return by how many tokens the instance's queue is longer than that of its counterpart, at least 0: the longest
    queue's is the shortest, the second longest's the second shortest, and so on. 0 if the instance takes no prompts.
    Instances whose heartbeats are late are left out.

    queued_tokens: of the instance now; the others' are as in the view."""

    if not queued_tokens:
        return 0

    def queued(instance: ViewedInstance) -> tuple[int, str]:
        return instance.load.queued_prefill_tokens, instance.record.instance_id

    by_queue = sorted((one for one in prompt_takers(view, model) if not is_late(one)), key=queued)
    for place, counterpart in enumerate(by_queue[: len(by_queue) // 2]):
        if by_queue[-1 - place].record.instance_id == instance_id:
            room = counterpart.load.queue_room
            return max(0, queued_tokens - counterpart.load.queued_prefill_tokens) if room is None or room else 0
    return 0
