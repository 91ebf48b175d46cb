"""Asks a local cluster with the clients that people use, and prints the table of docs/doors.md.

`python scripts/client_matrix.py` tries all of them, `--only curl,openai` some. `vllm bench serve` needs a Python that
has vLLM (`--vllm-python PATH`), and is left out without one; scripts/try_smg.py tries smg. The cluster runs kaveri-tiny
in float32 on a CPU. Exits 1 when a client did something that this file does not expect.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from kaveri import Client, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import resolve_model

MODEL = "kaveri-tiny"
PROMPT = "Count from 1 to 9."
MAX_TOKENS = 16
REQUESTS = 16
ASK_S = 300.0


@dataclass(frozen=True, slots=True)
class Door:
    """The cluster, and where a client may work."""

    url: str
    """Of the gateway, without /v1."""
    target: str
    """A router, for the SDK."""
    folder: Path
    """For the client's files."""
    command: str
    """The client's, where it has one."""

    @property
    def tokenizer(self) -> str:
        """The folder of the model's files."""
        return resolve_model(MODEL)

    def expected(self, **prompt: Any) -> str:
        """The SDK's greedy answer."""
        with Client(self.target, timeout_s=ASK_S) as client:
            return client.generate(**prompt, params=SamplingParams(temperature=0, max_tokens=MAX_TOKENS)).text

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a program here, without the network."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        return subprocess.run(
            [str(each) for each in arguments],
            check=False,
            cwd=self.folder,
            env={**os.environ, **offline, "OPENAI_API_KEY": "none", **environment},
            capture_output=True,
            text=True,
            timeout=ASK_S,
        )


@dataclass(frozen=True, slots=True)
class Tried:
    """One thing that a client was asked to do."""

    what: str
    ok: bool
    shown: str = ""
    """What went wrong."""


def curl(door: Door) -> Iterator[Tried]:
    """Whole and streamed."""
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS}
    expected = door.expected(prompt=PROMPT)

    def ask(**fields: Any) -> str:
        header = ("-H", "Content-Type: application/json")
        return door.run(
            "curl", "-sN", f"{door.url}/v1/completions", *header, "-d", json.dumps({**body, **fields})
        ).stdout

    whole = ask()
    yield Tried("completion", f'"text":{json.dumps(expected)}' in whole.replace('": ', '":'), whole)
    events = ask(stream=True).split("\n\n")
    texts = [json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in events[:-2]]
    yield Tried("streamed completion", "".join(texts) == expected and events[-2] == "data: [DONE]", str(events))
    refused = ask(logit_bias={"5": 1})
    yield Tried("refusal by name", '"param": "logit_bias"' in refused.replace('":"', '": "'), refused)


def openai_package(door: Door) -> Iterator[Tried]:
    """Completions and chats; sync, async and streamed."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    given: Any = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}
    options: Any = {"base_url": f"{door.url}/v1", "api_key": "none", "max_retries": 0, "timeout": ASK_S}
    text, chat = door.expected(prompt=PROMPT), door.expected(messages=[{"role": "user", "content": PROMPT}])
    with openai.OpenAI(**options) as client:
        whole = client.completions.create(prompt=PROMPT, **given)
        yield Tried("completion", whole.choices[0].text == text, str(whole))
        answer = client.chat.completions.create(messages=messages, **given)
        yield Tried("chat", answer.choices[0].message.content == chat, str(answer))
        parts = [
            event.choices[0].delta.content or ""
            for event in client.chat.completions.create(messages=messages, stream=True, **given)
        ]
        yield Tried("streamed chat", "".join(parts) == chat, str(parts))

    async def with_async() -> list[str]:
        async with openai.AsyncOpenAI(**options) as client:
            several = [client.chat.completions.create(messages=messages, **given) for _ in range(4)]
            answers = [each.choices[0].message.content or "" for each in await asyncio.gather(*several)]
            stream = await client.completions.create(prompt=PROMPT, stream=True, **given)
            return [*answers, "".join([event.choices[0].text async for event in stream])]

    got = asyncio.run(with_async())
    yield Tried("async, four at once and streamed", got == [chat] * 4 + [text], str(got))


def kaveri_bench(door: Door) -> Iterator[Tried]:
    """Closed loop."""
    load = ("--concurrency", 4, "--requests", REQUESTS, "--workload", "LPLD", "--max-failed", 0)
    ran = door.run(Path(sys.executable).with_name("kaveri"), "bench", *load, "--http", door.url, "--json")
    yield Tried("closed loop", ran.returncode == 0, ran.stdout[-500:] + ran.stderr[-500:])


_VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does; that command fails where vLLM's package has another name, as its build for CPUs has."""


def vllm_bench(door: Door) -> Iterator[Tried]:
    """Random prompts."""
    for backend, path in (("openai", "/v1/completions"),):
        ran = door.run(
            *(door.command, "-c", _VLLM_BENCH, "--backend", backend, "--base-url", door.url, "--endpoint", path),
            *("--model", MODEL, "--tokenizer", door.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", 32, "--random-output-len", MAX_TOKENS, "--num-prompts", REQUESTS),
            *("--max-concurrency", 4, "--ignore-eos", "--save-result", "--result-filename", f"{backend}.json"),
        )
        found = _read(door.folder / f"{backend}.json")
        ok = found.get("completed") == REQUESTS and found.get("total_output_tokens") == REQUESTS * MAX_TOKENS
        yield Tried(f"--backend {backend}", ok, _ends(ran))


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}


def _ends(ran: subprocess.CompletedProcess[str]) -> str:
    return f"status {ran.returncode}: {ran.stdout[-1500:]} {ran.stderr[-1500:]}"


@dataclass(frozen=True, slots=True)
class Asker:
    """A client of the table."""

    name: str
    check: Callable[[Door], Iterator[Tried]]
    command: str = ""
    """Its program."""


ASKERS = (
    Asker("curl", curl, command="curl"),
    Asker("openai", openai_package),
    Asker("kaveri bench --http", kaveri_bench),
    Asker("vllm bench serve", vllm_bench, command="python"),
)


def _command_of(asker: Asker, vllm_python: str) -> str:
    """Where the client's program is. Empty: nowhere."""
    if asker.check is vllm_bench:
        # Not resolved: a virtual environment's Python is a link.
        return os.path.abspath(vllm_python) if vllm_python else ""
    return shutil.which(asker.command) or "" if asker.command else sys.executable


def _version_of(asker: Asker, command: str) -> str:
    if asker.name == "openai":
        return openai.__version__
    if not asker.command:
        return importlib.metadata.version("kaveri")
    asks = ("-c", "import vllm; print(vllm.__version__)") if asker.check is vllm_bench else ("--version",)
    ran = subprocess.run([command, *asks], check=True, capture_output=True, text=True, timeout=ASK_S)
    found = re.search(r"\d+\.\d+\S*", ran.stdout)
    return found.group() if found else ran.stdout.split("\n")[0]


def _try(asker: Asker, door: Door) -> list[Tried]:
    """What the client did; an error of this file's own is one more line."""
    tried: list[Tried] = []
    try:
        for each in asker.check(door):
            print(
                f"{'ok' if each.ok else 'WRONG':6}{asker.name}: {each.what} {'' if each.ok else each.shown}", flush=True
            )
            tried.append(each)
    except (OSError, ValueError, LookupError, subprocess.SubprocessError, openai.OpenAIError) as error:
        print(f"WRONG {asker.name}: {error!r}", flush=True)
        tried.append(Tried("the rest", False, repr(error)))
    return tried


async def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="names of clients, with commas")
    parser.add_argument("--vllm-python", default="", help="a Python that has vLLM")
    given = parser.parse_args()
    wanted = [asker for asker in ASKERS if not given.only or asker.name in given.only.split(",")]
    rows: list[str] = []
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        commands = {asker.name: _command_of(asker, given.vllm_python) for asker in wanted}
        config = StackConfig.of(
            engine="transformers", dtype="float32", prefill_count=1, decode_count=1, gateway_count=1
        )
        async with LocalStack(config, report=print) as stack:
            for asker in wanted:
                command = commands[asker.name]
                if not command:
                    print(f"left out: {asker.name} is not installed")
                    continue
                folder = Path(name) / f"of {asker.name}".replace(" ", "_")
                folder.mkdir()
                door = Door(f"http://{stack.http_targets[0]}", stack.target, folder, command)
                tried = await asyncio.to_thread(_try, asker, door)
                wrong += sum(not each.ok for each in tried)
                results = "; ".join(each.what + ("" if each.ok else ": failed") for each in tried)
                rows.append(f"| {asker.name} | {_version_of(asker, command)} | {results} |")
    print("\n| client | version | tried |\n| --- | --- | --- |", *rows, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
