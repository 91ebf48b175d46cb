"""A whole cluster that speaks mutual TLS: every port, and requests."""

import asyncio
import json
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import openai
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kaveri import AsyncClient, NoCapacity, SamplingParams, TlsFiles, Unauthenticated
from kaveri.client.api_key import key_metadata
from kaveri.rpc.server import open_channel
from kaveri.rpc.tls import RpcTls, process_tls, use_tls
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from kaveri.v1 import feed_pb2, inference_pb2, sampling_pb2
from kaveri.v1.feed_pb2_grpc import FeedServiceStub
from kaveri.v1.inference_pb2_grpc import InferenceServiceStub
from tests.support.certificates import Authority
from tests.support.command import run_kaveri
from tests.support.local_cluster import run_cluster
from tests.support.metrics_pages import read_page, sum_of
from tests.support.redis_fixture import free_port

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
_WITHIN_S = 60.0
_KEYS = {"stranger": KeyLimits(), "small": KeyLimits(tokens_per_min=5)}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> Iterator[TlsFiles]:
    files, former = authority.certify("service"), process_tls()
    use_tls(RpcTls(files))
    yield files
    # With --tls all other tests of this process need theirs.
    use_tls(former)


def _flags(files: TlsFiles) -> dict[str, str]:
    return {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.authority, "kv_transports": "tls"}


async def test_every_port_refuses_strangers_and_a_request_goes_through_all_services(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    (others := tmp_path / "others").mkdir()
    foreign = replace(Authority(others, "others").certify("foreign"), authority=files.authority)
    misnamed = replace(authority.certify("misnamed", dns="other-cluster"), name=files.name)
    settings = {"gateway_count": 1, "predictor": "kaveri-tiny", "router_flags": ("--vllm-grpc",), **_flags(files)}
    async with run_cluster(**settings) as cluster:
        ports = {name: status.record.address for name, status in cluster.view().instances.items()}
        del ports["gateway-0"]
        assert {name.rpartition("-")[0] for name in ports} == {"router", "prefill", "decode", "predictor"}
        for name, address in ports.items():
            assert await _status(aio.insecure_channel(address)) is grpc.StatusCode.UNAVAILABLE, name
            assert await _status(_without_certificate(address, files)) is grpc.StatusCode.UNAVAILABLE, name
            assert await _status(open_channel(address, RpcTls(foreign))) is grpc.StatusCode.UNAVAILABLE, name
            assert await _status(open_channel(address, RpcTls(misnamed))) is grpc.StatusCode.UNAUTHENTICATED, name
            assert await _status(open_channel(address, RpcTls(files))) is grpc.StatusCode.OK, name
        async with AsyncClient(cluster.target, tls=files) as client:
            answer = await client.generate("hello", params=SamplingParams(max_tokens=8, ignore_eos=True))
            assert answer.usage.completion_tokens == 8
            assert answer.timing.server.kv_transport == "tls"
        asked = vllm_engine_pb2.GenerateRequest(
            text="hello", sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=8, ignore_eos=True)
        )
        async with open_channel(cluster.target, RpcTls(files)) as channel:
            (whole,) = [each async for each in VllmEngineStub(channel).Generate(asked, timeout=_WITHIN_S)]
            assert whole.complete.completion_tokens == 8
        async with open_channel(cluster.target, RpcTls(misnamed)) as channel:
            with pytest.raises(aio.AioRpcError) as refused:
                await VllmEngineStub(channel).Generate(asked, timeout=_WITHIN_S).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        url = f"http://{cluster.stack.http_targets[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as http:
            over_http = await http.completions.create(model="kaveri-tiny", prompt="hello", max_tokens=3)
            assert over_http.usage is not None
        shown = await asyncio.to_thread(_command, files, "status", "--json", "--target", cluster.target)
        assert len(json.loads(shown)["instances"]) == 5
        assert await asyncio.to_thread(_command, files, "health", "--target", cluster.target) == "SERVING\n"


async def test_a_certificate_reads_answers_at_decode_and_an_api_key_opens_the_public_doors_alone(
    authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    keys_file = str(tmp_path / "keys.toml")
    key, small = (add_key(keys_file, name, limits) for name, limits in _KEYS.items())
    stranger = key_metadata(key)
    host, public_port, metrics_port = "models.example.com", free_port(), free_port()
    public = authority.certify("public", dns=host)
    settings = {
        "gateway_count": 1,
        "public_port": public_port,
        "public_tls_cert": public.certificate,
        "public_tls_key": public.key,
        "keys_file": keys_file,
        "metrics_port": metrics_port,
        "decode_flags": ("--direct-answers", "on", "--fake-step-s", "0.01"),
    }
    async with run_cluster(**settings, **_flags(files)) as cluster:
        metrics = f"127.0.0.1:{cluster.stack.config.metrics_port_of('decode-0')}"

        async def read_tokens() -> float:
            page = await asyncio.to_thread(read_page, metrics, files=files)
            return sum_of("kaveri_decode_read_tokens_total", page)

        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        async with AsyncClient(cluster.target, tls=files, direct=True, timeout_s=_WITHIN_S) as client:
            read = 0.0
            # A busy machine may connect too late for the first answer.
            async with asyncio.timeout(_WITHIN_S):
                while not read:
                    answer = await client.generate("hello", params=params)
                    read = await read_tokens()
        # The SDK is not given a key for this, so the stranger asks by hand.
        asked = inference_pb2.GenerateRequest(text="hello", request_id="r", secret=b"s" * 16, direct=True)
        asked.params.CopyFrom(sampling_pb2.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
        trusts = RpcTls(TlsFiles(authority=files.authority, name=host))
        async with open_channel(f"127.0.0.1:{public_port}", trusts) as channel:
            call = InferenceServiceStub(channel).Generate(asked, metadata=stranger, timeout=_WITHIN_S)
            responses = [response async for response in call]
        assert tuple(token_id for response in responses for token_id in response.token_ids) == answer.token_ids
        assert not any(response.HasField("tokens_at") for response in responses)
        async with _without_certificate(cluster.view().instances["decode-0"].record.address, files) as channel:
            opened = feed_pb2.FollowRequest(form=feed_pb2.FORM_TEXT, reader_id="r" * 16)
            with pytest.raises(aio.AioRpcError) as refused:
                await FeedServiceStub(channel).Follow(opened, metadata=stranger, timeout=_WITHIN_S).read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await _check_public_doors(
            f"127.0.0.1:{public_port}", replace(files, certificate="", key="", name=host), key, small
        )
        url = f"https://{cluster.stack.http_targets[0]}/v1/models"
        for secret, status in ((key, 200), ("none", 401), (small, 429)):
            # The last one was counted in Redis, where the router had used it up.
            assert await asyncio.to_thread(_http_status, url, files, secret) == status
        logs = "".join(cluster.log_text(name) for name in ("router-0", "gateway-0"))
        assert key not in logs
        assert small not in logs


async def _check_public_doors(public: str, trusts: TlsFiles, key: str, small: str) -> None:
    four = SamplingParams(max_tokens=4, ignore_eos=True)
    async with AsyncClient(public, tls=trusts, api_key=key, timeout_s=_WITHIN_S) as client:
        answer = await client.generate("hello", params=four)
        assert answer.usage.completion_tokens == 4
        assert client.targets == (public,)
    async with AsyncClient(public, tls=trusts, api_key="none", timeout_s=_WITHIN_S) as client:
        with pytest.raises(Unauthenticated):
            await client.generate("hello", params=four)
    async with AsyncClient(public, tls=trusts, api_key=small, timeout_s=_WITHIN_S) as client:
        await client.generate("hello", params=four)
        with pytest.raises(NoCapacity):
            await client.generate("hello", params=four)


def _http_status(url: str, files: TlsFiles, key: str) -> int:
    context = ssl.create_default_context(cafile=files.authority)
    # The certificate has the name of a host that this one is not.
    context.check_hostname = False
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, context=context, timeout=_WITHIN_S) as answer:
            status: int = answer.status
    except urllib.error.HTTPError as error:
        return error.code
    return status


async def _status(channel: aio.Channel) -> grpc.StatusCode:
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_WITHIN_S)
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def _without_certificate(address: str, files: TlsFiles) -> aio.Channel:
    credentials = grpc.ssl_channel_credentials(Path(files.authority).read_bytes())
    return aio.secure_channel(address, credentials, options=(("grpc.ssl_target_name_override", files.name),))


def _command(files: TlsFiles, *arguments: str) -> str:
    flags = ("--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority)
    ended = run_kaveri(*arguments, *flags)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
