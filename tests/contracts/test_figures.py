"""What one request passes stays within its budget: tests/figures/budget.toml, which may only fall."""

import tomllib

from tests.figures.passage import joined, trace_request
from tests.figures.sizes import ROOT


async def test_one_request_passes_no_more_files_classes_and_functions_than_its_budget() -> None:
    budget = tomllib.loads((ROOT / "tests/figures/budget.toml").read_text())
    passages = dict(await trace_request())
    passages["all processes"] = joined(passages.values())
    assert passages.keys() == budget.keys()
    over = {
        (process, kind): (count, budget[process][kind])
        for process, passage in passages.items()
        for kind, count in passage.counts.items()
        if count > budget[process][kind]
    }
    assert not over, f"(passed, budget), by process: {over}"
    assert all(passage.counts["functions"] > 30 for passage in passages.values()), "the trace found too little"
