"""python -m kaveri.predictor: the steps behind `kaveri predictor`, in a process of their own since two need torch."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from kaveri.errors import ConfigError, KaveriError

app = typer.Typer(
    help="Make and judge a length predictor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Runs one step and exits: 0, 1 for a KaveriError, 2 for wrong flags or files, 130 for Ctrl-C."""
    try:
        app(prog_name="kaveri predictor")
    except KaveriError as error:
        print(f"kaveri predictor: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@app.callback()
def _steps() -> None:
    """Label prompts, train on the labels, evaluate on those that were held out."""


@app.command()
def label(
    prompts: Annotated[
        Path,
        typer.Option(help='.jsonl with "prompt", "messages" or "prompt_token_ids" per line, or a raw prompt per line.'),
    ],
    out: Annotated[
        Path, typer.Option(help="Labels, appended as they come. Prompts in it already are not asked again.")
    ],
    target: Annotated[str, typer.Option(help="Router to ask, HOST:PORT.", envvar="KAVERI_TARGET")] = "127.0.0.1:50051",
    model: Annotated[str | None, typer.Option(help="Model to ask. Unset: the only one that is served.")] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts in flight at once.", min=1, max=1024)] = 32,
    max_tokens: Annotated[
        int | None, typer.Option(help="Cuts answers, which then count as so long. Unset: as many as fit.", min=1)
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds until one prompt, and with it the run, is given up.")] = 600,
) -> None:
    """Run prompts through a served model, greedily, and note how long its answers are."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from kaveri.predictor.label import label_prompts
    from kaveri.predictor.prompts import read_prompts

    asked = read_prompts(prompts)
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("labelling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("", total=len(asked))
            run = label_prompts(
                asked,
                out,
                target,
                model=model,
                concurrency=concurrency,
                max_tokens=max_tokens,
                timeout_s=timeout_s,
                advance=lambda count: progress.advance(bar, count),
            )
            outcome = asyncio.run(run)
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be written: {error.strerror}") from error
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    for reason in outcome.refused:
        console.print(f"refused: {reason}", markup=False)
    console.print(f"{outcome.labelled} labelled, {outcome.resumed} labelled before, {len(outcome.refused)} refused")


if __name__ == "__main__":
    main()
