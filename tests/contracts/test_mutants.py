"""The list of planted bugs is valid and applies to the current code. `make mutants` runs the bugs."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
assert _spec is not None
assert _spec.loader is not None
mutants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)

MUTANTS = mutants.load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mutant_id)
def test_every_mutant_changes_code_that_stands_and_names_tests_that_exist(mutant, tmp_path):
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    target.write_text((ROOT / mutant.file).read_text())
    mutant.apply(tmp_path)
    compile(target.read_text(), mutant.file, "exec")
    assert mutant.tests
    assert mutant.why.endswith(".")
    for test in (*mutant.tests, *mutant.wider):
        assert (ROOT / test.partition("::")[0]).exists(), test


def test_mutant_ids_are_unique():
    repeated = [mutant_id for mutant_id, count in Counter(mutant.mutant_id for mutant in MUTANTS).items() if count > 1]
    assert not repeated


def test_a_mutant_whose_text_is_gone_or_ambiguous_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for find in ("x = 1\n", "y = 1\n"):
        mutant = mutants.Mutant("room", "some-id", "a.py", find, "", "Because.", ("tests",))
        with pytest.raises(ValueError, match="some-id"):
            mutant.apply(tmp_path)


def test_the_score_counts_rooms_and_leaves_equivalent_mutants_out():
    def mutant(room: str, mutant_id: str, equivalent: str = ""):
        return mutants.Mutant(room, mutant_id, "a.py", "x", "y", "Because.", ("tests",), equivalent=equivalent)

    listed = [mutant("a", "a1"), mutant("a", "a2"), mutant("b", "b1"), mutant("b", "b2", "no effect")]
    table = mutants.score(listed, {"a1": "killed", "a2": "hung", "b1": "killed"})
    assert "| a | 2 | 1 | 1 | 50% |" in table
    assert "| b | 1 | 1 | 0 | 100% |" in table
    assert "| all | 3 | 2 | 1 | 67% |" in table


@pytest.mark.parametrize(
    ("body", "limit_s", "outcome"),
    [
        ("assert True", 60, ("survived", "")),
        ("assert False", 60, ("killed", "test_planted.py::test_it")),
        ("import time; time.sleep(30)", 1, ("hung", "test_planted.py::test_it")),
    ],
)
def test_a_test_that_fails_is_told_from_one_that_does_not_end(tmp_path, monkeypatch, body, limit_s, outcome):
    monkeypatch.setattr(mutants, "_LONGEST_TEST_S", limit_s)
    (tmp_path / "test_planted.py").write_text(f"def test_it():\n    {body}\n")
    assert mutants._run_tests(("test_planted.py",), tmp_path) == outcome
