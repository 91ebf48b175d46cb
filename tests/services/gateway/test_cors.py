from pathlib import Path

import pytest

from kaveri.security.api_keys import KeyLimits
from kaveri.security.keys_file import add_key
from services.gateway.config import web_origins
from tests.services.gateway.conftest import GatewayUnderTest, run_gateway
from tests.services.router.cluster_script import ScriptedCluster

PAGE = "https://chat.example.com"
ASKING = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_no_page_may_ask_by_default(gateway: GatewayUnderTest) -> None:
    got = await gateway.ask("/v1/models", headers={"Origin": PAGE})
    assert got.status == 200
    assert "access-control-allow-origin" not in got.headers
    assert (await gateway.ask("/v1/completions", method="OPTIONS", headers=ASKING)).status == 405


@pytest.mark.parametrize("origins", [("https://other.example.com", PAGE), ("*",)], ids=["named", "all"])
async def test_a_page_of_a_named_origin_gets_answers_streams_and_errors(
    cluster: ScriptedCluster, origins: tuple[str, ...]
) -> None:
    allowed = "*" if origins == ("*",) else PAGE
    async with run_gateway(cluster, cors_origin=origins) as gateway:
        preflight = await gateway.ask("/v1/completions", method="OPTIONS", headers=ASKING)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, allowed)
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == ASKING["Access-Control-Request-Headers"]
        body = {"prompt": [300], "max_tokens": 3}
        for fields in ({}, {"stream": True}, {"n": "x"}):
            got = await gateway.ask("/v1/completions", {**body, **fields}, headers={"Origin": PAGE})
            assert got.status == (400 if "n" in fields else 200)
            assert got.headers["access-control-allow-origin"] == allowed
            assert "x-request-id" in got.headers["access-control-expose-headers"]
        assert (await gateway.ask("/v1/nope", headers={"Origin": PAGE})).headers[
            "access-control-allow-origin"
        ] == allowed


async def test_a_page_of_another_origin_gets_no_permission(cluster: ScriptedCluster) -> None:
    async with run_gateway(cluster, cors_origin=(PAGE,)) as gateway:
        for method, path in (("OPTIONS", "/v1/completions"), ("GET", "/v1/models")):
            got = await gateway.ask(path, method=method, headers={**ASKING, "Origin": "https://evil.example.com"})
            assert "access-control-allow-origin" not in got.headers


async def test_preflights_need_no_key(cluster: ScriptedCluster, tmp_path: Path) -> None:
    keys_file = str(tmp_path / "keys.toml")
    add_key(keys_file, "root", KeyLimits())
    async with run_gateway(cluster, cors_origin=(PAGE,), keys_file=keys_file) as gateway:
        assert (await gateway.ask("/v1/completions", method="OPTIONS", headers=ASKING)).status == 200
        got = await gateway.ask("/v1/completions", {"prompt": "x"}, headers={"Origin": PAGE})
        assert (got.status, got.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("text", ["chat.example.com", "https://a.example/", "https://a.example,", "null", "https:// b"])
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SCHEME://HOST"):
        web_origins(text)


def test_origins_are_separated_by_commas() -> None:
    assert web_origins("https://a.example, http://[::1]:3000") == ("https://a.example", "http://[::1]:3000")
    assert web_origins("") == ()
    assert web_origins("*") == ("*",)
