import json
from collections import Counter
from pathlib import Path

import pytest

from kaveri.domain.sampling import FinishReason
from kaveri.errors import ConfigError
from kaveri.predictor.labels import Label, Split, load_tokenizer, parse_label, read_labels, token_ids_of
from kaveri.workload.prompts import RequestPrompt


def make_label(
    prompt: RequestPrompt, prompt_tokens: int = 3, output_tokens: int = 5, model: str = "kaveri-tiny"
) -> Label:
    return Label(
        prompt=prompt,
        model=model,
        vocab_size=1536,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        finish_reason=FinishReason.STOP,
    )


@pytest.mark.parametrize(
    "prompt",
    [
        RequestPrompt("prompt", "Grüße\nan alle\u2028"),
        RequestPrompt("messages", [{"role": "user", "content": "hello"}]),
        RequestPrompt("prompt_token_ids", [1, 2, 3]),
    ],
)
def test_a_label_survives_its_file(tmp_path: Path, prompt: RequestPrompt) -> None:
    label = make_label(prompt)
    path = tmp_path / "labels.jsonl"
    path.write_text(label.as_line() * 2)
    assert read_labels(path) == [label, label]


def test_the_split_depends_on_the_prompt_alone_and_has_the_promised_shares() -> None:
    prompts = [RequestPrompt("prompt", f"prompt {number}") for number in range(2000)]
    splits = [make_label(prompt).split for prompt in prompts]
    assert splits == [make_label(prompt, output_tokens=99, model="other").split for prompt in prompts]
    counts = Counter(splits)
    assert 150 < counts[Split.HELD_OUT] < 250
    assert 150 < counts[Split.VALIDATION] < 250
    # Fixed forever: no predictor may have seen its held-out prompts.
    assert [make_label(prompt).split for prompt in prompts[:4]] == [Split.TRAIN, Split.TRAIN, Split.TRAIN, Split.TRAIN]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output_tokens": -1}, "output_tokens is -1; it must be a number of at least 0"),
        ({"prompt_tokens": "3"}, "prompt_tokens is '3'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"model": ""}, "model is ''"),
        ({"finish_reason": "tired"}, "'tired' is not a valid FinishReason"),
        ({"model": "other"}, "is of model 'other', the lines before of 'kaveri-tiny'"),
    ],
)
def test_a_malformed_label_is_named_with_its_number_and_reason(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    line = make_label(RequestPrompt("prompt", "hello")).as_line()
    path = tmp_path / "labels.jsonl"
    path.write_text(line + json.dumps(json.loads(line) | change) + "\n")
    with pytest.raises(ConfigError) as caught:
        read_labels(path)
    assert f"{path}, line 2: " in caught.value.reason
    assert reason in caught.value.reason


def test_prompts_are_tokenized_as_they_were_served() -> None:
    tokenizer = load_tokenizer("kaveri-tiny")
    raw = parse_label(make_label(RequestPrompt("prompt", "Spell river.")).as_line())
    ids = tokenizer.backend_tokenizer.encode("Spell river.").ids
    chat = RequestPrompt("messages", [{"role": "user", "content": "Spell river."}])
    labels = [
        make_label(raw.prompt, len(ids)),
        make_label(chat, len(ids) + 3),  # <|user|>, <|end|> and <|assistant|>
        make_label(RequestPrompt("prompt_token_ids", [5, 4, 3]), 3),
    ]
    plain, templated, given = token_ids_of(labels, tokenizer)
    assert plain == ids
    assert templated[1:-2] == ids
    assert given == [5, 4, 3]


def test_a_tokenizer_that_counts_otherwise_than_the_cluster_is_refused() -> None:
    label = make_label(RequestPrompt("prompt", "Spell river."), prompt_tokens=99)
    with pytest.raises(ConfigError, match=r"--tokenizer: is not that of model 'kaveri-tiny': .* 99 were served"):
        token_ids_of([label], load_tokenizer("kaveri-tiny"))
    with pytest.raises(ConfigError, match="--tokenizer: '/nowhere' has no tokenizer"):
        load_tokenizer("/nowhere")
