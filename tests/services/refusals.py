"""Errors of RPCs."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc import aio


@contextmanager
def refuses(code: grpc.StatusCode, *details: str) -> Iterator[None]:
    """Expect an RPC to fail with this status and these details."""
    with pytest.raises(aio.AioRpcError) as caught:
        yield
    assert caught.value.code() is code
    for detail in details:
        assert detail in (caught.value.details() or "")
