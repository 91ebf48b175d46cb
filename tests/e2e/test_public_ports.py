"""A cluster whose public ports, HTTP and gRPC, ask strangers for an API key of one file, over TLS."""

import asyncio
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kaveri import AsyncClient, NoCapacity, SamplingParams, TlsFiles, Unauthenticated
from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from tests.support.certificates import Authority
from tests.support.local_cluster import run_cluster
from tests.support.redis_fixture import free_port

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates with")
_WITHIN_S = 60.0
_FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


async def test_one_keys_file_closes_both_doors_and_a_limit_holds_over_both(tmp_path: Path) -> None:
    files = Authority(tmp_path).certify("public")
    trusts = TlsFiles(authority=files.authority, name=files.name)
    keys_file = str(tmp_path / "keys.toml")
    key = add_key(keys_file, "alice", KeyLimits())
    small = add_key(keys_file, "small", KeyLimits(tokens_per_min=5))
    port = free_port()
    settings = {
        "gateway_count": 1,
        "public_port": port,
        "keys_file": keys_file,
        "public_tls_cert": files.certificate,
        "public_tls_key": files.key,
    }
    async with run_cluster(**settings) as cluster:
        public = f"127.0.0.1:{port}"
        async with AsyncClient(public, tls=trusts, api_key=key, timeout_s=_WITHIN_S) as client:
            answer = await client.generate("hello", params=_FOUR)
            assert answer.usage.completion_tokens == 4
            assert client.targets == (public,)
        async with AsyncClient(public, tls=trusts, api_key="none", timeout_s=_WITHIN_S) as client:
            with pytest.raises(Unauthenticated):
                await client.generate("hello", params=_FOUR)
        async with AsyncClient(public, tls=trusts, api_key=small, timeout_s=_WITHIN_S) as client:
            await client.generate("hello", params=_FOUR)
            with pytest.raises(NoCapacity):
                await client.generate("hello", params=_FOUR)
        url = f"https://{cluster.stack.http_targets[0]}/v1/models"
        assert await asyncio.to_thread(_status, url, files, key) == 200
        assert await asyncio.to_thread(_status, url, files, "none") == 401
        # It was counted in Redis, where the router had used it up.
        assert await asyncio.to_thread(_status, url, files, small) == 429
        logs = "".join(cluster.log_text(name) for name in ("router-0", "gateway-0"))
        lines = "".join(_command_line(pid) for pid in cluster.pids().values())
        for secret in (key, small):
            assert secret not in logs
            assert secret not in lines


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def _status(url: str, files: TlsFiles, key: str) -> int:
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
