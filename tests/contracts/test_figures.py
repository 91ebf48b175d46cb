"""Sizes of the source tree, and of the code that one request runs, stay within tests/figures/budget.toml."""

import tomllib
from collections.abc import Mapping

from tests.figures.passage import Passage, joined, trace_request
from tests.figures.sizes import ROOT, tree_figures

BUDGET = tomllib.loads((ROOT / "tests/figures/budget.toml").read_text())
TREE = BUDGET.pop("tree")
_RUNS = 5
"""Most runs of one request. A slow peer makes a run pass a function more: a sender that waits for credit, for one."""


def test_the_tree_is_no_larger_and_no_more_tangled_than_its_budget() -> None:
    found = tree_figures()
    assert found.keys() == TREE.keys()
    over = {name: (figure, TREE[name]) for name, figure in found.items() if figure > TREE[name]}
    assert not over, f"(found, budget): {over}; `make figures` prints more"


def _over(passages: Mapping[str, Passage]) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (process, kind): (count, BUDGET[process][kind])
        for process, passage in passages.items()
        for kind, count in passage.counts.items()
        if count > BUDGET[process][kind]
    }


async def test_one_request_passes_no_more_files_classes_and_functions_than_its_budget() -> None:
    common: dict[str, Passage] = {}
    over = {}
    for _ in range(_RUNS):
        passages = dict(await trace_request())
        passages["all processes"] = joined(passages.values())
        assert passages.keys() == BUDGET.keys()
        assert all(passage.counts["functions"] > 30 for passage in passages.values()), "the trace found too little"
        common = {process: passage & common.get(process, passage) for process, passage in passages.items()}
        if not (over := _over(common)):
            return
    raise AssertionError(f"(passed by every run, budget), by process: {over}")
