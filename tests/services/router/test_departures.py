"""What draining instances cost a router."""

from types import SimpleNamespace
from typing import Any

import pytest

from kaveri.domain.view import ClusterView, InstanceLoad, InstanceRecord, InstanceState, InstanceStatus, Phase, Role
from services.router import recovery
from services.router.recovery import Departures
from services.router.request_table import RequestTable


class Instances(dict[str, Any]):
    """Counts how often all of them are looked at."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_instances_are_looked_at_once_a_view_not_with_each_heartbeat() -> None:
    instances = Instances()
    watch = Departures(RequestTable(1), None, None)  # type: ignore[arg-type]
    view = ClusterView(instances)
    for _ in range(10):
        watch.update(view)
    assert instances.looks == 1


def test_only_an_instance_that_lets_no_request_go_for_three_seconds_is_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that it was letting go were moved from under it, and lost what their copies lacked."""
    clock = SimpleNamespace(now_s=0.0, let_go_s=0.0)
    feeds: Any = SimpleNamespace(let_go_s=lambda life: clock.let_go_s)
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    looked: list[float] = []
    table: Any = SimpleNamespace(entries=lambda: looked.append(clock.now_s) or ())
    load = InstanceLoad(state=InstanceState.DRAINING)
    record = InstanceRecord("decode-0", 1, Role.ENGINE, "h:1", "tiny", phases=(Phase.DECODE,))
    view = ClusterView({"decode-0": InstanceStatus(record, load)})
    watch = Departures(table, None, feeds)  # type: ignore[arg-type]
    for now_s, let_go_s in ((0.0, 0.0), (2.9, 2.5), (5.4, 5.0), (7.9, 5.0), (8.1, 5.0)):
        clock.now_s, clock.let_go_s = now_s, let_go_s
        watch.update(view)
    assert looked == [8.1]
