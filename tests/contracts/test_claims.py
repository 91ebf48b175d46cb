"""docs/claims.md is the output of scripts/claims.py, and marks figures whose code has changed."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("claims", ROOT / "scripts" / "claims.py")
assert _spec is not None
assert _spec.loader is not None
claims = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(claims)


def _copy(folder: Path) -> Path:
    shutil.copytree(claims.ROOT / "benchmarks/results", folder / "benchmarks/results")
    shutil.copy(claims.ROOT / claims.CLAIMS, folder / claims.CLAIMS)
    for row in claims.read_claims(claims.ROOT):
        for name in row.get("code", ()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(claims.ROOT / name, folder / name)
    return folder


def test_the_page_is_what_the_script_writes() -> None:
    written = (claims.ROOT / claims.PAGE).read_text()
    assert written == claims.page(claims.ROOT), "run python scripts/claims.py"


def test_every_figure_is_in_a_result_and_its_code_exists() -> None:
    rows = claims.read_claims(claims.ROOT)
    assert len(rows) == 45
    for row in rows:
        claims.our_figure(claims.ROOT, row)
        for name in row.get("code", ()):
            assert (claims.ROOT / name).is_file(), f"claim {row['number']} names {name}"


def test_a_row_is_stale_from_the_change_of_its_code_to_its_next_measurement(tmp_path: Path) -> None:
    root = _copy(tmp_path)
    rows = {row["number"]: row for row in claims.read_claims(root)}
    beside = [number for number, row in rows.items() if rows[1]["code"][0] in row.get("code", ())]
    claims.stamp(root, [*beside, 45])
    rows = {row["number"]: row for row in claims.read_claims(root)}
    assert not claims.is_stale(root, rows[1])
    assert not claims.is_stale(root, rows[45])
    fresh = claims.page(root)
    changed = root / rows[1]["code"][0]
    changed.write_text(changed.read_text() + "ANOTHER = 1\n")
    assert claims.is_stale(root, rows[1])
    assert not claims.is_stale(root, rows[45])
    assert claims.page(root) != fresh, "the page shows it"
    claims.stamp(root, beside)
    assert claims.page(root) == fresh


def test_comments_and_docstrings_are_no_change_of_the_code() -> None:
    plain = 'X = "# no comment"\n\n\nclass A:\n    def f(self):\n        return """text"""\n'
    told = '"""Of X."""\n' + plain.replace("class A:\n", 'class A:  # of letters\n    """Two\n    lines."""\n\n')
    told += '"""Of A, as\nof an attribute."""\n'
    assert claims.what_runs(told) == claims.what_runs(plain)
    assert claims.what_runs(told) != claims.what_runs(plain.replace("text", "test"))
    assert claims.what_runs(told) != claims.what_runs(plain.replace("no comment", "a comment"))


def test_a_claim_that_was_never_tried_has_no_figure(tmp_path: Path) -> None:
    root = _copy(tmp_path)
    text = (root / claims.CLAIMS).read_text()
    (root / claims.CLAIMS).write_text(text.replace('verdict = "in size"', 'verdict = "never tried"', 1))
    with pytest.raises(ValueError, match="claim 1 was never tried, and has figures"):
        claims.read_claims(root)
