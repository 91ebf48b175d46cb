"""Some cells of the feature matrix, on the bundled model; `python -m tests.feature_matrix` runs hundreds."""

import pytest

from tests.feature_matrix import Cell, draw_cells, run_cells

CELLS = 12
STATES = (
    Cell("tools auto, a call", "HTTP", "greedy", "streamed", "router killed"),
    Cell("reasoning, tools required", "HTTP", "seeded", "streamed", "router killed"),
    Cell("reasoning, schema", "SDK", "seeded", "streamed", "decode killed, copy"),
)
"""Cells in which a process dies before a tool call, the reasoning or the grammar is complete."""


def test_cells_cover_all_pairs_that_are_possible() -> None:
    cells = draw_cells(3, 300)
    assert len(set(cells)) == 300
    assert all(cell.is_possible for cell in cells)


@pytest.mark.timeout(280)
async def test_answers_with_features_are_the_same_in_every_way_and_under_every_disturbance() -> None:
    account = await run_cells("kaveri-tiny", draw_cells(5, CELLS))
    assert account["wrong"] == []
    assert account["cells"] == CELLS


@pytest.mark.timeout(200)
async def test_calls_and_reasoning_go_on_where_a_stream_was_cut() -> None:
    account = await run_cells("kaveri-tiny", STATES)
    assert account["wrong"] == []
    assert account["disturbed"] == len(STATES)
