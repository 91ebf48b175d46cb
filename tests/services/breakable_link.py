"""Link of a router that a test can reset."""

import contextlib
from collections.abc import AsyncIterator

from kaveri.rpc.server import open_channel
from services.router.service import Router
from tests.support.tcp_relay import TcpRelay


@contextlib.asynccontextmanager
async def breakable_link(router: Router, address: str) -> AsyncIterator[TcpRelay]:
    """Relay the router's connections to `address`."""
    host, port = address.rsplit(":", 1)
    stub = router.channels.stub
    async with (
        TcpRelay(("127.0.0.1", 0), (host, int(port))) as link,
        # Of its own: the router closes its channels to addresses that are not in the view.
        open_channel("{}:{}".format(*link.address)) as channel,
    ):

        def redirected(make, asked):  # type: ignore[no-untyped-def]
            return make(channel) if asked == address else stub(make, asked)

        router.channels.stub = redirected  # type: ignore[method-assign]
        yield link
