"""kaveri predictor train: fine-tunes a sequence classifier on labels and saves it as a predictor (TetriInfer, figure
8). Needs torch. Every epoch writes a checkpoint to the subfolder `training`, from which a killed run resumes; at the
end it is deleted and the manifest written."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from kaveri.domain.sampling import FinishReason
from kaveri.errors import ConfigError
from kaveri.models import resolve_model
from kaveri.predictor.buckets import bucket_of
from kaveri.predictor.bundle import OWN_TOKENIZER, SERVED_TOKENIZER, Retokenizer, cut_prompt, max_input_tokens, pad_rows
from kaveri.predictor.labels import Label, Split, load_tokenizer, read_labels, token_ids_of
from kaveri.predictor.manifest import MANIFEST_FILE, Manifest, write_manifest

SCRATCH = "scratch"
"""Value of --base for a classifier without pretrained weights."""
RECORD_FILE = "training.json"
"""Record of a training: settings, counts, accuracy per epoch. Not needed for serving."""
_WORK_FOLDER = "training"
_SETTINGS_FILE = "settings.json"
_WEIGHT_DECAY = 0.01
_WARM_UP_SHARE = 0.06


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training. Checkpoints can be resumed only with equal settings and labels."""

    base: str
    """SCRATCH, or a pretrained model: a path, a hub id or a bundled name."""
    tokenizer: str
    """Served model, for its tokenizer; empty: the labels' model."""
    granularity: int
    """Tokens per bucket."""
    epochs: int
    batch_size: int
    learning_rate: float
    """Peak learning rate, reached after 6 % of the steps; then linear decay."""
    max_prompt_tokens: int
    """Max prompt length; longer prompts are truncated."""
    layers: int
    width: int
    """Hidden size of a classifier from scratch; a multiple of 32."""
    seed: int


def train(labels_path: Path, out: Path, settings: TrainSettings, say: Callable[[str], None]) -> None:
    """Train a predictor in the folder `out`, resuming from checkpoints there; does nothing if it is finished.

    say: called with messages for the user. Raises ConfigError: labels malformed or too few for these buckets, a base or
    tokenizer that cannot be loaded, or `out` holds another predictor or other settings' checkpoints.
    """
    labels = read_labels(labels_path)
    _refuse_poor_labels(labels_path, labels)
    identity = dataclasses.asdict(settings) | {"labels_sha256": hashlib.sha256(labels_path.read_bytes()).hexdigest()}
    if _is_finished(out, identity):
        say(f"{out} holds this predictor already")
        return
    work = out / _WORK_FOLDER
    _claim(work, identity)
    set_seed(settings.seed)
    data = _TrainingData.prepare(labels, settings)
    say(data.describe())
    started_s = time.monotonic()
    trainer = _trainer(data, work, settings)
    checkpoint = _last_whole_checkpoint(work)
    if checkpoint is not None:
        say(f"resuming from {checkpoint.name}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    history = [
        {"epoch": entry["epoch"], "validation_accuracy": entry["eval_accuracy"], "validation_loss": entry["eval_loss"]}
        for entry in trainer.state.log_history
        if "eval_accuracy" in entry
    ]
    record = {
        **identity,
        "labels": {split: data.counts[split] for split in Split},
        "parameters": sum(weights.numel() for weights in trainer.model.parameters()),
        "history": history,
        "best_validation_accuracy": trainer.state.best_metric,
        "resumed_from": checkpoint.name if checkpoint else None,
        "last_run_s": round(time.monotonic() - started_s, 1),
    }
    manifest = _save(out, trainer.model, data, record)
    shutil.rmtree(work)
    say(f"validation accuracy {trainer.state.best_metric:.1%}; saved in {out}, version {manifest.version}")


@dataclass(frozen=True)
class Classifier:
    model: Any
    """A transformers *ForSequenceClassification in float32, with a padding token."""
    own_tokenizer: Any | None
    """The classifier's tokenizer; None if it uses the served model's token ids."""


def classifier_from_scratch(
    vocab_size: int, pad_token_id: int, bucket_count: int, max_tokens: int, layers: int, width: int
) -> Classifier:
    """Build a small decoder with random weights (set by torch's seed) that classifies from the hidden state of the last
    token. width: hidden size, a multiple of 32; heads are 32 wide."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=max_tokens,
        num_labels=bucket_count,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Classifier(LlamaForSequenceClassification(config), None)


def classifier_from_base(base: str, served_tokenizer: Any, bucket_count: int) -> Classifier:
    """Load a pretrained model (path, hub id or bundled name) with a new head, one class per bucket. Raises
    ConfigError("--base") when it cannot be loaded."""
    source = resolve_model(base)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForSequenceClassification.from_pretrained(
            source, num_labels=bucket_count, dtype=torch.float32, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        raise ConfigError("--base", f"{base!r} cannot be loaded as a sequence classifier: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if model.config.pad_token_id is None:
        raise ConfigError("--base", f"{base!r} has neither a padding nor an end token")
    shared = tokenizer.is_fast and tokenizer.backend_tokenizer.to_str() == served_tokenizer.backend_tokenizer.to_str()
    return Classifier(model, None if shared else tokenizer)


@dataclass(frozen=True)
class _TrainingData:
    """Classifier to train, and the labels as its examples."""

    classifier: Classifier
    served_tokenizer: Any
    manifest: Manifest
    examples: dict[Split, list[dict[str, Any]]]
    """TRAIN and VALIDATION examples: {"input_ids": list of ids, "labels": bucket}."""
    counts: Counter[Split]
    cut_count: int
    """Number of answers cut at the length limit."""

    @classmethod
    def prepare(cls, labels: Sequence[Label], settings: TrainSettings) -> "_TrainingData":
        """Load tokenizer and classifier, choose the buckets, and tokenize and split the labels."""
        model, vocab_size = labels[0].model, labels[0].vocab_size
        served = load_tokenizer(settings.tokenizer or model)
        prompts = token_ids_of(labels, served)
        # Held-out answers must not influence anything, not even the number of buckets.
        longest = max(label.output_tokens for label in labels if label.split is not Split.HELD_OUT)
        bucket_count = longest // settings.granularity + 1
        if bucket_count < 2:
            raise ConfigError("--granularity", f"is {settings.granularity}; the longest answer has {longest} tokens")
        if settings.base == SCRATCH:
            pad_token_id = next((i for i in (served.pad_token_id, served.eos_token_id) if i is not None), 0)
            classifier = classifier_from_scratch(
                vocab_size, pad_token_id, bucket_count, settings.max_prompt_tokens, settings.layers, settings.width
            )
        else:
            classifier = classifier_from_base(settings.base, served, bucket_count)
        config = classifier.model.config
        limit = settings.max_prompt_tokens
        own = classifier.own_tokenizer
        if own is None:
            if settings.base != SCRATCH:
                limit = min(limit, max_input_tokens(config, served))
            rows = [cut_prompt(prompt, limit) for prompt in prompts]
        else:
            cut = [cut_prompt(prompt, limit) for prompt in prompts]
            rows = Retokenizer(served, own, max_input_tokens(config, own)).encode(cut)
        examples: dict[Split, list[dict[str, Any]]] = {Split.TRAIN: [], Split.VALIDATION: []}
        for label, row in zip(labels, rows, strict=True):
            if label.split in examples:
                bucket = bucket_of(label.output_tokens, settings.granularity, bucket_count)
                examples[label.split].append({"input_ids": list(row), "labels": bucket})
        manifest = Manifest(
            model=model,
            vocab_size=vocab_size,
            granularity=settings.granularity,
            bucket_count=bucket_count,
            longest_answer_tokens=longest,
            max_prompt_tokens=limit,
            own_tokenizer=own is not None,
        )
        counts = Counter(label.split for label in labels)
        cut_count = sum(label.finish_reason is FinishReason.LENGTH for label in labels)
        return cls(classifier, served, manifest, examples, counts, cut_count)

    def describe(self) -> str:
        splits = ", ".join(f"{self.counts[split]} {split}" for split in Split)
        shown = f"labels: {splits}; {self.manifest.bucket_count} buckets of {self.manifest.granularity} tokens"
        return shown + (f"; {self.cut_count} answers were cut and count as that long" if self.cut_count else "")


def _refuse_poor_labels(path: Path, labels: Sequence[Label]) -> None:
    found = {label.split for label in labels}
    for split in (Split.TRAIN, Split.VALIDATION):
        if split not in found:
            raise ConfigError("--labels", f"{path} has {len(labels)} labels, and none for {split}: too few")


def _is_finished(out: Path, identity: dict[str, Any]) -> bool:
    if not (out / MANIFEST_FILE).exists():
        return False
    try:
        record = json.loads((out / RECORD_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--out", f"{out} holds a predictor that was not made here; choose another folder") from error
    _refuse_other(out, "a predictor", record, identity)
    return True


def _claim(work: Path, identity: dict[str, Any]) -> None:
    """Record in the folder `work` which training its checkpoints are of. Raises ConfigError if they are of another."""
    path = work / _SETTINGS_FILE
    try:
        _refuse_other(work, "checkpoints", json.loads(path.read_text()), identity)
    except FileNotFoundError:
        try:
            work.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(identity, indent=1) + "\n")
        except OSError as error:
            raise ConfigError("--out", f"{work} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("--out", f"{path} is corrupt: {error}; delete {work}") from error


def _refuse_other(folder: Path, held: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, value in ours.items():
        if theirs.get(name) != value:
            reason = f"{name} was {theirs.get(name)!r} there and is {value!r} here"
            raise ConfigError("--out", f"{folder} holds {held} of another training: {reason}; delete it to start again")


def _trainer(data: _TrainingData, work: Path, settings: TrainSettings) -> Any:
    pad_token_id = int(data.classifier.model.config.pad_token_id)

    def collate(examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_ids, mask = pad_rows([example["input_ids"] for example in examples], pad_token_id)
        buckets = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": input_ids, "attention_mask": mask, "labels": buckets}

    arguments = TrainingArguments(
        output_dir=str(work),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=_WARM_UP_SHARE,
        weight_decay=_WEIGHT_DECAY,
        # Prompt lengths differ by two orders of magnitude, and padding costs compute.
        train_sampling_strategy="group_by_length",
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        dataloader_pin_memory=False,
        report_to="none",
        seed=settings.seed,
    )
    return Trainer(
        model=data.classifier.model,
        args=arguments,
        data_collator=collate,
        train_dataset=data.examples[Split.TRAIN],
        eval_dataset=data.examples[Split.VALIDATION],
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )


def _last_whole_checkpoint(work: Path) -> Path | None:
    # The Trainer writes its state last: a checkpoint without it is incomplete.
    whole = [path.parent for path in work.glob("checkpoint-*/trainer_state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _save(out: Path, classifier: Any, data: _TrainingData, record: dict[str, Any]) -> Manifest:
    classifier.save_pretrained(out)
    if data.classifier.own_tokenizer is not None:
        data.classifier.own_tokenizer.save_pretrained(out / OWN_TOKENIZER)
        data.served_tokenizer.save_pretrained(out / SERVED_TOKENIZER)
    (out / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n")
    files = [out / "config.json", *out.glob("*.safetensors*")]
    files += [path for name in (OWN_TOKENIZER, SERVED_TOKENIZER) for path in (out / name).glob("*") if path.is_file()]
    # Last: a folder without a manifest is not a predictor.
    return write_manifest(out, data.manifest, files)
