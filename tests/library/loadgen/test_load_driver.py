"""Load driver against a real gRPC server, and `kaveri bench` around it."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kaveri import AsyncClient
from kaveri.cli.main import main
from kaveri.loadgen.driver import RequestRecord, RequestSettings, run_closed, run_open
from kaveri.workload.requests import PlannedRequest, RequestLengths, gamma_arrivals
from tests.library.client.inference_double import InferenceDouble, serving, serving_in_a_thread

SETTINGS = RequestSettings(model=None, vocab_size=26, seed=5, timeout_s=20.0)
COMMAND = [sys.executable, "-c", "from kaveri.cli.main import main; main()", "bench"]


class GatedService(InferenceDouble):
    """Service that answers once `full` requests have been in flight together."""

    def __init__(self, full: int) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.most_at_once = 0
        self._full = full

    async def _answer(self, request: Any, context: Any, cancel: asyncio.Event) -> AsyncIterator[Any]:
        self.most_at_once = max(self.most_at_once, len(self.running))
        if self.most_at_once >= self._full:
            self.gate.set()
        await self.gate.wait()
        async for response in super()._answer(request, context, cancel):
            yield response


def planned(*arrivals_s: float) -> list[PlannedRequest]:
    return [
        PlannedRequest(number, arrival_s, RequestLengths(4 + number, 3 + number))
        for number, arrival_s in enumerate(arrivals_s)
    ]


def nothing(_: RequestRecord) -> None:
    pass


async def test_an_open_loop_sends_at_the_planned_times_and_records_every_token() -> None:
    service = InferenceDouble()
    ended: list[int] = []
    async with serving(service) as target, AsyncClient(target) as client:
        run = await run_open(
            client, planned(0.0, 0.1, 0.1), SETTINGS, 8, lambda record: ended.append(record.planned.number)
        )
    assert sorted(ended) == [0, 1, 2]
    for record in run.records:
        assert record.error is None, record.reason
        assert record.received_tokens == record.planned.lengths.output_tokens
        assert record.sent_s >= record.due_s == record.planned.arrival_s
        assert record.sent_s <= record.first_s <= record.last_s <= run.duration_s
        assert record.arrivals_s == sorted(record.arrivals_s)
        assert record.first_s < record.last_s
        assert record.server is not None
        assert record.server.decode_instance_id == "decode-1"
    sent = {len(request.token_ids.ids): request for request in service.requests}
    assert set(sent) == {4, 5, 6}
    assert all(request.params.ignore_eos for request in service.requests)
    assert sent[6].params.max_tokens == 5


async def test_with_as_many_in_flight_as_allowed_the_next_is_sent_late() -> None:
    service = GatedService(full=2)
    async with serving(service) as target, AsyncClient(target) as client:
        async with asyncio.timeout(2 * SETTINGS.timeout_s):
            run = await run_open(client, planned(*[0.0] * 6), SETTINGS, 2, nothing)
    assert service.most_at_once == 2
    first_end_s = min(record.last_s for record in run.records if record.arrivals_s)
    assert all(record.sent_s >= first_end_s > record.due_s == 0.0 for record in run.records[2:])


async def test_in_a_closed_loop_a_request_is_due_when_the_one_before_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = RequestSettings.prompt

    def slow_prompt(settings: RequestSettings, request: PlannedRequest) -> Any:
        time.sleep(0.1)
        return prompt(settings, request)

    monkeypatch.setattr(RequestSettings, "prompt", slow_prompt)
    async with serving(InferenceDouble()) as target, AsyncClient(target) as client:
        run = await run_closed(client, planned(0.0, 0.0, 0.0), SETTINGS, 1, nothing)
    assert [record.planned.number for record in run.records] == [0, 1, 2]
    for former, record in pairwise(run.records):
        assert former.last_s <= record.due_s <= record.sent_s - 0.1


async def test_a_closed_loop_keeps_so_many_requests_on_their_way() -> None:
    service = GatedService(full=3)
    async with serving(service) as target, AsyncClient(target) as client:
        run = await run_closed(client, planned(*[0.0] * 9), SETTINGS, 3, nothing)
    assert service.most_at_once == 3
    assert all(record.error is None for record in run.records)


async def test_a_request_that_fails_is_recorded_and_the_others_go_on() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{unused.getsockname()[1]}") as client:
            run = await run_closed(client, planned(0.0, 0.0), SETTINGS, 1, nothing)
    assert [record.error for record in run.records] == ["Unavailable", "Unavailable"]


def test_prompts_depend_on_seed_and_number_only() -> None:
    first, second = planned(0.0, 0.0)
    assert SETTINGS.prompt(first) == SETTINGS.prompt(first)
    ids, others = SETTINGS.prompt(first).content, SETTINGS.prompt(second).content
    assert ids != others[: len(ids)]
    assert all(0 <= token_id < 26 for token_id in others)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60, env=os.environ
    )


def test_the_command_plays_a_trace_and_prints_json(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * number, "input_length": 3, "output_length": 4} for number in range(5)]
    rows.append({"timestamp": 500, "input_length": 30, "output_length": 4})
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    with serving_in_a_thread(InferenceDouble()) as target:
        flags = ["--speed", "2", "--warm-up", "1", "--slo-ttft-s", "30", "--json"]
        ended = bench("--target", target, "--trace", str(trace), *flags)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    (run,) = report["runs"]
    assert (run["answered"], report["too_long"], run["slo_attainment"]) == (5, 1, 1.0)
    assert [entry["due_s"] for entry in run["rows"]] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert report["lengths"] == {"forced": True, "known_to_the_cluster": True}
    assert report["over_runs"]["answered"] == {"median": 5, "min": 5, "max": 5}
    assert "longer than the model" in ended.stderr


def test_repeats_send_the_same_lengths_with_other_prompts_and_warm_up_with_others_still(tmp_path: Path) -> None:
    service = InferenceDouble()
    figure = tmp_path / "runs.svg"
    with serving_in_a_thread(service) as target:
        lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "8"]
        flags = [*lengths, "--requests", "3", "--concurrency", "2", "--repeats", "2", "--warm-up", "2", "--json"]
        ended = bench("--target", target, *flags, "--plot", str(figure))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    first, second = ([row["output_tokens"] for row in run["rows"]] for run in report["runs"])
    assert first == second
    assert report["over_runs"]["ttft_s"]["p50"].keys() == {"median", "min", "max"}
    prompts = [tuple(request.token_ids.ids) for request in service.requests]
    assert len(set(prompts)) == 2 + 3 + 3
    assert figure.read_text().startswith("<?xml")


def test_own_prompts_are_sent_as_they_are_and_end_by_themselves(tmp_path: Path) -> None:
    service = InferenceDouble()
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "why"}]}, {"prompt_token_ids": [1, 2, 3]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving_in_a_thread(service) as target:
        flags = ["--concurrency", "1", "--warm-up", "0", "--max-output", "7", "--json"]
        ended = bench("--target", target, "--prompts", str(path), *flags)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["lengths"] == {"forced": False, "known_to_the_cluster": False}
    assert [row["received_tokens"] for row in report["runs"][0]["rows"]] == [7, 7, 7]
    text, messages, token_ids = service.requests
    assert text.text == "hello"
    assert messages.messages.messages[0].content == "why"
    assert list(token_ids.token_ids.ids) == [1, 2, 3]
    assert not any(request.params.ignore_eos for request in service.requests)


def test_a_search_for_the_goodput_tries_rates_and_reports_the_highest_that_held() -> None:
    with serving_in_a_thread(InferenceDouble()) as target:
        lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "8", "--requests", "2"]
        flags = ["--rate", "50", "--slo-ttft-s", "30", "--find-goodput", "--max-runs", "3", "--json"]
        ended = bench("--target", target, *lengths, *flags)
        hopeless = bench("--target", target, *lengths, "--slo-tpot-s", "1e-12", *flags)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert [run["rate_per_s"] for run in report["runs"]] == [50, 100, 200]
    sent_per_s = report["runs"][2]["offered_per_s"]
    assert (report["goodput"]["rate_per_s"], report["goodput"]["failed_at_per_s"]) == (sent_per_s, None)
    report = json.loads(hopeless.stdout)
    assert [run["rate_per_s"] for run in report["runs"]] == [50, 25, 12.5]
    sent_per_s = report["runs"][2]["offered_per_s"]
    assert (report["goodput"]["rate_per_s"], report["goodput"]["failed_at_per_s"]) == (None, sent_per_s)


@pytest.mark.parametrize("search", [[], ["--slo-ttft-s", "30", "--find-goodput", "--max-runs", "1"]])
def test_requests_that_are_too_long_do_not_lower_the_rate_that_was_asked_for(search: list[str]) -> None:
    lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "10", "--requests", "80"]
    with serving_in_a_thread(InferenceDouble()) as target:
        ended = bench("--target", target, *lengths, "--rate", "200", "--warm-up", "0", *search, "--json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    (run,) = report["runs"]
    assert 10 < report["too_long"] < 70
    due_s = [entry["due_s"] for entry in run["rows"]]
    assert len(due_s) == 80 - report["too_long"]
    assert due_s == gamma_arrivals(len(due_s), 200.0, 1.0, random.Random(0))
    sent_s = [entry["sent_s"] for entry in run["rows"]]
    assert run["offered_per_s"] == pytest.approx((len(sent_s) - 1) / (max(sent_s) - min(sent_s)))
    if search:
        assert report["goodput"]["rate_per_s"] == run["offered_per_s"]
    assert f"{report['too_long']} requests are longer than the model; the others are a lighter mix" in ended.stderr


def test_when_no_request_fits_the_flag_that_made_them_so_long_is_named(tmp_path: Path) -> None:
    trace, prompts = tmp_path / "trace.jsonl", tmp_path / "prompts.txt"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 30, "output_length": 4}) + "\n")
    prompts.write_text("hello\n")
    with serving_in_a_thread(InferenceDouble()) as target:
        for flags, named in (
            (["--trace", str(trace)], "--trace"),
            (["--prompts", str(prompts), "--max-output", "27", "--rate", "1"], "--max-output"),
            (["--workload", "HPLD", "--rate", "1"], "--max-prompt"),
        ):
            ended = bench("--target", target, *flags)
            assert ended.returncode == 2
            assert f"kaveri: {named}: no request fits into alphabet's 26 tokens" in ended.stderr
        lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "8", "--requests", "1"]
        ended = bench("--target", target, *lengths, "--rate", "9", "--slo-ttft-s", "30", "--find-goodput")
        assert ended.returncode == 2
        assert "kaveri: --requests: leaves a single request, which has no rate" in ended.stderr


def test_people_see_the_latencies_of_all_runs_and_that_the_cluster_could_tell_the_lengths() -> None:
    with serving_in_a_thread(InferenceDouble()) as target:
        lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "10", "--requests", "20"]
        ended = bench("--target", target, *lengths, "--concurrency", "2", "--repeats", "3", "--slo-ttft-s", "30")
        search = ["--rate", "50", "--slo-ttft-s", "30", "--find-goodput", "--max-runs", "1", "--natural-length"]
        searched = bench("--target", target, *lengths, *search)
    assert "TPOT median" in ended.stdout
    assert "SLO met by 100.0 %" in ended.stdout
    assert "decode: busy for" in ended.stdout
    assert "of 3 runs" in ended.stdout
    assert "forced lengths" in ended.stdout
    assert re.search(r"tokens/s, without \d+ that are too long for the model\n", ended.stdout), ended.stdout
    shown = r"goodput: at least \d+\.\d+ requests/s.* without \d+ that are too long for the model\n"
    assert re.search(shown, searched.stdout), searched.stdout
    assert "forced lengths" not in searched.stdout


class StuckService(InferenceDouble):
    """Service that answers so many requests; at the next it sets `stuck` and hangs."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.stuck = threading.Event()
        self._answers = answers

    async def _answer(self, request: Any, context: Any, cancel: asyncio.Event) -> AsyncIterator[Any]:
        if len(self.requests) > self._answers:
            self.stuck.set()
            await asyncio.Event().wait()
        async for response in super()._answer(request, context, cancel):
            yield response


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency", "1", "--repeats", "3"],
        ["--rate", "50", "--slo-ttft-s", "30", "--find-goodput"],
    ],
)
@pytest.mark.parametrize("complete_runs", [0, 1])
def test_ctrl_c_reports_the_runs_that_are_complete(flags: list[str], complete_runs: int) -> None:
    service = StuckService(answers=2 * complete_runs)
    lengths = ["--workload", "LPLD", "--max-prompt", "18", "--max-output", "8", "--requests", "2", "--warm-up", "0"]
    with serving_in_a_thread(service) as target:
        command = [*COMMAND, "--target", target, *lengths, *flags, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert service.stuck.wait(60)
            process.send_signal(signal.SIGINT)
            printed, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "Traceback" not in complaints
    if complete_runs == 0:
        assert printed == ""
        return
    report = json.loads(printed)
    (run,) = report["runs"]
    assert run["answered"] == 2
    assert report["interrupted"]
    assert "interrupted: runs complete by then: 1" in complaints
    if report["goodput"] is not None:
        assert report["goodput"]["rate_per_s"] == run["offered_per_s"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rate", "1", "--plot", "runs.txt"], "--plot"),
        (["--rate", "1", "--plot", "/nowhere/runs.svg"], "--plot"),
        (["--rate", "1", "--prompts", "/nowhere/prompts.txt"], "--prompts"),
        (["--rate", "1", "--prompts", "a", "--trace", "b"], "--prompts"),
        (["--concurrency", "1", "--slo-ttft-s", "1", "--find-goodput"], "--find-goodput"),
        (["--rate", "1", "--find-goodput"], "--find-goodput"),
        (["--rate", "1", "--slo-ttft-s", "1", "--find-goodput", "--attainment", "2"], "--attainment"),
        (["--rate", "1", "--slo-ttft-s", "1", "--find-goodput", "--repeats", "2"], "--repeats"),
        (["--rate", "1", "--speed", "2"], "--speed"),
        (["--rate", "1", "--trace", "a", "--speed", "2"], "--speed"),
        (["--trace", "a", "--max-prompt", "9"], "--max-prompt"),
        (["--rate", "1", "--prompts", "a", "--max-prompt", "9"], "--max-prompt"),
        (["--trace", "a", "--max-output", "9"], "--max-output"),
        (["--rate", "1", "--max-runs", "2"], "--max-runs"),
        (["--trace", "a", "--burstiness", "4"], "--burstiness"),
        (["--concurrency", "1", "--burstiness", "4"], "--burstiness"),
        (["--trace", "a", "--workload", "LPLD"], "--workload"),
        (["--rate", "1", "--prompts", "a", "--workload", "LPLD"], "--workload"),
        (["--rate", "1", "--attainment", "0.9"], "--attainment"),
        (["--requests", "3"], "--rate"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency"),
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--burstiness", "-1"], "--burstiness"),
        (["--rate", "1", "--workload", "HPHD", "--max-prompt", "100"], "--max-prompt"),
        (["--trace", "/nowhere/trace.csv"], "--trace"),
    ],
)
def test_flags_that_make_no_load_are_refused_in_one_line(
    flags: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kaveri", "bench", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"kaveri: {complaint}: ")
