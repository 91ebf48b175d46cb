"""Waits for changes of a membership."""

import asyncio

from kaveri.cluster.membership import Membership
from kaveri.domain.view import ClusterView


class ViewChanges:
    """The changes of one membership. For one event loop, and one waiter at a time."""

    def __init__(self, membership: Membership) -> None:
        """Registers itself as the membership's on_change."""
        self._membership = membership
        self._changed = asyncio.Event()
        membership.on_change = self._changed.set

    async def wait(self, timeout_s: float) -> ClusterView:
        """See ClusterStore.wait_for_change."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        return self._membership.view()
