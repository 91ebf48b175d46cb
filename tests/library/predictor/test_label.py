"""`kaveri predictor label`, as a process against a real gRPC server."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kaveri.errors import InvalidArgument, NoCapacity
from kaveri.v1 import inference_pb2 as pb
from kaveri.v1 import sampling_pb2
from kaveri.wire.status import abort
from tests.library.client.inference_double import WAIT_S, InferenceDouble, serving_in_a_thread, wait_until

COMMAND = [sys.executable, "-c", "from kaveri.cli.main import main; main()", "predictor", "label"]
RUN_S = 60.0


class AnsweringDouble(InferenceDouble):
    """Service that answers with as many tokens as the prompt has characters, but holds back prompts in `held`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        self.busy: set[str] = set()
        self.refused: set[str] = set()
        self.most_running = 0

    async def _answer(
        self, request: pb.GenerateRequest, context: Any, cancel: asyncio.Event
    ) -> AsyncIterator[pb.GenerateResponse]:
        text = request.text
        self.most_running = max(self.most_running, len(self.running))
        # Let concurrent requests overlap.
        await asyncio.sleep(0.01)
        if text in self.refused:
            await abort(context, InvalidArgument("prompt", text, "liked"))
        if text in self.busy:
            self.busy.discard(text)
            await abort(context, NoCapacity("prefill", retry_after_s=0.01))
        if text in self.held:
            await cancel.wait()
        yield pb.GenerateResponse(index=0, token_ids=list(range(len(text))), text=text)
        yield pb.GenerateResponse(
            index=len(text),
            finish_reason=sampling_pb2.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=7, completion_tokens=len(text)),
        )

    def asked(self) -> Counter[str]:
        return Counter(request.text for request in self.requests)


@pytest.fixture
def service() -> AnsweringDouble:
    return AnsweringDouble()


@pytest.fixture
def target(service: AnsweringDouble) -> Iterator[str]:
    with serving_in_a_thread(service) as target:
        yield target


def label(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=RUN_S)


@contextlib.contextmanager
def running(service: AnsweringDouble, asked: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the command, once it has sent `asked` requests, for the duration of the context."""
    command = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        give_up_at_s = time.monotonic() + RUN_S
        while service.asked().total() < asked:
            assert process.poll() is None, "it ended"
            assert time.monotonic() < give_up_at_s, f"{service.asked().total()} of {asked} asked"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


def write_prompts(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return path


def label_all(
    folder: Path, target: str, prompts: list[str], *flags: object
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the command on these prompts. Returns the ended process and the file of labels."""
    out = folder / "new" / "labels.jsonl"
    return label("--prompts", write_prompts(folder / "p.txt", prompts), "--target", target, "--out", out, *flags), out


def labels_in(path: Path) -> dict[str, int]:
    return {line["prompt"]: line["output_tokens"] for line in map(json.loads, path.read_text().splitlines())}


def test_every_prompt_gets_its_label_once_with_no_more_in_flight_than_asked_for(
    service: AnsweringDouble, target: str, tmp_path: Path
) -> None:
    prompts = ["a" * length for length in range(1, 21)]
    ended, out = label_all(tmp_path, target, [*prompts, "a"], "--concurrency", 3)
    assert ended.returncode == 0, ended.stderr
    assert "20 labelled, 1 labelled before, 0 refused" in ended.stderr
    assert service.most_running == 3
    assert service.asked() == dict.fromkeys(prompts, 1)
    assert labels_in(out) == {prompt: len(prompt) for prompt in prompts}
    first = json.loads(out.read_text().splitlines()[0])
    assert {name: first[name] for name in ("model", "vocab_size", "prompt_tokens", "finish_reason")} == {
        "model": "alphabet",
        "vocab_size": 26,
        "prompt_tokens": 7,
        "finish_reason": "stop",
    }
    assert all(request.params.temperature == 0 and not request.params.ignore_eos for request in service.requests)
    assert not any(request.params.HasField("max_tokens") for request in service.requests)


def test_a_killed_run_goes_on_where_it_was(service: AnsweringDouble, target: str, tmp_path: Path) -> None:
    prompts = ["a" * length for length in range(1, 11)]
    service.held = set(prompts[6:])
    out = tmp_path / "labels.jsonl"
    command = ["--prompts", write_prompts(tmp_path / "p.txt", prompts), "--target", target, "--out", out]
    with running(service, 8, *command, "--concurrency", 2) as process:
        process.kill()
        process.wait(WAIT_S)
    assert len(labels_in(out)) == 6
    with out.open("a") as file:
        file.write('{"prompt": "aaaaaaa", "mod')
    service.held.clear()
    ended = label(*command)
    assert ended.returncode == 0, ended.stderr
    assert "4 labelled, 6 labelled before, 0 refused" in ended.stderr
    assert labels_in(out) == {prompt: len(prompt) for prompt in prompts}
    again = {prompt for prompt, times in service.asked().items() if times > 1}
    assert again == set(prompts[6:8]), "only what was in flight is asked twice"


def test_ctrl_c_keeps_the_labels_and_cancels_the_rest(service: AnsweringDouble, target: str, tmp_path: Path) -> None:
    service.held = {"bb"}
    out = tmp_path / "labels.jsonl"
    prompts = write_prompts(tmp_path / "p.txt", ["a", "bb"])
    with running(service, 2, "--prompts", prompts, "--target", target, "--out", out, "--concurrency", 1) as process:
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=RUN_S)
    assert process.returncode == 130
    assert "run the same command to continue" in shown
    assert "Traceback" not in shown
    assert labels_in(out) == {"a": 1}
    wait_until(lambda: len(service.cancelled) == 1, "the request in flight is cancelled")


def test_a_refused_prompt_is_named_and_a_busy_cluster_waited_for(
    service: AnsweringDouble, target: str, tmp_path: Path
) -> None:
    service.refused, service.busy = {"bb"}, {"ccc"}
    ended, out = label_all(tmp_path, target, ["a", "bb", "ccc"])
    assert ended.returncode == 0, ended.stderr
    assert "refused: line 2: prompt is 'bb'; it must be liked" in " ".join(ended.stderr.split())
    assert labels_in(out) == {"a": 1, "ccc": 3}


def test_labels_of_another_model_are_not_added_to_and_the_model_has_to_be_served(target: str, tmp_path: Path) -> None:
    ended, out = label_all(tmp_path, target, ["a"])
    assert ended.returncode == 0
    out.write_text(out.read_text().replace("alphabet", "other"))
    ended, _ = label_all(tmp_path, target, ["a"])
    assert ended.returncode == 2
    assert "holds labels of model 'other', not of 'alphabet'" in ended.stderr
    ended, _ = label_all(tmp_path, target, ["a"], "--model", "other")
    assert ended.returncode == 2
    assert "'other' is not served" in ended.stderr


def test_a_malformed_file_costs_no_request(service: AnsweringDouble, target: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    ended = label("--prompts", prompts, "--target", target, "--out", tmp_path / "l.jsonl")
    assert ended.returncode == 2
    assert f"--prompts: {prompts}, line 2: prompt is 3" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not service.requests


def test_a_cluster_that_is_not_there_is_an_error_in_one_line(tmp_path: Path) -> None:
    ended, _ = label_all(tmp_path, "127.0.0.1:1", ["a"])
    assert ended.returncode == 1
    assert "127.0.0.1:1" in ended.stderr
    assert "Traceback" not in ended.stderr
