"""kaveri predictor evaluate: a predictor's accuracy, calibration and latency on labels, as JSON and as a plot."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.extras import require_modules
from kaveri.predictor.accuracy import Accuracy, measure_accuracy
from kaveri.predictor.bundle import LengthPredictor
from kaveri.predictor.labels import Label, load_tokenizer, token_ids_of

GRANULARITIES = (100, 200, 400)
"""Granularities of TetriInfer's evaluation, section 5.2.2."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
_BATCH = 32
_WARM_UP_BATCHES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLatency:
    """Measured seconds per call of predict() with `batch_size` prompts, on this machine."""

    batch_size: int
    repeats: int
    p50_s: float
    p90_s: float
    prompt_tokens: float
    """Mean length of the prompts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluation results of one predictor on one set of labels."""

    model: str
    version: str
    granularity: int
    accuracies: tuple[Accuracy, ...]
    skipped_granularities: tuple[int, ...]
    """Granularities that are not multiples of the predictor's, so its buckets cannot be summed."""
    truncated: int
    """Number of prompts that the predictor truncated."""
    latencies: tuple[BatchLatency, ...]


def evaluate(
    predictor: LengthPredictor,
    labels: Sequence[Label],
    *,
    tokenizer: str = "",
    repeats: int = 20,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Predict the answer lengths of labelled prompts, and measure accuracy, calibration and latency.

    tokenizer: path or hub id of the served model's; empty: the labels' model name. repeats: batches timed per batch
    size; 0: no latency. advance: called with the number of prompts predicted so far and the total. Raises ConfigError:
    no labels, labels of another model, or a tokenizer that does not match.
    """
    if not labels:
        raise ConfigError("--labels", "there is none to evaluate on")
    if (labels[0].model, labels[0].vocab_size) != (predictor.model, predictor.vocab_size):
        raise ConfigError("--labels", f"are of model {labels[0].model!r}; the predictor is for {predictor.model!r}")
    prompts = token_ids_of(labels, load_tokenizer(tokenizer or labels[0].model))
    probabilities = predict_all(predictor, prompts, advance)
    lengths = [label.output_tokens for label in labels]
    own = predictor.granularity
    wanted = sorted({own, *GRANULARITIES})
    fitting = [granularity for granularity in wanted if granularity % own == 0]
    return Evaluation(
        model=predictor.model,
        version=predictor.version,
        granularity=own,
        accuracies=tuple(measure_accuracy(probabilities, lengths, own, entry // own) for entry in fitting),
        skipped_granularities=tuple(sorted(set(wanted) - set(fitting))),
        truncated=sum(len(prompt) > predictor.max_prompt_tokens for prompt in prompts),
        latencies=tuple(measure_latency(predictor, prompts, size, repeats) for size in BATCH_SIZES if repeats),
    )


def predict_all(
    predictor: LengthPredictor, prompts: Sequence[Sequence[int]], advance: Callable[[int, int], None]
) -> list[list[float]]:
    """Call predict() in batches for any number of prompts; return all rows in order."""
    rows: list[list[float]] = []
    while len(rows) < len(prompts):
        rows += predictor.predict(prompts[len(rows) : len(rows) + _BATCH])
        advance(len(rows), len(prompts))
    return rows


def measure_latency(
    predictor: LengthPredictor, prompts: Sequence[Sequence[int]], batch_size: int, repeats: int
) -> BatchLatency:
    """Time predict() on batches of prompts in their given order, so that lengths are mixed."""
    times_s, counted = [], []
    for turn in range(-_WARM_UP_BATCHES, repeats):
        batch = [prompts[(turn * batch_size + place) % len(prompts)] for place in range(batch_size)]
        started_s = time.perf_counter()
        predictor.predict(batch)
        if turn >= 0:
            times_s.append(time.perf_counter() - started_s)
            counted += [len(prompt) for prompt in batch]
    times_s.sort()
    return BatchLatency(
        batch_size=batch_size,
        repeats=repeats,
        p50_s=statistics.median(times_s),
        p90_s=times_s[int(0.9 * (len(times_s) - 1))],
        prompt_tokens=statistics.mean(counted),
    )


def plot(evaluation: Evaluation, path: Path) -> None:
    """Plot accuracy, calibration and latency to a file whose suffix sets the format. Raises ConfigError("--plot")
    without matplotlib or if it cannot be written."""
    require_modules("--plot", "predictor", "matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4))
    left, middle, right = figure.subplots(1, 3)
    places = range(len(evaluation.accuracies))
    for shift, (name, color) in zip(
        (-0.27, 0.0, 0.27), (("majority", "#bbbbbb"), ("accuracy", "#2a7f9e"), ("within_one", "#8cc5d8")), strict=True
    ):
        shares = [100 * getattr(entry, name) for entry in evaluation.accuracies]
        label = {"majority": "majority class", "within_one": "within one bucket"}.get(name, name)
        left.bar([place + shift for place in places], shares, 0.26, label=label, color=color)
    left.set_xticks(list(places), [str(entry.granularity) for entry in evaluation.accuracies])
    left.set_xlabel("granularity, tokens")
    left.set_ylabel("prompts, %")
    left.set_ylim(0, 105)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3, frameon=False, fontsize="small")
    own = next(entry for entry in evaluation.accuracies if entry.granularity == evaluation.granularity)
    bins = [entry for entry in own.bins if entry.count]
    middle.plot([0, 1], [0, 1], color="#888888", linewidth=1)
    middle.scatter(
        [entry.confidence for entry in bins],
        [entry.accuracy for entry in bins],
        s=[20 + 400 * entry.count / own.count for entry in bins],
        color="#2a7f9e",
    )
    middle.set_xlabel("probability of the most probable bucket")
    middle.set_ylabel("share that was right")
    middle.set_title(f"calibration error {own.calibration_error:.3f}")
    if evaluation.latencies:
        sizes = [entry.batch_size for entry in evaluation.latencies]
        for name, color in (("p50_s", "#2a7f9e"), ("p90_s", "#8cc5d8")):
            values = [1e3 * getattr(entry, name) for entry in evaluation.latencies]
            right.plot(sizes, values, marker="o", label=name[:3], color=color)
        right.set_xscale("log", base=2)
        right.set_xticks(sizes, [str(size) for size in sizes])
        right.legend()
    right.set_xlabel("prompts per batch")
    right.set_ylabel("ms per batch")
    figure.suptitle(f"length predictor of {evaluation.model}, version {evaluation.version}, {own.count} prompts")
    figure.tight_layout()
    try:
        # No date in the file, so the same figures always give the same bytes.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError("--plot", f"{path} cannot be written: {error}") from error
