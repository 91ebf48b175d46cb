"""Sizes of the source tree, and of the code that one request runs, stay within tests/figures/budget.toml."""

import tomllib

from tests.figures.passage import joined, trace_request
from tests.figures.sizes import ROOT, tree_figures

BUDGET = tomllib.loads((ROOT / "tests/figures/budget.toml").read_text())
TREE = BUDGET.pop("tree")


def test_the_tree_is_no_larger_and_no_more_tangled_than_its_budget() -> None:
    found = tree_figures()
    assert found.keys() == TREE.keys()
    over = {name: (figure, TREE[name]) for name, figure in found.items() if figure > TREE[name]}
    assert not over, f"(found, budget): {over}; `make figures` prints more"


async def test_one_request_passes_no_more_files_classes_and_functions_than_its_budget() -> None:
    passages = dict(await trace_request())
    passages["all processes"] = joined(passages.values())
    assert passages.keys() == BUDGET.keys()
    over = {
        (process, kind): (count, BUDGET[process][kind])
        for process, passage in passages.items()
        for kind, count in passage.counts.items()
        if count > BUDGET[process][kind]
    }
    assert not over, f"(passed, budget), by process: {over}"
    assert all(passage.counts["functions"] > 30 for passage in passages.values()), "the trace found too little"
