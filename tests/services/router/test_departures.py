"""What draining instances cost a router."""

from typing import Any

from kaveri.domain.view import ClusterView
from services.router.departures import Departures
from services.router.requests import RequestTable


class Instances(dict[str, Any]):
    """Counts how often all of them are looked at."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def test_instances_are_looked_at_once_a_view_not_with_each_heartbeat() -> None:
    instances = Instances()
    departures = Departures(RequestTable(1), None, None)  # type: ignore[arg-type]
    view = ClusterView(instances)
    for _ in range(10):
        departures.update(view)
    assert instances.looks == 1
