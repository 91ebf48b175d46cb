"""Link of a router that a test can reset."""

import contextlib
from collections.abc import AsyncIterator

from services.router.service import Router
from tests.support.tcp_relay import TcpRelay


@contextlib.asynccontextmanager
async def breakable_link(router: Router, address: str) -> AsyncIterator[TcpRelay]:
    """Relay the router's connections to `address`."""
    host, port = address.rsplit(":", 1)
    stub = router.channels.stub
    async with TcpRelay(("127.0.0.1", 0), (host, int(port))) as link:
        link_address = "{}:{}".format(*link.address)

        def redirected(make, asked):  # type: ignore[no-untyped-def]
            return stub(make, link_address if asked == address else asked)

        router.channels.stub = redirected  # type: ignore[method-assign]
        yield link
