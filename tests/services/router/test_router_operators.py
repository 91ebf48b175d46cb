"""Which callers may see the cluster's view, accounts and workload of a router with API keys."""

import json
import shutil
from pathlib import Path

import pytest
from grpc import aio

from kaveri.cli.bench_target import engine_phases
from kaveri.cli.observed_cluster import observe_cluster
from kaveri.cli.status import _show
from kaveri.cli.trace import _find
from kaveri.client.api_key import VARIABLE, key_metadata
from kaveri.errors import KaveriError, Unauthenticated
from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import RpcTls, use_tls
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import cluster_pb2, cluster_pb2_grpc
from kaveri.v1.cluster_pb2_grpc import ClusterServiceStub
from kaveri.wire.status import error_of
from tests.services.router.cluster_script import ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import MODEL, ask, collect, eventually
from tests.support.certificates import Authority

# With TLS a certificate is enough.
pytestmark = pytest.mark.shows_no_certificate
_WITHIN_S = 60.0
_CALLS = {
    "GetClusterView": cluster_pb2.GetClusterViewRequest(),
    "GetRequestAccount": cluster_pb2.GetRequestAccountRequest(request_id="a"),
    "GetWorkload": cluster_pb2.GetWorkloadRequest(),
}


async def refusals(address: str, key: str = "") -> dict[str, KaveriError]:
    """Call every method; return the errors by method."""
    raised = {}
    async with open_channel(address) as channel:
        stub = ClusterServiceStub(channel)
        for method, request in _CALLS.items():
            try:
                await getattr(stub, method)(request, timeout=_WITHIN_S, metadata=key_metadata(key))
            except aio.AioRpcError as error:
                raised[method] = error_of(error)
    return raised


def test_every_method_is_tried_without_an_admin_key() -> None:
    methods = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"].methods_by_name
    assert set(_CALLS) == set(methods)


async def test_where_there_are_api_keys_only_that_of_an_operator_shows_the_cluster(
    cluster: ScriptedCluster, tmp_path: Path
) -> None:
    keys_file = str(tmp_path / "keys.toml")
    user = add_key(keys_file, "user", KeyLimits())
    operator = add_key(keys_file, "operator", KeyLimits(), is_admin=True)
    async with cluster.router(keys_file=keys_file) as router:
        await collect(router.stub.Generate(ask(request_id="a"), timeout=_WITHIN_S))
        for key, reason in (("", "no API key"), ("none", "unknown"), (user, "key user is no admin key")):
            raised = await refusals(router.address, key)
            assert set(raised) == set(_CALLS), reason
            for error in raised.values():
                assert isinstance(error, Unauthenticated)
                assert reason in str(error)
        assert not await refusals(router.address, operator)


async def test_without_a_keys_file_no_key_is_asked_for(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await collect(router.stub.Generate(ask(request_id="a"), timeout=_WITHIN_S))
        assert not await refusals(router.address)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
async def test_with_a_certificate_no_key_is_asked_for(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    keys_file = str(tmp_path / "keys.toml")
    add_key(keys_file, "operator", KeyLimits(), is_admin=True)
    use_tls(RpcTls(Authority(tmp_path).certify("service")))
    try:
        async with scripted_cluster(tokenizer) as cluster, cluster.router(keys_file=keys_file) as router:
            await collect(router.stub.Generate(ask(request_id="a"), timeout=_WITHIN_S))
            assert not await refusals(router.address)
    finally:
        use_tls(None)


async def test_commands_send_the_key_of_the_environment_to_every_router(
    cluster: ScriptedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys_file = str(tmp_path / "keys.toml")
    user = add_key(keys_file, "user", KeyLimits())
    operator = add_key(keys_file, "operator", KeyLimits(), is_admin=True)
    async with (
        cluster.router(keys_file=keys_file) as first,
        cluster.router(keys_file=keys_file, instance_id="router-1") as second,
    ):
        await eventually(
            lambda: all({"router-0", "router-1"} <= set(one.router.store.view().instances) for one in (first, second))
        )
        # Only the other router knows it.
        await collect(second.stub.Generate(ask(request_id="a"), timeout=_WITHIN_S))
        monkeypatch.delenv(VARIABLE, raising=False)
        for key in ("", user):
            if key:
                monkeypatch.setenv(VARIABLE, key)
            with pytest.raises(Unauthenticated):
                await _show(first.address, True, False)
            with pytest.raises(Unauthenticated):
                await _find("a", first.address)
            with pytest.raises(Unauthenticated):
                await observe_cluster(first.address)
            assert await engine_phases(first.address, MODEL) == {}
        monkeypatch.setenv(VARIABLE, operator)
        capsys.readouterr()
        await _show(first.address, True, False)
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {one["record"]["instance_id"] for one in shown["instances"]} >= {"router-0", "router-1", "decode-0"}
        assert (await _find("a", first.address)).router_instance_id == "router-1"
        assert len((await observe_cluster(first.address)).samples) == 2
        assert set(await engine_phases(first.address, MODEL)) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


async def test_no_rpc_shows_what_opens_a_token_stream(cluster: ScriptedCluster) -> None:
    async with cluster.router() as router:
        await collect(router.ask())
        (stream_id,) = {name for decode in cluster.decodes.values() for name in decode.subscribers}
        assert {request.router_id for request in cluster.taken()} == {stream_id}
        stub = cluster_pb2_grpc.ClusterServiceStub(router.channel)
        view = await stub.GetClusterView(cluster_pb2.GetClusterViewRequest(), timeout=60)
        (record,) = [status.record for status in view.instances if status.record.role == cluster_pb2.ROLE_ROUTER]
        secret = stream_id.removeprefix(f"{record.instance_id}.{record.incarnation:016x}")
        assert len(secret) > 32
        assert secret.encode() not in view.SerializeToString()
