"""Labels for training a length predictor: a prompt with the length of a served model's answer. Needs no torch."""

import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaveri.domain.sampling import FinishReason
from kaveri.errors import ConfigError
from kaveri.models import resolve_model
from kaveri.workload.prompts import MalformedLine, RequestPrompt, parse_object, parse_prompt, read_lines

_VALIDATION_PERCENT = 10
_HELD_OUT_PERCENT = 10


class Split(enum.StrEnum):
    """Set that a label belongs to: for training, validation or evaluation."""

    TRAIN = "train"
    VALIDATION = "validation"
    """Selects the best epoch of a training."""
    HELD_OUT = "held-out"
    """Used only for evaluation, never in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Prompt and the length of a served model's answer to it."""

    prompt: RequestPrompt
    model: str
    """Served name of the model that answered."""
    vocab_size: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    """LENGTH: the answer was cut at the limit and would have been longer."""

    @property
    def split(self) -> Split:
        """Split chosen by the prompt's digest, so that a prompt has the same one in every file."""
        percent = int.from_bytes(self.prompt.digest[:4], "big") % 100
        if percent < _HELD_OUT_PERCENT:
            return Split.HELD_OUT
        return Split.VALIDATION if percent < _HELD_OUT_PERCENT + _VALIDATION_PERCENT else Split.TRAIN

    def as_line(self) -> str:
        """Format as a line of a label file, with newline."""
        content = {
            **self.prompt.as_json(),
            "model": self.model,
            "vocab_size": self.vocab_size,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reason": self.finish_reason,
        }
        return json.dumps(content, ensure_ascii=False) + "\n"


def parse_label(line: str) -> Label:
    """Parse a line of a label file. Raises MalformedLine."""
    content = parse_object(line)
    prompt = parse_prompt(content)
    counts = {}
    for name, least in (("vocab_size", 1), ("prompt_tokens", 1), ("output_tokens", 0)):
        value = content.get(name)
        if type(value) is not int or value < least:
            raise MalformedLine(f"{name} is {value!r:.40}; it must be a number of at least {least}")
        counts[name] = value
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise MalformedLine(f"model is {model!r:.40}; it must be a name")
    try:
        reason = FinishReason(str(content.get("finish_reason")))
    except ValueError as error:
        raise MalformedLine(str(error)) from error
    return Label(prompt=prompt, model=model, finish_reason=reason, **counts)


def read_labels(path: Path, flag: str = "--labels") -> list[Label]:
    """Read all labels of a file, all for one served model. Raises ConfigError, naming `flag`, line and reason."""
    labels: list[Label] = []
    for number, line in read_lines(path, flag):
        try:
            label = parse_label(line)
        except MalformedLine as error:
            raise ConfigError(flag, f"{path}, line {number}: {error}") from error
        if labels and (label.model, label.vocab_size) != (labels[0].model, labels[0].vocab_size):
            reason = f"is of model {label.model!r}, the lines before of {labels[0].model!r}"
            raise ConfigError(flag, f"{path}, line {number}: {reason}")
        labels.append(label)
    return labels


def load_tokenizer(source: str) -> Any:
    """Load a fast tokenizer from a path, a hub id or a bundled name. Raises ConfigError("--tokenizer")."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(source))
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).partition("\n")[0].rstrip(": ")
        raise ConfigError("--tokenizer", f"{source!r} has no tokenizer that can be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise ConfigError("--tokenizer", f"{source!r} has no tokenizer.json (a fast tokenizer)")
    return tokenizer


def token_ids_of(labels: Sequence[Label], tokenizer: Any) -> list[list[int]]:
    """Tokenize the labels' prompts as a router does. Raises ConfigError("--tokenizer") if token counts differ."""
    prompts = []
    for label in labels:
        kind, content = label.prompt.kind, label.prompt.content
        if kind == "prompt_token_ids":
            token_ids = list(content)
        elif kind == "prompt":
            token_ids = tokenizer.backend_tokenizer.encode(content).ids
        else:
            text = tokenizer.apply_chat_template(content, tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if len(token_ids) != label.prompt_tokens:
            reason = f"it counts {len(token_ids)} tokens where {label.prompt_tokens} were served: {content!r:.60}"
            raise ConfigError("--tokenizer", f"is not that of model {label.model!r}: {reason}")
        prompts.append(token_ids)
    return prompts
