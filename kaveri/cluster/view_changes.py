"""Waits for changes of a membership."""

import asyncio

from kaveri.cluster.membership import Membership
from kaveri.domain.view import ClusterView


class ViewChanges:
    """Change notifications of one membership. Not thread-safe; one waiter at a time."""

    def __init__(self, membership: Membership) -> None:
        """Registers itself as the membership's on_change."""
        self._membership = membership
        self._changed = asyncio.Event()
        membership.on_change = self._changed.set

    async def wait(self, timeout_s: float) -> ClusterView:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        return self._membership.view()
