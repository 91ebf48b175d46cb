from pathlib import Path

import pytest

from kaveri.domain.sampling import FinishReason
from kaveri.predictor.labels import Label, load_tokenizer
from kaveri.workload.prompts import RequestPrompt
from training.kaveri_tiny.families import WORDS


def make_labels(count: int = 120) -> list[Label]:
    """Make labels that a classifier learns in seconds: half spell a word in 5 tokens, half sing about it in 250."""
    tokenizer = load_tokenizer("kaveri-tiny")
    labels = []
    for place in range(count):
        song = place % 2 == 1
        text = f"Sing about {WORDS[place]}" if song else f"Spell {WORDS[place]}."
        labels.append(
            Label(
                prompt=RequestPrompt("prompt", text),
                model="kaveri-tiny",
                vocab_size=1536,
                prompt_tokens=len(tokenizer.backend_tokenizer.encode(text).ids),
                output_tokens=250 if song else 5,
                finish_reason=FinishReason.STOP,
            )
        )
    return labels


@pytest.fixture(scope="session")
def labels_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "labels.jsonl"
    path.write_text("".join(label.as_line() for label in make_labels()))
    return path
