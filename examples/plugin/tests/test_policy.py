"""The policy chooses as it says, and its answers pass Kaveri's check."""

import random

import pytest
from kaveri_example.policy import MostRoom

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceStatus, Phase, Role
from kaveri.policy.demand import Demand
from kaveri.policy.placement import choose_decode
from kaveri.policy.plugins import Guarded
from kaveri.policy.unconfirmed import UnconfirmedWork


def _view(*free_blocks: int) -> ClusterView:
    return ClusterView(
        {
            f"decode-{number}": InstanceStatus(
                InstanceRecord(f"decode-{number}", 1, Role.ENGINE, "h:1", "tiny", phases=(Phase.DECODE,)),
                InstanceLoad(free_blocks=blocks, total_blocks=100),
            )
            for number, blocks in enumerate(free_blocks)
        }
    )


def test_the_instance_with_the_most_room_is_chosen_and_what_was_sent_counts() -> None:
    view, sent = _view(50, 90, 80), UnconfirmedWork[str]()
    policy = Guarded(MostRoom(), pytest.fail)
    ask = Demand(tokens=4)
    assert choose_decode(view, "tiny", ask, sent, policy, random.Random(0)).record.instance_id == "decode-1"
    sent.add("request", view.ready(Phase.DECODE, "tiny")[1], 20)
    assert choose_decode(view, "tiny", ask, sent, policy, random.Random(0)).record.instance_id == "decode-2"
