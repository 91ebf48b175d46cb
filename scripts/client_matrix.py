"""Asks a local cluster with the clients that people use, and prints the table of docs/doors.md.

`python scripts/client_matrix.py` tries all of them, `--only curl,openai` some. `vllm bench serve` needs a Python that
has vLLM (`--vllm-python PATH`). lm_eval, guidellm, aiperf and smg need `--environments FOLDER`: each has a virtual
environment of its own there, which is made from PyPI when it is missing. Without these flags, and where a package
cannot be installed, those clients are left out. The cluster runs kaveri-tiny in float32 on a CPU. Exits 1 when a client
did something that this file does not expect.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import try_smg

from kaveri import Client, SamplingParams
from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack
from kaveri.models import resolve_model

MODEL = "kaveri-tiny"
PROMPT = "Count from 1 to 9."
MAX_TOKENS = 16
REQUESTS = 16
ASK_S = 300.0
INSTALL_S = 1200.0


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

    def run(self, *arguments: object, offline: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a program here. offline: it is to ask no hub of models."""
        environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": str(self.folder / "hub")}
        # Programs of other environments have packages of their own.
        environment.pop("PYTHONPATH", None)
        if offline:
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        # What they start ends with them: some leave processes behind.
        return subprocess.run(
            ["timeout", "--kill-after=5", str(ASK_S), *map(str, arguments)],
            check=False,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
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
    refused = ask(suffix="end")
    yield Tried("refusal by name", '"param": "suffix"' in refused.replace('":"', '": "'), refused)


def buf_curl(door: Door) -> Iterator[Tried]:
    """Kaveri's own gRPC at a router, whose contract buf asks the router for by reflection."""

    def ask(method: str, request: Any) -> subprocess.CompletedProcess[str]:
        flags = ("--protocol", "grpc", "--http2-prior-knowledge", "-d", json.dumps(request))
        return door.run(door.command, "curl", *flags, f"http://{door.target}/kaveri.v1.InferenceService/{method}")

    def responses(ran: subprocess.CompletedProcess[str]) -> list[Any]:
        # They come one after the other, without anything between them.
        decoder, left, found = json.JSONDecoder(), ran.stdout.strip(), []
        while left:
            value, end = decoder.raw_decode(left)
            found.append(value)
            left = left[end:].strip()
        return found

    prompt = {"text": PROMPT, "params": {"temperature": 0, "maxTokens": MAX_TOKENS}}
    ran = ask("Generate", prompt)
    text = "".join(each.get("text", "") for each in responses(ran))
    yield Tried("Generate, streamed", text == door.expected(prompt=PROMPT), str(ran))
    ran = ask("ListModels", {})
    yield Tried("ListModels", MODEL in ran.stdout, str(ran))
    ran = ask("Generate", {**prompt, "params": {"topP": 2}})
    yield Tried("refusal by name", ran.returncode != 0 and "params.top_p" in ran.stderr, str(ran))


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
    for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        ran = door.run(
            *(door.command, "-c", _VLLM_BENCH, "--backend", backend, "--base-url", door.url, "--endpoint", path),
            *("--model", MODEL, "--tokenizer", door.tokenizer, "--dataset-name", "random"),
            *("--random-input-len", 32, "--random-output-len", MAX_TOKENS, "--num-prompts", REQUESTS),
            *("--max-concurrency", 4, "--ignore-eos", "--save-result", "--result-filename", f"{backend}.json"),
        )
        found = _read(door.folder / f"{backend}.json")
        ok = found.get("completed") == REQUESTS and found.get("total_output_tokens") == REQUESTS * MAX_TOKENS
        yield Tried(f"--backend {backend}", ok, _ends(ran))


_TASK = """
task: kaveri_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""
_WORDS = (
    {"question": "Count from 1 to 4:", "choices": ["1 2 3 4", "4 3 1 2"], "label": 0},
    {"question": "The letters of cat are", "choices": ["x y z", "c a t"], "label": 1},
    {"question": "hello", "choices": ["world", "12", "!"], "label": 0},
)


def lm_eval(door: Door) -> Iterator[Tried]:
    """A task with loglikelihood, on words of our own; each figure is compared with the SDK's."""
    data, found = door.folder / "words.jsonl", door.folder / "found"
    data.write_text("".join(json.dumps(row) + "\n" for row in _WORDS))
    (door.folder / "words.yaml").write_text(_TASK.format(data=data))
    model = (
        f"base_url={door.url}/v1/completions,model={MODEL},tokenizer={door.tokenizer},num_concurrent=2,max_retries=1"
    )
    ran = door.run(
        *(door.command, "--model", "local-completions", "--model_args", model, "--tasks", "kaveri_words"),
        *("--include_path", door.folder, "--output_path", found, "--log_samples"),
    )
    samples = [json.loads(line) for path in found.rglob("samples_*.jsonl") for line in path.read_text().splitlines()]
    wrong = []
    with Client(door.target, timeout_s=ASK_S) as client:
        for sample in samples:
            pairs = zip(sample["arguments"].values(), sample["resps"], strict=True)
            for asked, ((told, _),) in pairs:
                context = client.tokenize(asked["arg_0"])
                whole = client.tokenize(asked["arg_0"] + asked["arg_1"])
                answer = client.generate(
                    prompt_token_ids=whole, params=SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
                )
                entries = [token.logprobs for token in answer.prompt_tokens[len(context) :]]
                expected = sum(entry.logprob for entry in entries if entry is not None)
                if abs(float(told) - expected) > 1e-3:
                    wrong.append((asked, told, expected))
    ok = ran.returncode == 0 and len(samples) == len(_WORDS) and not wrong
    yield Tried("local-completions: loglikelihoods of a multiple-choice task", ok, f"{wrong} {_ends(ran)}")


def guidellm(door: Door) -> Iterator[Tried]:
    """Four streams of chats."""
    report = door.folder / "report.json"
    ran = door.run(
        *(door.command, "run", "--backend", f"kind=openai_http,target={door.url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={door.tokenizer}", "--disable-console"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={MAX_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
    )
    metrics = (_read(report).get("benchmarks") or [{}])[0].get("metrics", {})
    ok = metrics.get("request_totals", {}).get("successful") == REQUESTS
    tokens = metrics.get("output_token_count", {}).get("successful", {}).get("total_sum")
    yield Tried(f"{REQUESTS} chats, none failed", ok and tokens == REQUESTS * MAX_TOKENS, _ends(ran))


def aiperf(door: Door) -> Iterator[Tried]:
    """Four streams of chats. An answer without a text counts as failed there, so none may end with its first token."""
    # It knows files of a tokenizer only while it is not told that there is no hub.
    ran = door.run(
        *(door.command, "profile", "--model", MODEL, "--url", door.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", door.tokenizer, "--concurrency", 4, "--request-count", REQUESTS, "--ui", "none"),
        *("--synthetic-input-tokens-mean", 32, "--output-tokens-mean", MAX_TOKENS),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", door.folder),
        offline=False,
    )
    report = _read(door.folder / "profile_export_aiperf.json")
    ok = (report.get("request_count") or {}).get("avg") == REQUESTS and not report.get("error_request_count")
    tokens = (report.get("usage_completion_tokens") or {}).get("avg")
    yield Tried(f"{REQUESTS} chats, none failed", ok and tokens == MAX_TOKENS, _ends(ran))


def smg(door: Door) -> Iterator[Tried]:
    """With the router as its worker; see scripts/try_smg.py."""
    try:
        workers = ["--worker-urls", f"grpc://{door.target}"]
        with try_smg.running_smg(Path(door.command), workers, door.folder) as url:
            wrong = asyncio.run(try_smg.check(url, door.target))
    except SystemExit as error:
        wrong = [str(error)]
    yield Tried("router as worker: chat, completions, Responses, Messages", not wrong, str(wrong))


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
    packages: tuple[str, ...] = ()
    """Of the environment that it needs, itself first."""


ASKERS = (
    Asker("curl", curl, command="curl"),
    Asker("buf curl", buf_curl, command="buf"),
    Asker("openai", openai_package),
    Asker("kaveri bench --http", kaveri_bench),
    Asker("vllm bench serve", vllm_bench, command="python"),
    Asker("lm_eval", lm_eval, "lm_eval", ("lm-eval[api]==0.4.13", "transformers==5.23.0")),
    Asker("guidellm", guidellm, "guidellm", ("guidellm==0.8.1",)),
    Asker("aiperf", aiperf, "aiperf", ("aiperf==0.13.0",)),
    Asker("smg", smg, "smg", (try_smg.SMG,)),
)


def _installed(asker: Asker, environments: str) -> str:
    """The client's program in its environment, which is made if need be. Empty: it cannot be had."""
    if not environments:
        return ""
    folder = Path(environments).absolute() / asker.name
    command = folder / "bin" / asker.command
    if not command.exists():
        venv.create(folder, with_pip=True)
        install = [folder / "bin" / "pip", "install", "-q", *asker.packages]
        ran = subprocess.run(install, check=False, capture_output=True, text=True, timeout=INSTALL_S)
        if ran.returncode:
            print(f"{asker.name} cannot be installed: {ran.stderr[-500:]}")
            return ""
    return str(command)


def _command_of(asker: Asker, vllm_python: str, environments: str) -> str:
    """Where the client's program is. Empty: nowhere."""
    if asker.packages:
        return _installed(asker, environments)
    if asker.check is vllm_bench:
        # Not resolved: a virtual environment's Python is a link.
        return os.path.abspath(vllm_python) if vllm_python else ""
    return shutil.which(asker.command) or "" if asker.command else sys.executable


def _version_of(asker: Asker, command: str) -> str:
    if asker.name == "openai":
        return openai.__version__
    if not asker.command:
        return importlib.metadata.version("kaveri")
    if asker.packages:
        name = re.split(r"[\[=]", asker.packages[0])[0]
        asks: tuple[str, ...] = ("-c", f"import importlib.metadata as all; print(all.version({name!r}))")
        command = str(Path(command).with_name("python"))
    elif asker.check is vllm_bench:
        asks = ("-c", "import vllm; print(vllm.__version__)")
    else:
        asks = ("--version",)
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
    parser.add_argument("--environments", default="", help="a folder with virtual environments of clients, or for them")
    given = parser.parse_args()
    wanted = [asker for asker in ASKERS if not given.only or asker.name in given.only.split(",")]
    rows: list[str] = []
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        commands = {asker.name: _command_of(asker, given.vllm_python, given.environments) for asker in wanted}
        config = StackConfig.of(
            engine="transformers",
            dtype="float32",
            prefill_count=1,
            decode_count=1,
            gateway_count=1,
            # Only some clients need it, and the environment of vLLM does not have its package.
            router_flags=("--vllm-grpc",) if importlib.util.find_spec("smg_grpc_proto") else (),
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
