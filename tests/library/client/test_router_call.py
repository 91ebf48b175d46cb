import asyncio
import random

import pytest
from grpc import aio

from kaveri.client.routers import RouterCall
from kaveri.client.targets import Targets
from kaveri.rpc.liveness import Liveness

SOON_S = 10.0


class ScriptedGrpcCall:
    """Test double of a gRPC call: yields scripted responses, then waits until cancelled or ended."""

    def __init__(self, *responses: str) -> None:
        self._responses = list(responses)
        self._end: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def read(self) -> object:
        return self._responses.pop(0) if self._responses else await asyncio.shield(self._end)

    def cancel(self) -> None:
        self._end.cancel()

    def end(self) -> None:
        self._end.set_result(aio.EOF)


async def beat(target: str) -> None:
    await asyncio.Event().wait()


TARGETS = Targets(("router:1",), random.Random(0))


def made(grpc_call: ScriptedGrpcCall) -> RouterCall[str]:
    return RouterCall(grpc_call, "router:1", TARGETS, Liveness(beat), was_connected=True, leaves_unheard=False)


async def test_all_that_wait_for_a_cancelled_call_are_woken() -> None:
    call = made(ScriptedGrpcCall())
    readers = [asyncio.create_task(call.read()) for _ in range(3)]
    await asyncio.sleep(0)
    call.cancel()
    done, _ = await asyncio.wait(readers, timeout=SOON_S)
    assert len(done) == 3
    assert all(reader.cancelled() for reader in done)


async def test_the_end_of_a_call_can_be_read_again() -> None:
    grpc_call = ScriptedGrpcCall("first", "second")
    call = made(grpc_call)
    grpc_call.end()
    async with asyncio.timeout(SOON_S):
        assert [await call.read() for _ in range(5)] == ["first", "second", None, None, None]


async def test_what_was_read_before_a_cancel_comes_before_its_end() -> None:
    call = made(ScriptedGrpcCall("first", "second", "third"))
    async with asyncio.timeout(SOON_S):
        assert await call.read() == "first"
        await asyncio.sleep(0)
        assert call._arrived.full()
        call.cancel()
        assert await call.read() == "second"
        with pytest.raises(asyncio.CancelledError):
            await call.read()
