"""kaveri generate: one prompt, its answer streamed to stdout."""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kaveri.cli import options
from kaveri.cli.options import option
from kaveri.client.defaults import DEFAULT_TARGET, DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from kaveri.client.answer import Chunk


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from, as it is; see `kaveri chat` for chat templates.")],
    target: options.Target = DEFAULT_TARGET,
    model: options.Model = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    timeout_s: options.TimeoutS = DEFAULT_TIMEOUT_S,
    as_json: Annotated[bool, option("Print JSON: text, token ids, finish reason, usage and timing.", "--json")] = False,
) -> None:
    """Generate an answer to one prompt."""
    from kaveri.client.sync_client import Client
    from kaveri.domain.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with (
        Client(options.targets_of(target), timeout_s=timeout_s) as client,
        client.stream(prompt, params=params, model=model) as stream,
    ):
        if as_json:
            print(json.dumps(dataclasses.asdict(stream.collect())))
            return
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            if chunk.finish_reason is not None:
                print()
                _show_figures(chunk)


def _show_figures(last: "Chunk") -> None:
    # Only on terminals: programs read --json, and a pipe gets the answer alone.
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return
    from rich.console import Console

    assert last.usage is not None
    assert last.timing is not None
    parts = [f"{last.usage.prompt_tokens} + {last.usage.completion_tokens} tokens", f"ended by {last.finish_reason}"]
    if last.timing.ttft_s is not None:
        parts.append(f"TTFT {last.timing.ttft_s * 1e3:.0f} ms")
    if last.timing.tpot_s is not None:
        parts.append(f"TPOT {last.timing.tpot_s * 1e3:.1f} ms")
    Console(stderr=True, highlight=False).print(" · ".join(parts), style="dim")
