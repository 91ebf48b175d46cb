"""Runs deploy/compose for real: builds the images, starts all, asks, kills and restarts containers under load, stops.

`make compose-test`. It needs a Docker daemon, docker-compose 1.29 or `docker compose`, and curl; it is not part of
continuous integration, which has no daemon. docs/containers.md keeps the log that it prints. Variables of the compose
file, such as BASE_IMAGE and REDIS_IMAGE, are passed on. The ports are free ones.

It checks that no request fails, with a client that never retries, and that greedy answers stay the same. It does not
check speed, GPUs or several machines.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai

COMPOSE_FILE = Path(__file__).parent.parent / "deploy" / "compose" / "docker-compose.yml"
PROJECT = "kaveri-compose-test"
ROLLING = (
    "router-0",
    "router-1",
    "gateway-0",
    "gateway-1",
    "prefill-0",
    "prefill-1",
    "decode-0",
    "decode-1",
    "predictor",
)
IMAGES = ("kaveri", "kaveri-engine")
PROMPTS = ("Count from 1 to 9.", "What is the capital of France?", "Name three colours.", "Say hello.")
MODEL = "kaveri-tiny"
ANSWER_TOKENS = 128
STREAMS = 4
START_S = 240.0
STEP_S = 90.0

_began = time.monotonic()


def say(text: str) -> None:
    """One line of the log, with the seconds since the start."""
    print(f"{time.monotonic() - _began:7.1f} s  {text}", flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class ComposedStack:
    """The containers of one compose project. Raises subprocess.CalledProcessError when a command fails."""

    def __init__(self) -> None:
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        self._compose = [*command, "-p", PROJECT, "-f", str(COMPOSE_FILE)]
        self.http_port = free_port()
        self._environment = os.environ | {
            # In bfloat16, the model's own, a greedy answer may depend on what it is batched with.
            "KAVERI_DTYPE": "float32",
            "KAVERI_HTTP_PORT": str(self.http_port),
            "KAVERI_PORT": str(free_port()),
            "KAVERI_PORT_1": str(free_port()),
        }

    def compose(self, *words: str, timeout_s: float = STEP_S) -> str:
        """Runs one command of docker-compose; returns what it printed."""
        done = subprocess.run(
            [*self._compose, *words],
            env=self._environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            done.check_returncode()
        return done.stdout

    def docker(self, *words: str) -> str:
        return subprocess.run(["docker", *words], timeout=STEP_S, capture_output=True, text=True, check=True).stdout

    def container(self, name: str) -> str:
        """The id of a service's container."""
        return self.compose("ps", "-q", name).strip()

    def unhealthy(self) -> list[str]:
        """Services that do not run, or whose health check does not pass yet."""
        shown = self.docker("inspect", *self.compose("ps", "-q").split())
        found = []
        for container in json.loads(shown):
            state = container["State"]
            if state["Status"] != "running" or state.get("Health", {"Status": "healthy"})["Status"] != "healthy":
                found.append(container["Name"])
        return found

    def wait_until(self, what: str, holds: Callable[[], bool], limit_s: float) -> None:
        """Raises TimeoutError."""
        end = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {limit_s:g} s; unhealthy: {self.unhealthy()}")
            time.sleep(0.5)

    def wait_until_healthy(self, limit_s: float = STEP_S) -> None:
        self.wait_until("all containers are healthy", lambda: not self.unhealthy(), limit_s)

    def logged(self, event: str) -> int:
        """How many lines of this event the routers have logged."""
        return self.compose("logs", "--no-color", "router-0", "router-1").count(f'"event": "{event}"')

    def restart_count(self, name: str) -> int:
        """How often the restart policy has started a service again."""
        return int(self.docker("inspect", "--format", "{{.RestartCount}}", self.container(name)))


class SteadyLoad:
    """Streams of the openai client, one request after the other, until it is stopped."""

    def __init__(self, port: int, expected: dict[str, str]) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60.0, max_retries=0
        )
        self._expected = expected
        self._stopping = False
        self._finished = asyncio.Event()
        self.finished_count = 0
        self.faults: list[str] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(STREAMS):
                group.create_task(self._ask_on(index))
        await self._client.close()

    def stop(self) -> None:
        self._stopping = True

    async def wait_for_more(self, count: int) -> None:
        """Returns when that many more answers have ended. Raises TimeoutError after STEP_S."""
        wanted = self.finished_count + count
        async with asyncio.timeout(STEP_S):
            while self.finished_count < wanted:
                self._finished.clear()
                await self._finished.wait()

    async def _ask_on(self, index: int) -> None:
        while not self._stopping:
            prompt = PROMPTS[index % len(PROMPTS)]
            index += 1
            try:
                answer = await self._answer(prompt, stream=index % 2 == 0)
            except openai.OpenAIError as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                continue
            self.finished_count += 1
            self._finished.set()
            if answer != self._expected[prompt]:
                self.faults.append(f"{prompt!r} was answered by {answer!r}, not {self._expected[prompt]!r}")

    async def _answer(self, prompt: str, *, stream: bool) -> str:
        asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        asked["extra_body"] = {"ignore_eos": True}
        if not stream:
            return (await self._client.completions.create(**asked)).choices[0].text
        events = await self._client.completions.create(**asked, stream=True)
        return "".join([event.choices[0].text async for event in events if event.choices])


async def under_load(stack: ComposedStack, expected: dict[str, str], what: str, disturb: Callable[[], None]) -> int:
    """Runs `disturb` while requests are asked, and some more after it. Returns how many faults there were."""
    load = SteadyLoad(stack.http_port, expected)
    running = asyncio.create_task(load.run())
    try:
        await load.wait_for_more(10)
        await asyncio.to_thread(disturb)
        await load.wait_for_more(20)
    finally:
        load.stop()
        await running
    say(f"{what}: {load.finished_count} answers, {len(load.faults)} faults")
    for fault in load.faults[:5]:
        say(f"  {fault[:2000]}")
    return len(load.faults)


def ask_with_curl(port: int) -> dict[str, str]:
    """The answers to PROMPTS, one by one."""
    answers = {}
    for prompt in PROMPTS:
        question = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        command = ["curl", "--silent", "--show-error", "--fail", "--max-time", "60"]
        command += ["--header", "Content-Type: application/json", "--data", json.dumps(question)]
        command.append(f"http://127.0.0.1:{port}/v1/completions")
        shown = subprocess.run(command, check=True, capture_output=True, text=True)
        answers[prompt] = json.loads(shown.stdout)["choices"][0]["text"]
    return answers


def check_confinement(stack: ComposedStack) -> None:
    """Raises AssertionError unless services run as a numbered user, without capabilities, on a read-only root."""
    for name in ("router-0", "decode-0"):
        shown = stack.docker(
            *("exec", stack.container(name), "sh", "-c"),
            "id -u; grep CapBnd /proc/1/status; touch /home/kaveri/x 2>&1; touch /models/x && echo written",
        )
        lines = shown.splitlines()
        assert lines[0] == "10001", shown
        assert int(lines[1].split()[1], 16) == 0, shown
        assert "Read-only file system" in lines[2], shown
        assert lines[3:] == ["written"], shown
    say("confined: uid 10001, no capability, read-only root, /models can be written")


async def check(stack: ComposedStack) -> int:
    """Returns how many faults there were."""
    stack.wait_until("a first answer", lambda: answers_curl(stack.http_port), START_S)
    expected = await asyncio.to_thread(ask_with_curl, stack.http_port)
    say(f"curl: {len(expected)} answers, {expected[PROMPTS[0]][:40]!r}")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="none", timeout=60.0)
    say(f"openai {openai.__version__}: models {[model.id for model in client.models.list()]}")
    check_confinement(stack)
    shown = stack.docker("exec", stack.container("router-0"), "kaveri", "status", "--target", "router-0:50051")
    print(shown, flush=True)

    def kill_decode() -> None:
        stack.compose("kill", "-s", "SIGKILL", "decode-0")

    def kill_process_of_router() -> None:
        restarts = stack.restart_count("router-0")
        # The child of tini: the container ends, and its restart policy starts it again.
        stack.docker(
            *("exec", stack.container("router-0"), "python3", "-c"),
            "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 9)",
        )
        stack.wait_until("router-0 was started again", lambda: stack.restart_count("router-0") > restarts, STEP_S)

    faults = await under_load(stack, expected, "decode-0 killed with its container", kill_decode)
    lost = stack.logged("attempt_lost")
    say(f"  {lost} requests lost their attempt and went on elsewhere")
    stack.compose("up", "-d", "--no-build", "decode-0")
    stack.wait_until_healthy()
    faults += await under_load(stack, expected, "router-0's process killed, started again", kill_process_of_router)
    reattached = stack.logged("request_reattached")
    say(f"  {reattached} requests were re-attached through the other router")
    if 0 in (lost, reattached):
        say("a kill met no request in flight: it showed nothing")
        faults += 1
    stack.wait_until_healthy()
    for name in ROLLING:

        def restart(name: str = name) -> None:
            stack.compose("restart", "-t", "35", name)
            stack.wait_until_healthy()

        faults += await under_load(stack, expected, f"{name} restarted", restart)
    return faults


def answers_curl(port: int) -> bool:
    """Whether a request would be taken."""
    asked = ["curl", "--silent", "--fail", "--max-time", "5", "--output", os.devnull, f"http://127.0.0.1:{port}/health"]
    return subprocess.run(asked, check=False).returncode == 0


@contextlib.contextmanager
def started() -> Iterator[ComposedStack]:
    """All containers, healthy; gone afterwards."""
    stack = ComposedStack()
    stack.compose("up", "-d", "--no-build", timeout_s=START_S)
    try:
        stack.wait_until_healthy(START_S)
        say("all containers are healthy")
        yield stack
        began = time.monotonic()
        stack.compose("stop", "-t", "35", timeout_s=START_S)
        codes = {
            container["Name"].removeprefix(f"/{PROJECT}"): container["State"]["ExitCode"]
            for container in json.loads(stack.docker("inspect", *stack.compose("ps", "-a", "-q").split()))
        }
        failed = {name: code for name, code in codes.items() if code != 0}
        say(f"stopped in {time.monotonic() - began:.1f} s; exit codes other than 0: {failed}")
    except BaseException:
        print(stack.compose("logs", "--tail", "20"), file=sys.stderr)
        raise
    finally:
        stack.compose("down", "-v", timeout_s=START_S)
        say("removed")


def main() -> int:
    """Returns 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    arguments = parser.parse_args()
    stack = ComposedStack()
    say(stack.docker("version", "--format", "docker client {{.Client.Version}}, server {{.Server.Version}}").strip())
    say(f"compose {stack.compose('version', '--short').strip()}")
    if not arguments.no_build:
        stack.compose("build", timeout_s=3600.0)
        say("images built")
    for image in IMAGES:
        size = int(stack.docker("image", "inspect", "--format", "{{.Size}}", image))
        say(f"image {image}: {size / 1e6:.0f} MB")
    with started() as stack:
        faults = asyncio.run(check(stack))
    say("passed" if faults == 0 else f"{faults} faults")
    return 0 if faults == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
