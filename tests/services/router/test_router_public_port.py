import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kaveri.client.async_client import AsyncClient
from kaveri.domain.sampling import FinishReason, SamplingParams
from kaveri.errors import ConfigError, InvalidArgument, NoCapacity, Unauthenticated, Unavailable
from kaveri.policy.byte_budget import ByteBudget
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key, revoke_key
from kaveri.security.tls_files import TlsFiles
from kaveri.text.tokenizer import ModelTokenizer
from kaveri.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
)
from services.router.config import RouterConfig
from tests.services.router.cluster_script import RouterUnderTest, ScriptedCluster, scripted_cluster
from tests.services.router.scripted_answers import SECRET, ask, eventually, read_tokens, refused, rest_of
from tests.support.certificates import Authority
from tests.support.redis_fixture import free_port

# In one process with services, clients of public ports would show the services' certificates.
pytestmark = pytest.mark.shows_no_certificate
WITHIN_S = 60.0
_NO_REDIS = "redis://127.0.0.1:1/0"
"""Unreachable, so that each test counts for itself."""
_PATIENT = {"lease_ttl_s": WITHIN_S, "suspect_after_s": 30.0}
_FIVE = SamplingParams(max_tokens=5, temperature=0.0)


@dataclass
class PublicRouter:
    inner: RouterUnderTest
    target: str

    def client(self, secret: str, **given: Any) -> AsyncClient:
        return AsyncClient(self.target, api_key=secret, timeout_s=WITHIN_S, **given)


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer) -> AsyncIterator[ScriptedCluster]:
    async with scripted_cluster(tokenizer, lease_ttl_s=WITHIN_S) as cluster:
        yield cluster


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = str(tmp_path / "keys.toml")
    add_key(path, "root", KeyLimits())
    return path


@contextlib.asynccontextmanager
async def _public_router(cluster: ScriptedCluster, keys_file: str, **settings: Any) -> AsyncIterator[PublicRouter]:
    port = free_port()
    given = {"keys_file": keys_file, "public_port": port, "redis_url": _NO_REDIS, **_PATIENT, **settings}
    async with cluster.router(**given) as router:
        yield PublicRouter(router, f"127.0.0.1:{port}")


@contextlib.asynccontextmanager
async def _stub(target: str) -> AsyncIterator[Any]:
    async with aio.insecure_channel(target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


_CALLS: dict[str, Any] = {
    "Generate": ask(),
    "Cancel": inference_pb2.CancelRequest(request_id="any"),
    "ListModels": inference_pb2.ListModelsRequest(),
    "GetModel": inference_pb2.GetModelRequest(model="any"),
    "Tokenize": inference_pb2.TokenizeRequest(text="any"),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1]),
    "Beat": inference_pb2.BeatRequest(),
}


def test_every_method_is_tried_without_a_key() -> None:
    methods = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    assert set(_CALLS) == set(methods)


async def test_without_a_good_key_every_method_is_refused_and_says_how_to_send_one(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    tried = {
        "none": None,
        "basic": (("authorization", "Basic cm9vdDo="),),
        "unknown": (("authorization", "Bearer kaveri-" + "A" * 43),),
    }
    async with _public_router(cluster, keys_file) as router, _stub(router.target) as stub:
        for method, request in _CALLS.items():
            for case, metadata in tried.items():
                call = getattr(stub, method)(request, timeout=WITHIN_S, metadata=metadata)
                with pytest.raises(aio.AioRpcError) as refused:
                    await (call.read() if method == "Generate" else call)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (method, case)
                if case == "none":
                    assert "Authorization: Bearer KEY" in (refused.value.details() or "")
        assert len(router.inner.router.table) == 0
        assert not cluster.taken()


async def test_only_the_clients_service_is_served(cluster: ScriptedCluster, keys_file: str) -> None:
    secret = add_key(keys_file, "alice", KeyLimits())
    metadata = (("authorization", f"Bearer {secret}"),)
    async with _public_router(cluster, keys_file) as router, aio.insecure_channel(router.target) as channel:
        orders = instance_pb2_grpc.InstanceServiceStub(channel)
        view = cluster_pb2_grpc.ClusterServiceStub(channel)
        # A unary call: a call that streams its requests may fail as INTERNAL where it is refused (grpc/grpc#36066).
        reflected = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for call in (
            orders.Drain(instance_pb2.DrainRequest(instance_id="prefill-0"), timeout=WITHIN_S, metadata=metadata),
            orders.SetPhases(
                instance_pb2.SetPhasesRequest(instance_id="prefill-0"), timeout=WITHIN_S, metadata=metadata
            ),
            view.GetClusterView(cluster_pb2.GetClusterViewRequest(), timeout=WITHIN_S, metadata=metadata),
            reflected(b"", timeout=WITHIN_S, metadata=metadata),
        ):
            await refused(call, grpc.StatusCode.UNIMPLEMENTED)
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_is_good_for_all_that_the_sdk_does_and_appears_in_no_log(
    cluster: ScriptedCluster, keys_file: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = add_key(keys_file, "alice", KeyLimits(requests_per_s=1000, tokens_per_min=10**6, in_flight=10))
    async with _public_router(cluster, keys_file) as router:
        async with router.client(secret) as client:
            answer = await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)
            assert answer.usage.completion_tokens == 5
            models = await client.list_models()
            assert await client.get_model(models[0].name) == models[0]
            assert await client.detokenize(await client.tokenize("hello")) == "hello"
            assert client.targets == (router.target,), "the inner port is named to no stranger"
        async with router.client("none") as client:
            with pytest.raises(Unauthenticated, match="unknown, or was revoked"):
                await client.list_models()
        monkeypatch.setenv("KAVERI_API_KEY", secret)
        async with AsyncClient(router.target, timeout_s=WITHIN_S) as client:
            assert await client.list_models()
        async with AsyncClient(router.inner.address, timeout_s=WITHIN_S) as client:
            assert await client.list_models(), "the inner port takes no notice of a key"
    logged = capfd.readouterr()
    assert secret not in logged.out + logged.err


async def test_a_key_past_a_limit_is_refused_with_a_delay_and_others_go_on(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    few = add_key(keys_file, "few", KeyLimits(tokens_per_min=6))
    other = add_key(keys_file, "other", KeyLimits())
    async with _public_router(cluster, keys_file) as router:
        async with router.client(few) as client:
            await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)
            with pytest.raises(NoCapacity, match="6 tokens a minute") as refused:
                await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)
            assert 0 < refused.value.retry_after_s <= 60
        async with router.client(other) as client:
            assert (await client.generate(prompt_token_ids=[300, 301], params=_FIVE)).usage.completion_tokens == 5


async def test_requests_in_flight_are_limited_and_cancel_is_always_possible(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    secret = add_key(keys_file, "one", KeyLimits(in_flight=1))
    decode = cluster.decodes["decode-0"]
    decode.may_step.clear()
    async with _public_router(cluster, keys_file) as router, router.client(secret) as client:
        stream = client.stream(prompt_token_ids=[300, 301, 302], params=_FIVE)
        await anext(stream)
        with pytest.raises(NoCapacity, match="1 requests in flight"):
            await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)
        assert await client.cancel(stream.request_id)
        assert (await stream.collect()).finish_reason is FinishReason.CANCELLED
        decode.may_step.set()
        await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)


async def test_the_memory_of_requests_is_limited_for_each_key_and_for_all(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    greedy, other = (add_key(keys_file, name, KeyLimits()) for name in ("greedy", "other"))
    decode = cluster.decodes["decode-0"]
    decode.may_step.clear()
    large = [300] * 600
    async with (
        _public_router(cluster, keys_file) as router,
        router.client(greedy) as client,
        router.client(other) as another,
        AsyncClient(router.inner.address, timeout_s=WITHIN_S) as inner,
    ):
        router.inner.router.bodies = ByteBudget("router", 8_000)
        streams = [each.stream(prompt_token_ids=large, params=_FIVE) for each in (client, another)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(NoCapacity, match=r"API key greedy.*--max-bodies-bytes") as refused:
            await client.generate(prompt_token_ids=large, params=_FIVE)
        assert refused.value.retry_after_s > 0
        with pytest.raises(NoCapacity, match="API key greedy"):
            await client.detokenize(large)
        with pytest.raises(NoCapacity, match="all requests"):
            await inner.tokenize("x" * 6_000)
        decode.may_step.set()
        for stream in streams:
            assert (await stream.collect()).finish_reason is FinishReason.LENGTH
        await eventually(lambda: not router.inner.router.table)
        await client.generate(prompt_token_ids=large, params=_FIVE)


async def test_a_key_neither_cancels_nor_collides_with_the_requests_of_others(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    alice, bob = (add_key(keys_file, name, KeyLimits()) for name in ("alice", "bob"))
    decode = cluster.decodes["decode-0"]
    decode.may_step.clear()
    async with _public_router(cluster, keys_file) as router, router.client(alice) as hers, router.client(bob) as his:
        stream = hers.stream(prompt_token_ids=[300, 301, 302], params=_FIVE, request_id="same")
        await anext(stream)
        assert not await his.cancel("same")
        assert not await his.cancel("alice/same")
        assert router.inner.router.table.slot_of("alice/same") is not None
        other = his.stream(prompt_token_ids=[300, 301, 302], params=_FIVE, request_id="same")
        await anext(other)
        assert await hers.cancel("alice/same")
        assert (await stream.collect()).finish_reason is FinishReason.CANCELLED
        decode.may_step.set()
        assert (await other.collect()).usage.completion_tokens == 5
        with pytest.raises(InvalidArgument, match="at most 122 bytes long with this API key"):
            await hers.generate("hello", request_id="x" * 123)


@contextlib.asynccontextmanager
async def _streaming_at_the_first_of_two(
    cluster: ScriptedCluster, keys_file: str
) -> AsyncIterator[tuple[PublicRouter, PublicRouter, AsyncClient, Any]]:
    """Two public routers, and a client of key alice whose stream at the first has one token and waits."""
    secret = add_key(keys_file, "alice", KeyLimits(in_flight=1))
    cluster.decodes["decode-0"].may_step.clear()
    async with (
        _public_router(cluster, keys_file, instance_id="router-1") as second,
        _public_router(cluster, keys_file) as first,
    ):
        await eventually(lambda: len(first.inner.addresses(public=True)) == 2)
        async with first.client(secret) as client:
            stream = client.stream(prompt_token_ids=[300, 301, 302], params=_FIVE)
            await anext(stream)
            yield first, second, client, stream
        # The other router gives its claims back a little later.
        await second.inner.router.claims.close_all()
        await first.inner.serving


async def test_a_client_whose_router_dies_goes_on_through_the_public_port_of_another(
    cluster: ScriptedCluster, keys_file: str
) -> None:
    async with _streaming_at_the_first_of_two(cluster, keys_file) as (first, second, client, stream):
        assert set(client.targets) == {first.target, second.target}
        first.inner.host.break_off("the test ends it")
        cluster.decodes["decode-0"].may_step.set()
        answer = await stream.collect()
        assert answer.usage.completion_tokens == 5
        assert answer.timing.server.reattaches >= 1


async def test_a_revoked_key_cannot_re_attach(cluster: ScriptedCluster, keys_file: str) -> None:
    async with _streaming_at_the_first_of_two(cluster, keys_file) as (first, second, _, stream):
        callers = second.inner.router.callers
        assert callers is not None
        revoke_key(keys_file, "alice")
        await eventually(lambda: callers.keys.count == 1)
        first.inner.host.break_off("the test ends it")
        with pytest.raises(Unauthenticated, match="unknown, or was revoked"):
            await stream.collect()
        cluster.decodes["decode-0"].may_step.set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
async def test_over_tls_a_client_needs_a_key_and_no_certificate(
    cluster: ScriptedCluster, keys_file: str, tmp_path: Path
) -> None:
    files = Authority(tmp_path).certify("public", dns="models.example.com")
    trusts = TlsFiles(authority=files.authority, name="models.example.com")
    secret = add_key(keys_file, "alice", KeyLimits())
    settings = {"public_tls_cert": files.certificate, "public_tls_key": files.key}
    async with _public_router(cluster, keys_file, **settings) as router:
        async with router.client(secret, tls=trusts) as client:
            answer = await client.generate(prompt_token_ids=[300, 301, 302], params=_FIVE)
            assert answer.usage.completion_tokens == 5
        async with router.client("none", tls=trusts) as client:
            with pytest.raises(Unauthenticated):
                await client.list_models()
        for tls in (None, TlsFiles(authority=files.authority), TlsFiles()):
            async with router.client(secret, tls=tls) as client:
                with pytest.raises(Unavailable):
                    await client.list_models()


def test_settings_of_the_public_port_are_checked(keys_file: str) -> None:
    def config(**settings: Any) -> RouterConfig:
        return RouterConfig(instance_id="router-0", **settings)

    with pytest.raises(ConfigError, match="--keys-file: is not given, but --public-port"):
        config(public_port=50443)
    assert config().advertised_public_address == ""
    public = {"public_port": 50443, "keys_file": keys_file}
    assert config(**public).advertised_public_address == "127.0.0.1:50443"
    assert config(**public, host="10.0.0.1").advertised_public_address == "10.0.0.1:50443"
    assert config(**public, public_host="10.0.0.2").advertised_public_address == "10.0.0.2:50443"
    assert config(**public, public_address="models.example.com:443").advertised_public_address.endswith(":443")


@pytest.mark.parametrize("key", ["", "with space", "line\nbreak", "ü" * 3, "x" * 501])
def test_a_client_refuses_a_key_that_cannot_be_sent_and_does_not_show_it(key: str) -> None:
    with pytest.raises(InvalidArgument, match="api_key") as refused:
        AsyncClient(api_key=key)
    assert not key or key not in str(refused.value)


async def test_strangers_are_not_told_where_decode_instances_are(cluster: ScriptedCluster, keys_file: str) -> None:
    secret = add_key(keys_file, "alice", KeyLimits())
    metadata = (("authorization", f"Bearer {secret}"),)
    decode = cluster.decodes["decode-0"]
    async with _public_router(cluster, keys_file) as router, _stub(router.target) as public:
        for stub, name, is_told in ((router.inner.stub, "inner", True), (public, "public", False)):
            # Keep the answer far from its end when the client may be told.
            decode.pause_at = 3
            request = ask(max_tokens=20, request_id=name, secret=SECRET, direct=True)
            call = stub.Generate(request, timeout=WITHIN_S, metadata=metadata)
            responses = await read_tokens(call, 3)
            decode.may_step.set()
            await rest_of(call, responses)
            told = [response.tokens_at.address for response in responses if response.HasField("tokens_at")]
            assert len(told) == is_told
            assert responses[-1].usage.completion_tokens == 20
