"""Puts a stock smg, from PyPI, in front of a router of a local cluster, and asks it what docs/doors.md says it answers.

`python scripts/try_smg.py --smg PATH` uses an smg that is installed; without it, one is installed into a temporary
environment (a wheel of 37 MB). With `--tls CERT KEY CA` the cluster asks for certificates; smg's gRPC client speaks no
TLS, so it goes through proxies that show this one (docs/operations.md says how to make the files). Prints a line for
each check. Exits 1 when one fails.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

from kaveri import AsyncClient, SamplingParams, TlsFiles
from kaveri.client.loop_thread import LoopThread
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.rpc.tls import RpcTls, use_tls

SMG = "smg==1.13.0"
MODEL = "kaveri-tiny"
START_S = 180.0
ASK_S = 60.0
MAX_TOKENS = 16
PROMPTS = ("hello", "Count from 1 to 12.", "Spell umbrella.", "Count from 3 to 9.", "What can you do?")
REFUSED: dict[str, Any] = {"min_p": 2.0, "frequency_penalty": 3.0}
"""Parameters of a chat that smg passes on, with values that no request may have."""
TAKEN: dict[str, Any] = {"frequency_penalty": 0.5, "min_p": 0.2, "response_format": {"type": "json_object"}}
"""Parameters that smg passes on."""


def installed_smg(folder: Path) -> Path:
    """The command, in a new environment."""
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "-q", SMG], check=True, timeout=600)
    return folder / "bin" / "smg"


@contextlib.contextmanager
def running_smg(command: Path, workers: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of an smg with these workers, as its flags say them."""
    port, metrics_port = _free_port(), _free_port()
    flags = [*workers, "--host", "127.0.0.1", "--port", str(port)]
    flags += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    with (folder / "smg.log").open("w") as log:
        smg = subprocess.Popen([command, "launch", *flags], stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        give_up_s = time.monotonic() + START_S
        while not _lists_the_model(url):
            if smg.poll() is not None or time.monotonic() > give_up_s:
                sys.exit(f"smg did not register its workers:\n{(folder / 'smg.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        smg.terminate()
        try:
            smg.wait(10)
        except subprocess.TimeoutExpired:
            smg.kill()


@contextlib.contextmanager
def showing_certificate(target: str, files: TlsFiles | None) -> Iterator[str]:
    """Where smg reaches the port "host:port": a port without TLS, from which all goes on with these files. None: there
    is no TLS."""
    if files is None:
        yield target
        return
    context = ssl.create_default_context(cafile=files.authority)
    context.load_cert_chain(files.certificate, files.key)
    # gRPC asks for it.
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")
    connections: set[asyncio.Task[None] | None] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        # asyncio forgets the task of a connection that is lost.
        connections.add(task)
        inner = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=files.name)
        ways = [asyncio.ensure_future(way) for way in (_pass_on(reader, inner[1]), _pass_on(inner[0], writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for open_writer in (writer, inner[1]):
            open_writer.close()
        await asyncio.wait(ways)
        connections.discard(task)

    async def close() -> None:
        server.close()

    # Of its own: this thread waits for smg.
    loop = LoopThread("proxy")
    server = loop.run(asyncio.start_server(connect, "127.0.0.1", 0))
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        loop.end(close())


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()


async def check(url: str, router: str) -> list[str]:
    """What is not as it should be."""
    wrong: list[str] = []

    def note(what: str, ok: bool, shown: object = "") -> None:
        print(f"{'ok' if ok else 'WRONG':6}{what} {shown if not ok else ''}".rstrip())
        if not ok:
            wrong.append(what)

    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    async with (
        AsyncClient(router, timeout_s=ASK_S) as sdk,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=ASK_S) as client,
    ):
        for prompt in PROMPTS:
            messages: Any = [{"role": "user", "content": prompt}]
            expected = await sdk.generate(messages=messages, params=greedy)
            given: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
            whole = await client.chat.completions.create(**given)
            note(f"chat {prompt!r}", whole.choices[0].message.content == expected.text, whole.choices)
            assert whole.usage is not None
            note("  its usage", whole.usage.completion_tokens == expected.usage.completion_tokens, whole.usage)
            stream = await client.chat.completions.create(**given, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
            note("  streamed", text == expected.text, text)
        several = await client.chat.completions.create(**given, n=3, logprobs=True, top_logprobs=2)
        note("chat with n=3 and logprobs", len(several.choices) == 3 and bool(several.choices[2].logprobs), several)
        for name, value in REFUSED.items():
            try:
                await client.chat.completions.create(**given, extra_body={name: value})
                note(f"{name} is refused", False)
            except openai.BadRequestError as error:
                note(f"{name} is refused by name", name in str(error), error)
        for name, value in TAKEN.items():
            taken = await client.chat.completions.create(**{**given, "max_tokens": 100}, extra_body={name: value})
            note(f"{name} is taken", bool(taken.choices), taken)
            if name == "response_format":
                note(
                    "  the answer is an object",
                    isinstance(json.loads(taken.choices[0].message.content or ""), dict),
                    taken,
                )
        expected = await sdk.generate("Count from 1 to 9.", params=greedy)
        completion = await client.completions.create(
            model=MODEL, prompt="Count from 1 to 9.", temperature=0, max_tokens=MAX_TOKENS
        )
        note("completion", completion.choices[0].text == expected.text, completion.choices)
        expected = await sdk.generate(messages=messages, params=greedy)
        response = await client.responses.create(
            model=MODEL, input=PROMPTS[-1], temperature=0, max_output_tokens=MAX_TOKENS
        )
        note("Responses API", response.output_text == expected.text, response.output)
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = await asyncio.to_thread(_post, f"{url}/v1/messages", body)
    note("Anthropic's Messages", answer["content"][0]["text"] == expected.text, answer)
    return wrong


async def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smg", type=Path, help="an smg that is installed")
    parser.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help="files of the cluster")
    given = parser.parse_args()
    files = None
    if given.tls:
        files = TlsFiles(*given.tls, "kaveri")
        use_tls(RpcTls(files))
    settings: dict[str, Any] = {"router_flags": ("--vllm-grpc",)}
    if files is not None:
        settings |= {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.authority}
    config = StackConfig.of(
        engine="transformers", dtype="float32", prefill_count=1, decode_count=1, start_timeout_s=200.0, **settings
    )
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as proxies:
        command = given.smg or installed_smg(Path(name) / "venv")
        print(_version(command))
        async with LocalStack(config, report=print) as stack:
            address = stack.view().instances["router-0"].record.address
            workers = ["--worker-urls", f"grpc://{proxies.enter_context(showing_certificate(address, files))}"]
            with running_smg(command, workers, Path(name)) as url:
                wrong = await check(url, stack.target)
    print(f"{len(wrong)} checks failed" if wrong else "all checks passed")
    return 1 if wrong else 0


def _version(command: Path) -> str:
    return subprocess.run([command, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _lists_the_model(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as response:
            return MODEL in {model["id"] for model in json.load(response)["data"]}
    except (OSError, ValueError):
        return False


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ASK_S) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
