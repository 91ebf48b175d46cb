import importlib.util
from pathlib import Path

import pytest

from kaveri.errors import ConfigError
from kaveri.loadgen.driver import LoadRun, RequestRecord
from kaveri.loadgen.plot import draw_runs
from kaveri.loadgen.report import Slo
from kaveri.profiling.output import check_plot
from kaveri.workload.requests import PlannedRequest, RequestLengths

ANSWERED = RequestRecord(PlannedRequest(0, 0.0, RequestLengths(5, 4)), 0.0, 0.0, [0.2, 0.4, 0.6, 0.8], 4)
ONE_TOKEN = RequestRecord(PlannedRequest(1, 0.1, RequestLengths(5, 1)), 0.1, 0.1, [0.3], 1)
FAILED = RequestRecord(PlannedRequest(2, 0.2, RequestLengths(5, 4)), 0.2, 0.2, error="Unavailable", reason="gone")


@pytest.mark.parametrize(
    ("name", "beginning", "last"),
    [("a.svg", b"<?xml", ANSWERED), ("a.png", b"\x89PNG", ANSWERED), ("a.pdf", b"%PDF", FAILED)],
)
def test_runs_are_drawn_in_the_format_of_the_file(
    tmp_path: Path, name: str, beginning: bytes, last: RequestRecord
) -> None:
    path = tmp_path / name
    check_plot(path)
    runs = [("run 1", LoadRun((ANSWERED, ONE_TOKEN, FAILED), 1.0, ())), ("run 2", LoadRun((last,), 1.0, ()))]
    draw_runs(runs, Slo(ttft_s=0.3), "a title", path)
    assert path.read_bytes().startswith(beginning)


def test_a_plot_that_could_not_be_written_is_refused_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()
    for path, complaint in (
        (tmp_path / "a.jpeg", "must end in"),
        (tmp_path / "none" / "a.svg", "no folder"),
        (tmp_path / "folder.svg", "is a folder"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_plot(path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed: pip install .*predictor"):
        check_plot(tmp_path / "a.svg")
