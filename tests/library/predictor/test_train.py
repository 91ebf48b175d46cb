import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from kaveri.errors import ConfigError
from kaveri.predictor.__main__ import app
from kaveri.predictor.bundle import LengthPredictor, Retokenizer
from kaveri.predictor.evaluate import evaluate
from kaveri.predictor.labels import load_tokenizer, read_labels
from kaveri.predictor.train import TrainSettings, train
from tests.support.tiny_models import make_tiny_model

COMMAND = [sys.executable, "-P", "-m", "kaveri.predictor"]
FLAGS = ["--granularity", "100", "--layers", "1", "--width", "32", "--max-prompt-tokens", "16", "--batch-size", "8"]
RUN_S = 100.0


def settings(**changes: object) -> TrainSettings:
    fields: dict[str, object] = {
        "base": "scratch",
        "tokenizer": "",
        "granularity": 100,
        "epochs": 4,
        "batch_size": 8,
        "learning_rate": 3e-3,
        "max_prompt_tokens": 16,
        "layers": 1,
        "width": 32,
        "seed": 0,
    }
    return TrainSettings(**fields | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(labels_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train(labels_path, out, settings(), print)
    return out


def test_it_learns_which_prompts_have_long_answers(trained: Path, labels_path: Path) -> None:
    predictor = LengthPredictor.load(str(trained))
    assert (predictor.model, predictor.vocab_size) == ("kaveri-tiny", 1536)
    assert (predictor.granularity, predictor.bucket_count, predictor.max_prompt_tokens) == (100, 3, 16)
    evaluation = evaluate(predictor, read_labels(labels_path), repeats=1)
    assert [entry.granularity for entry in evaluation.accuracies] == [100, 200, 400]
    assert all(entry.accuracy > 0.95 for entry in evaluation.accuracies)
    assert evaluation.accuracies[0].majority == 0.5
    assert [latency.batch_size for latency in evaluation.latencies] == [1, 2, 4, 8, 16, 32]
    assert all(latency.p50_s > 0 for latency in evaluation.latencies)
    assert json.loads(json.dumps(dataclasses.asdict(evaluation)))["version"] == predictor.version


def test_a_finished_training_is_not_done_again(trained: Path, labels_path: Path) -> None:
    said: list[str] = []
    before = (trained / "model.safetensors").stat().st_mtime_ns
    train(labels_path, trained, settings(), said.append)
    assert said == [f"{trained} holds this predictor already"]
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    assert not (trained / "training").exists()


def test_another_training_is_not_mixed_with_a_finished_one(trained: Path, labels_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out: .* granularity was 100 there and is 50 here"):
        train(labels_path, trained, settings(granularity=50), print)


def test_a_killed_training_goes_on_from_its_last_epoch(labels_path: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "train", "--labels", str(labels_path), "--out", str(tmp_path / "p"), *FLAGS]
    log = tmp_path / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        give_up_at_s = time.monotonic() + RUN_S
        while not list((tmp_path / "p" / "training").glob("checkpoint-*/trainer_state.json")):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at_s, log.read_text()
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(RUN_S)
    work = tmp_path / "p" / "training"
    with pytest.raises(ConfigError, match="holds checkpoints of another training: epochs was 12 there and is 4 here"):
        train(labels_path, tmp_path / "p", settings(learning_rate=1e-3), print)
    # An incomplete checkpoint.
    (work / "checkpoint-99999").mkdir()
    said: list[str] = []
    train(labels_path, tmp_path / "p", settings(learning_rate=1e-3, epochs=12), said.append)
    record = json.loads((tmp_path / "p" / "training.json").read_text())
    assert record["resumed_from"].startswith("checkpoint-")
    assert record["resumed_from"] != "checkpoint-99999"
    assert f"resuming from {record['resumed_from']}" in said
    assert not work.exists()
    LengthPredictor.load(str(tmp_path / "p"))


def test_a_base_with_the_served_vocabulary_reads_its_token_ids(labels_path: Path, tmp_path: Path) -> None:
    train(labels_path, tmp_path, settings(base="kaveri-tiny", epochs=1), print)
    assert not (tmp_path / "tokenizer").exists()
    predictor = LengthPredictor.load(str(tmp_path))
    (row,) = predictor.predict([[5, 6, 7]])
    assert sum(row) == pytest.approx(1)


def test_a_base_with_a_tokenizer_of_its_own_tokenizes_anew(labels_path: Path, tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "opt", "opt", tokenizer=True, max_positions=40)
    train(labels_path, tmp_path / "p", settings(base=str(base), epochs=6, max_prompt_tokens=64), print)
    predictor = LengthPredictor.load(str(tmp_path / "p"))
    served = load_tokenizer("kaveri-tiny").backend_tokenizer
    short, long, longest = predictor.predict(
        [served.encode(text).ids for text in ("Spell river.", "Sing about river", "Sing about " + "river " * 200)]
    )
    assert short[0] > 0.5
    assert long[2] > 0.5
    assert sum(longest) == pytest.approx(1), "a prompt beyond the classifier's positions is cut"
    # Special tokens have no text, so the retokenized prompt is empty.
    (row,) = predictor.predict([[served.token_to_id("<|end|>")]])
    assert sum(row) == pytest.approx(1)


def test_retokenizing_keeps_the_text(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama", tokenizer=True)
    own, served = load_tokenizer(str(tmp_path)), load_tokenizer("kaveri-tiny")
    text = "Grüße an alle: 12, 13."
    (row,) = Retokenizer(served, own, 1000).encode([served.backend_tokenizer.encode(text).ids])
    assert bytes(row).decode() == text


def test_what_cannot_be_trained_is_said_before_it_is(labels_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--granularity: is 1000; the longest answer has 250 tokens"):
        train(labels_path, tmp_path / "a", settings(granularity=1000), print)
    with pytest.raises(ConfigError, match="--base: '/nowhere' cannot be loaded as a sequence classifier"):
        train(labels_path, tmp_path / "b", settings(base="/nowhere"), print)
    few = tmp_path / "few.jsonl"
    few.write_text(labels_path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ConfigError, match=r"--labels: .* has 1 labels, and none for"):
        train(few, tmp_path / "c", settings(), print)
    with pytest.raises(ConfigError, match="--width: is 40; it must be a multiple of 32"):
        app(["train", "--labels", str(few), "--out", str(tmp_path / "d"), "--width", "40"])


def test_a_missing_extra_is_said_in_one_line(
    labels_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules: neither `import` nor find_spec finds the module.
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"train: accelerate is not installed: .*\[transformers,predictor\]"):
        app(["train", "--labels", str(labels_path), "--out", str(tmp_path)])


def test_the_evaluate_command_writes_figures_and_a_plot(
    trained: Path, labels_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.svg"
    command = ["evaluate", "--predictor", str(trained), "--labels", str(labels_path)]
    app([*command, "--json", str(figures), "--plot", str(picture)], standalone_mode=False)
    held_out = sum(label.split == "held-out" for label in read_labels(labels_path))
    assert f"{held_out} prompts" in capsys.readouterr().out
    assert [entry["count"] for entry in json.loads(figures.read_text())["accuracies"]] == [held_out] * 3
    assert picture.read_text().startswith("<?xml")


def test_a_predictor_is_not_evaluated_on_another_models_labels(trained: Path, labels_path: Path) -> None:
    predictor = LengthPredictor.load(str(trained))
    predictor.model = "other"
    with pytest.raises(ConfigError, match="--labels: are of model 'kaveri-tiny'; the predictor is for 'other'"):
        evaluate(predictor, read_labels(labels_path), repeats=0)
    with pytest.raises(ConfigError, match="--labels: there is none"):
        evaluate(predictor, [], repeats=0)
