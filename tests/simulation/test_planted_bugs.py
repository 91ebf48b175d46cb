"""The simulation finds the bugs that are planted in it. The whole table is docs/planted_bugs.json; CI runs a few."""

import json
from pathlib import Path
from typing import Any

import pytest

from kaveri.text.tokenizer import ModelTokenizer
from tests.simulation.cluster import (
    planted,
    planted_blame,
    planted_chats,
    planted_lives,
    planted_owners,
    planted_replicas,
    planted_terms,
)
from tests.simulation.cluster.draw import draw_plan
from tests.simulation.cluster.planted_plans import PLANS
from tests.simulation.cluster.planting import PLANTED
from tests.simulation.cluster.schedule import run_schedule

_TABLE: list[dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[2] / "docs" / "planted_bugs.json").read_text()
)
_IN_CI = (
    "parser_begins_anew_at_a_reattach",
    "grammar_of_calls_lost_at_a_reattach",
    "ended_request_keeps_its_claim",
    "retry_draws_another_seed",
    "retry_forgets_generated_tokens",
    "preempted_kv_counts_as_computed",
    "stream_of_any_life",
    "attached_at_any_life",
    "overlap_appended_twice",
    "blocks_of_dropped_replicas_free_at_once",
)


def test_the_table_names_every_planted_bug() -> None:
    assert [row["name"] for row in _TABLE] == list(PLANTED)
    assert [row["what"] for row in _TABLE] == [bug.what for bug in PLANTED.values()]


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_of_a_planted_bug_is_left(name: str) -> None:
    patched: list[tuple[object, str, object]] = []
    with pytest.MonkeyPatch.context() as patching:
        replaced = planted.replaced

        def watched(owner: Any, attribute: str, make: Any) -> Any:
            patched.append((owner, attribute, getattr(owner, attribute)))
            return replaced(owner, attribute, make)

        modules = (planted, planted_blame, planted_chats, planted_lives, planted_owners, planted_replicas)
        for module in (*modules, planted_terms):
            patching.setattr(module, "replaced", watched)
        with PLANTED[name].apply():
            assert all(getattr(owner, attribute) is not was for owner, attribute, was in patched)
    assert patched
    assert all(getattr(owner, attribute) is was for owner, attribute, was in patched)


@pytest.mark.parametrize("name", [row["name"] for row in _TABLE if "plan" in row])
def test_a_planted_bug_is_found_by_its_plan(tokenizer: ModelTokenizer, name: str) -> None:
    with PLANTED[name].apply():
        assert run_schedule(PLANS[name], tokenizer).violations
    assert not run_schedule(PLANS[name], tokenizer).violations


@pytest.mark.parametrize("name", _IN_CI)
def test_a_planted_bug_is_found_by_its_seed(tokenizer: ModelTokenizer, name: str) -> None:
    row = next(row for row in _TABLE if row["name"] == name)
    plan = draw_plan(row["seed"])
    with PLANTED[name].apply():
        assert run_schedule(plan, tokenizer).violations
    assert not run_schedule(plan, tokenizer).violations
