"""What the end-to-end tests share: a slow fake model, so that a request can be caught in any phase."""

from collections.abc import Callable

import pytest

from kaveri.domain.view import ClusterView, Role


@pytest.fixture(scope="module", autouse=True)
def _warm(warm_services: None) -> None:
    """Services start warm."""


WHOLE = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
def idle() -> Callable[[ClusterView], bool]:
    """Whether every instance of a 2 + 2 cluster is in the view, has all its blocks, and nothing waits or runs."""

    def is_idle(view: ClusterView) -> bool:
        instances = [status for status in view.instances.values() if status.record.role is not Role.ROUTER]
        return {status.record.instance_id for status in instances} == set(WHOLE) and all(
            status.load.free_blocks == status.load.total_blocks
            and status.load.waiting_requests == status.load.running_requests == 0
            for status in instances
        )

    return is_idle
