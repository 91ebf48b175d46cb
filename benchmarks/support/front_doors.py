"""HTTP servers of other projects, started as they come from PyPI, to be measured beside the gateway.

None of them is a dependency: the programs are given by path.
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

START_S = 240.0
END_S = 20.0


@contextlib.contextmanager
def running(command: Sequence[str], address: str) -> Iterator[int]:
    """Starts the program and waits until it answers at "host:port". Yields its process id. Raises RuntimeError with
    the end of its log when it does not answer within START_S."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_environment())
        try:
            give_up_s = time.monotonic() + START_S
            while not _answers(f"http://{address}/v1/models"):
                if process.poll() is not None or time.monotonic() > give_up_s:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} does not answer:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def smg(program: Path, router: str) -> tuple[list[str], str]:
    """The command of an smg whose worker is a router with --vllm-grpc, and its address."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(program), "launch", "--worker-urls", f"grpc://{router}", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warn"]
    return command, f"127.0.0.1:{port}"


def vllm_router(program: Path, gateway: str) -> tuple[list[str], str]:
    """The command of vLLM's router whose worker is a gateway, and its address."""
    port, metrics_port = _free_port(), _free_port()
    command = [str(program), "--worker-urls", f"http://{gateway}", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--log-level", "warning"]
    return [*command, "--policy", "round_robin"], f"127.0.0.1:{port}"


def vllm_serve(python: Path, model: Path, streams: int) -> tuple[list[str], str]:
    """The command of vLLM's own HTTP server with its own engine, of a Python that has vLLM, and its address. Its engine
    is a process of its own."""
    port = _free_port()
    # `vllm serve` runs this module. The command itself does not start where vLLM's package has another name.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "kaveri-tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", str(streams), "--disable-log-stats"]
    return [*command, "--disable-uvicorn-access-log"], f"127.0.0.1:{port}"


def _environment() -> dict[str, str]:
    """One thread for vLLM's engine, and no call of any of them to the outside."""
    ours = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ours


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return b"kaveri-tiny" in response.read()
    except (OSError, ValueError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
