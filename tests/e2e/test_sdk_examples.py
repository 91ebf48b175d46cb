"""The scripts of examples/sdk, and the code on the pages about the SDK, against a real cluster on the fake engine."""

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.local_cluster import run_cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "sdk"
PRINTED_TARGET = "127.0.0.1:50051"
PROMPTS = "Count from 1 to 9.\nSpell the word river.\n"
SHOWN = {
    "chat.py": r".*\n.*\n",
    "many_prompts.py": r"(\d+ tokens: ['\"].*['\"]\n){2}",
    "deadlines.py": r"deadline: .+\nleft after \d+ tokens\ncancelled by id: True\n",
    "errors.py": r"params.temperature is -1; .+\nrefused: .+\nanother-model is not served\nonce is in flight already\n"
    r"(Unavailable|DeadlineExceeded): no router answers\n",
    "where_time_went.py": r"here: first token after .+\n(\w+_s +\d+\.\d\d ms\n){6}"
    r"\d+ bytes of KV from prefill-0 to decode-0 over \w+; 1 attempt, 0 other routers\n",
    "likely_tokens.py": r"\d+ tokens: 'The river'\n( +\d+ .+ \d\.\d\d of .+\n){5}the same draws again: True\n",
}
PAGES = {
    "index.md": r".+\n",
    "sdk.md": r".* (stop|length) \d+\n.*",
    "requests.md": r"name='.*' age=\d+\n(yes|no)\nweather {\"city\": \"(Paris|Rome)\"}\n",
}


def _run(name: str, target: str) -> str:
    if name.endswith(".md"):
        (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
        assert PRINTED_TARGET in code
        command = [sys.executable, "-c", textwrap.dedent(code).replace(PRINTED_TARGET, target)]
    else:
        command = [sys.executable, str(EXAMPLES / name), target]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, input=PROMPTS)
    assert ended.returncode == 0, f"{name}: {ended.stderr}"
    return ended.stdout


@pytest.mark.shows_no_certificate
@pytest.mark.timeout(240)
async def test_every_example_works() -> None:
    assert set(SHOWN) == {path.name for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == set(SHOWN)
    # Slow enough that a request can be ended early.
    async with run_cluster(fake_step_s=0.01, fake_eos_probability=0.02) as cluster:
        printed = await asyncio.gather(*(asyncio.to_thread(_run, name, cluster.target) for name in (*SHOWN, *PAGES)))
    for (name, shown), text in zip((SHOWN | PAGES).items(), printed, strict=True):
        assert re.fullmatch(shown, text, re.DOTALL), f"{name}: {text[:1000]}"
