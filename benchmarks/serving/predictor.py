"""The bundled length predictor: accuracy beside the majority class at 100, 200 and 400 tokens, latency by batch size.

On the held-out labels of training/predictor/held_out.jsonl, used neither in training nor for the choice of its epoch,
on one thread. Batches are taken in the labels' order, long and short prompts mixed, as they would arrive.
"""

from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.support.harness import ROOT, Options, Report, run
from kaveri.predictor.bundle import LengthPredictor
from kaveri.predictor.evaluate import BATCH_SIZES, evaluate, measure_latency
from kaveri.predictor.labels import load_tokenizer, read_labels, token_ids_of

HELD_OUT = ROOT / "training" / "predictor" / "held_out.jsonl"
# What was asked of the bundled predictor, and what TetriInfer reports of OPT-125M on ShareGPT (section 5.2.2).
ASKED = {100: 0.75, 200: 0.85}
PAPER = {100: 0.589, 200: 0.749, 400: 0.85}


def measure(options: Options, report: Report) -> None:
    """Fills the report; see the module's docstring."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    predictor = LengthPredictor.load(options.model)
    labels = read_labels(Path(HELD_OUT))
    prompts = token_ids_of(labels, load_tokenizer(options.model))
    turns, repeats = options.choose(5, 3), options.choose(60, 15)
    report.workload = {
        "model": options.model,
        "predictor": predictor.version,
        "labels": len(labels),
        "mean_prompt_tokens": round(sum(map(len, prompts)) / len(prompts), 1),
        "longest_prompt_tokens": max(map(len, prompts)),
        "threads": 1,
        "batches_per_turn": repeats,
    }
    for measured in evaluate(predictor, labels, tokenizer=options.model, repeats=0).accuracies:
        of = {"granularity": measured.granularity}
        for name in ("accuracy", "majority", "within_one"):
            report.row(name, [100 * getattr(measured, name)], "%", **of)
        report.row("calibration error", [measured.calibration_error], "", **of)
        name = f"accuracy_{measured.granularity}_over_majority"
        report.ratio(name, measured.accuracy / measured.majority)
        asked = ASKED.get(measured.granularity)
        if asked is not None and measured.accuracy < asked:
            raise AssertionError(f"accuracy {measured.accuracy:.3f} at {measured.granularity}; asked for {asked}")
    throughputs: dict[int, float] = {}
    for size in BATCH_SIZES:
        timed = [measure_latency(predictor, prompts, size, repeats) for _ in range(turns)]
        report.row("latency p50", [1e3 * entry.p50_s for entry in timed], "ms", batch=size)
        report.row("latency p90", [1e3 * entry.p90_s for entry in timed], "ms", batch=size)
        throughputs[size] = report.row("throughput", [size / entry.p50_s for entry in timed], "prompts/s", batch=size)
    report.ratio("throughput_batch_32_over_1", throughputs[32] / throughputs[1])
    paper = ", ".join(f"{100 * share:g} % at {granularity}" for granularity, share in PAPER.items())
    report.note(
        f"TetriInfer reports {paper} for OPT-125M on ShareGPT. kaveri-tiny's prompts name the size of their answers, "
        "which makes the task far easier; how they were mixed is in the predictor's card."
    )


if __name__ == "__main__":
    run("serving.predictor", measure, description=__doc__)
