"""Clients that people use, against a local cluster over HTTP and vLLM's gRPC: a share of scripts/client_matrix.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("curl", "openai", "kaveri bench --http", "smg")
WITHIN_S = 700
"""smg is downloaded once, 37 MB."""


@pytest.mark.shows_no_certificate
@pytest.mark.timeout(WITHIN_S + 60)
def test_curl_openai_a_load_generator_and_smg_get_what_the_sdk_gets() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "client_matrix.py"), "--only", ",".join(NAMES)]
    script += ["--environments", str(ROOT / ".venv-clients")]
    ran = subprocess.run(script, check=False, capture_output=True, text=True, timeout=WITHIN_S)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    tried = [name for name in NAMES if f"\n| {name} | " in ran.stdout]
    if "smg cannot be installed" in ran.stdout:
        assert tried == list(NAMES[:-1])
        pytest.skip("smg cannot be installed here, and was not tried")
    assert tried == list(NAMES), ran.stdout[-3000:]
