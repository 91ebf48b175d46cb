"""python -m kaveri.predictor: the steps of `kaveri predictor`, in their own process because two need torch."""

import asyncio
import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kaveri.config.commands import command_group, run_commands
from kaveri.errors import ConfigError
from kaveri.extras import require_modules

if TYPE_CHECKING:
    from rich.console import Console

    from kaveri.predictor.evaluate import Evaluation

app = command_group("Train and evaluate a length predictor.")


def main() -> NoReturn:
    run_commands(app, "kaveri predictor")


@app.command()
def label(
    prompts: Annotated[
        Path,
        typer.Option(help='.jsonl with "prompt", "messages" or "prompt_token_ids" per line, or a raw prompt per line.'),
    ],
    out: Annotated[
        Path, typer.Option(help="Labels, appended as they arrive. Prompts already in the file are skipped.")
    ],
    target: Annotated[str, typer.Option(help="Router, HOST:PORT.", envvar="KAVERI_TARGET")] = "127.0.0.1:50051",
    model: Annotated[str | None, typer.Option(help="Model to label for. Unset: the only served model.")] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts in flight at once.", min=1, max=1024)] = 32,
    max_tokens: Annotated[
        int | None, typer.Option(help="Limit of each answer; a cut answer counts as this long. Unset: none.", min=1)
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one prompt. A timeout ends the run.")] = 600,
) -> None:
    """Run prompts through a served model, greedily, and record how long its answers are."""
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
    from kaveri.workload.prompts import read_prompts

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
        console.print("stopped; run the same command to continue")
        raise typer.Exit(130) from None
    for reason in outcome.refused:
        console.print(f"refused: {reason}", markup=False)
    console.print(f"{outcome.labelled} labelled, {outcome.resumed} labelled before, {len(outcome.refused)} refused")


@app.command()
def train(
    labels: Annotated[Path, typer.Option(help="Made by `kaveri predictor label`.")],
    out: Annotated[Path, typer.Option(help="Folder of the predictor; training resumes from checkpoints in it.")],
    base: Annotated[
        str, typer.Option(help="Classifier to fine-tune: a path, a hub id, or scratch for a small one.")
    ] = "scratch",
    granularity: Annotated[int, typer.Option(help="Tokens per bucket.", min=1)] = 200,
    tokenizer: Annotated[
        str, typer.Option(help="Served model, for its tokenizer: path or hub id. Unset: the labels' model name.")
    ] = "",
    epochs: Annotated[int, typer.Option(help="Passes over all labels; the best epoch is kept.", min=1)] = 12,
    batch_size: Annotated[int, typer.Option(help="Prompts per step.", min=1)] = 16,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate. Unset: 1e-3 from scratch, 3e-5 for a pretrained base.")
    ] = None,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts lose their middle.", min=2)] = 512,
    layers: Annotated[int, typer.Option(help="Layers, from scratch.", min=1)] = 3,
    width: Annotated[int, typer.Option(help="Hidden size, from scratch; a multiple of 32.", min=32)] = 128,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order.", min=0)] = 0,
) -> None:
    """Fine-tune a sequence classifier on labels, and save it with all files needed to serve it."""
    if learning_rate is not None and not 0 < learning_rate < 1:
        raise ConfigError("--learning-rate", f"is {learning_rate:g}; it must be above 0 and below 1")
    if width % 32:
        raise ConfigError("--width", f"is {width}; it must be a multiple of 32")
    require_modules("train", "transformers,predictor", "torch", "accelerate")
    from kaveri.predictor.train import TrainSettings
    from kaveri.predictor.train import train as train_predictor

    _quiet_transformers()
    settings = TrainSettings(
        base=base,
        tokenizer=tokenizer,
        granularity=granularity,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate or (1e-3 if base == "scratch" else 3e-5),
        max_prompt_tokens=max_prompt_tokens,
        layers=layers,
        width=width,
        seed=seed,
    )
    try:
        train_predictor(labels, out, settings, lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("stopped; run the same command to continue from the last epoch", file=sys.stderr)
        raise typer.Exit(130) from None


class _Judged(enum.StrEnum):
    HELD_OUT = "held-out"
    ALL = "all"


@app.command()
def evaluate(
    predictor: Annotated[str, typer.Option(help="Folder of a predictor, or a bundled model's name.")],
    labels: Annotated[Path, typer.Option(help="Made by `kaveri predictor label`.")],
    split: Annotated[
        _Judged, typer.Option(help="held-out: the labels that `train` never uses. all: all labels.")
    ] = _Judged.HELD_OUT,
    tokenizer: Annotated[
        str, typer.Option(help="Served model, for its tokenizer: path or hub id. Unset: the labels' model name.")
    ] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all figures.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="File for a plot: .svg, .png or .pdf.")] = None,
) -> None:
    """Measure accuracy at granularity 100, 200 and 400 against the majority class, calibration, and latency."""
    require_modules("evaluate", "transformers,predictor", "torch")
    from rich.console import Console
    from rich.progress import Progress

    from kaveri.predictor.bundle import LengthPredictor
    from kaveri.predictor.evaluate import evaluate as measure
    from kaveri.predictor.evaluate import plot
    from kaveri.predictor.labels import Split, read_labels

    _quiet_transformers()
    chosen = [entry for entry in read_labels(labels) if split is _Judged.ALL or entry.split is Split.HELD_OUT]
    loaded = LengthPredictor.load(predictor)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("predicting")
        evaluation = measure(
            loaded,
            chosen,
            tokenizer=tokenizer,
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(dataclasses.asdict(evaluation), indent=1) + "\n")
        except OSError as error:
            raise ConfigError("--json", f"{json_path} cannot be written: {error.strerror}") from error
    if plot_path is not None:
        plot(evaluation, plot_path)
    _show(Console(highlight=False), evaluation)


def _show(console: "Console", evaluation: "Evaluation") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{evaluation.model}, predictor {evaluation.version}, {evaluation.accuracies[0].count} prompts"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("granularity", "buckets", "accuracy", "majority class", "within one bucket", "calibration error"):
        table.add_column(name, justify="right")
    for entry in evaluation.accuracies:
        shares = [f"{100 * share:.1f} %" for share in (entry.accuracy, entry.majority, entry.within_one)]
        row = (str(entry.granularity), str(entry.bucket_count), *shares, f"{entry.calibration_error:.3f}")
        table.add_row(*row)
    console.print(table)
    latency = Table(box=SIMPLE_HEAD)
    for name in ("prompts per batch", "ms (p50)", "ms (p90)"):
        latency.add_column(name, justify="right")
    for timed in evaluation.latencies:
        latency.add_row(str(timed.batch_size), f"{1e3 * timed.p50_s:.2f}", f"{1e3 * timed.p90_s:.2f}")
    console.print(latency)
    if evaluation.skipped_granularities:
        skipped = ", ".join(map(str, evaluation.skipped_granularities))
        console.print(f"not measured at {skipped}: not a multiple of the predictor's {evaluation.granularity}")
    if evaluation.truncated:
        console.print(f"{evaluation.truncated} prompts were longer than the predictor reads and were truncated")


def _quiet_transformers() -> None:
    # Hide the progress bars of weight loading.
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    main()
