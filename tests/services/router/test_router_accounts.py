import grpc
import pytest
from grpc import aio

from kaveri.rpc.server import open_channel
from kaveri.v1 import cluster_pb2
from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
from services.router import request_table
from tests.services.router.cluster_script import ScriptedCluster
from tests.services.router.scripted_answers import collect, eventually, refused

_WITHIN_S = 30.0


async def account_of(address: str, request_id: str) -> cluster_pb2.GetRequestAccountResponse:
    async with open_channel(address) as channel:
        request = cluster_pb2.GetRequestAccountRequest(request_id=request_id)
        account: cluster_pb2.GetRequestAccountResponse = await ClusterServiceStub(channel).GetRequestAccount(
            request, timeout=_WITHIN_S
        )
        return account


async def test_an_ended_request_has_the_timing_that_its_client_was_given(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        responses = await collect(router.ask(request_id="a"))
        account = await account_of(router.address, "a")
        assert account.outcome == "length"
        assert account.timing == responses[-1].timing
        assert account.completion_tokens == responses[-1].usage.completion_tokens
        assert [step.event for step in account.steps] == [f"attempt 1 to {account.timing.prefill_instance_id}"]


async def test_lost_attempts_are_steps_with_their_reason(cluster: ScriptedCluster) -> None:
    for prefill in cluster.prefills.values():
        prefill.hold.add("first_token")
        prefill.break_after_hold = True
    async with cluster.router() as router:
        call = router.ask(request_id="b")
        await cluster.until_held()
        for prefill in cluster.prefills.values():
            if not prefill.waiting_requests:
                prefill.hold.clear()
        for prefill in cluster.prefills.values():
            prefill.release.set()
        await collect(call)
        steps = [step.event for step in (await account_of(router.address, "b")).steps]
        assert steps[0].startswith("attempt 1 to prefill-")
        assert "scripted to break" in steps[1]
        assert steps[2].startswith("attempt 2 to prefill-")


async def test_a_request_in_flight_is_known_and_has_no_outcome(cluster: ScriptedCluster) -> None:
    cluster.hold("first_token")
    async with cluster.router() as router:
        call = router.ask(request_id="c")
        await eventually(lambda: len(cluster.taken()) == 1)
        account = await account_of(router.address, "c")
        assert account.outcome == ""
        assert account.timing.e2e_s == 0
        call.cancel()
        await eventually(lambda: not len(router.router.table))
        assert (await account_of(router.address, "c")).outcome == "its client has gone"


async def test_only_the_last_requests_are_remembered_and_others_are_not_found(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_table, "_MOST_ENDED", 2)
    async with cluster.router() as router:
        for name in ("d", "e", "f"):
            await collect(router.ask(request_id=name))
        assert (await account_of(router.address, "e")).outcome == "length"
        for name in ("d", "never asked"):
            await refused(account_of(router.address, name), grpc.StatusCode.NOT_FOUND)


async def test_an_id_to_which_a_gateway_has_added_is_found_by_what_its_client_knows(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        long_id = "x" * 128
        names = {"http-1": "http-1-0a1b2c3d4e", "http-2": "http-2-0a1b2c3d4e-7", long_id: "x" * 96 + "-0a1b2c3d4e"}
        for made in (*names.values(), "http-1-of-a-stranger"):
            await collect(router.ask(request_id=made))
        for known, made in names.items():
            assert (await account_of(router.address, known)).steps == (await account_of(router.address, made)).steps
        for unknown in ("htt", "http", "http-1-of-a"):
            with pytest.raises(aio.AioRpcError):
                await account_of(router.address, unknown)
