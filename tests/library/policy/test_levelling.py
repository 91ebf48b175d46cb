"""Which instances give up how much of their queue."""

from dataclasses import replace

from kaveri.domain.view import (
    ClusterView,
    InstanceLoad,
    InstanceRecord,
    InstanceState,
    InstanceStatus,
    Phase,
    Role,
)
from kaveri.policy.levelling import queue_surplus


def record(number: int, *phases: Phase) -> InstanceRecord:
    return InstanceRecord(f"engine-{number}", 1, Role.ENGINE, f"host:{number}", "model", phases=phases)


def view_of(*queued: int, **changes: InstanceStatus) -> ClusterView:
    """Prefill instances with these queues and a decode instance. changes: other statuses, by "engine_<number>"."""
    found = {
        f"engine-{number}": InstanceStatus(
            record(number, Phase.PREFILL), InstanceLoad(1, queued_prefill_tokens=tokens, queue_room=9), 0.1
        )
        for number, tokens in enumerate(queued)
    }
    found["decode"] = InstanceStatus(replace(record(99, Phase.DECODE), instance_id="decode"), InstanceLoad(1), 0.1)
    found |= {name.replace("_", "-"): status for name, status in changes.items()}
    return ClusterView(found)


def surplus(view: ClusterView, number: int, queued_tokens: int | None = None) -> int:
    instance_id = f"engine-{number}"
    if queued_tokens is None:
        queued_tokens = view.instances[instance_id].load.queued_prefill_tokens
    return queue_surplus(view, "model", instance_id, queued_tokens)


def test_the_longest_queue_is_compared_with_the_shortest_and_the_second_longest_with_the_second_shortest() -> None:
    view = view_of(500, 100, 900, 0, 300)
    assert [surplus(view, number) for number in range(5)] == [400, 0, 900, 0, 0]


def test_the_queue_of_now_counts_against_the_others_as_broadcast() -> None:
    assert surplus(view_of(900, 100), 0, queued_tokens=250) == 150
    assert surplus(view_of(900, 100), 0, queued_tokens=50) == 0
    assert surplus(view_of(900, 100), 0, queued_tokens=0) == 0
    assert surplus(view_of(900, 100), 1, queued_tokens=2000) == 0, "a broadcast that shows them comes first"


def test_prompts_are_not_given_up_for_an_instance_that_cannot_take_them() -> None:
    idle = view_of(900, 0).instances["engine-1"]
    others = {
        "full": replace(idle, load=replace(idle.load, queue_room=0)),
        "draining": replace(idle, load=replace(idle.load, state=InstanceState.DRAINING)),
        "late": replace(idle, heartbeat_age_s=1.1),
        "decodes": replace(idle, record=record(1, Phase.DECODE)),
        "another model": replace(idle, record=replace(idle.record, model="other")),
    }
    assert surplus(view_of(900, 0), 0) == 900
    for name, status in others.items():
        assert surplus(view_of(900, 0, engine_1=status), 0) == 0, name


def test_an_instance_that_takes_no_prompts_gives_none_up() -> None:
    drains = view_of(900, 0).instances["engine-0"]
    drains = replace(drains, load=replace(drains.load, state=InstanceState.DRAINING))
    assert surplus(view_of(900, 0, 400, engine_0=drains), 0, 900) == 0
