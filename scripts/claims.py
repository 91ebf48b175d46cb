"""Writes docs/claims.md: every claim of the papers, what was found of it, and whether the figure is still of this code.

    python scripts/claims.py             writes the page
    python scripts/claims.py --check     exits with 1 when the page differs from what would be written
    python scripts/claims.py --stamp N   the code under row N's figure is the code that was measured; writes the page

Rows are in benchmarks/claims.toml, figures in benchmarks/results. A row is stale when it has no digest, or when a file
that it names under `code` has changed since the digest was taken. Comments, docstrings and empty lines are no change.
--stamp asks nothing: use it after a run.
"""

import argparse
import ast
import functools
import hashlib
import io
import json
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLAIMS, PAGE = "benchmarks/claims.toml", "docs/claims.md"
VERDICTS = {
    "in size": "the paper's size, or near it",
    "in direction": "the same direction, another size",
    "not reproduced": "tried, and not found",
    "not comparable": "measured, but of something easier",
    "never tried": "not measured here yet",
}
PAPERS = {
    "TetriInfer": "arXiv 2401.11181",
    "DistServe": "arXiv 2401.09670",
    "DéjàVu": "arXiv 2403.01876",
    "AcceLLM": "arXiv 2411.05555",
}
_KEYS = {"number", "paper", "says", "verdict", "ours", "how", "why", "figures", "code", "digest"}


def read_claims(root: Path) -> list[dict[str, Any]]:
    """The rows, in the order of their numbers. Raises ValueError for a row that says what no row may say."""
    rows: list[dict[str, Any]] = tomllib.loads((root / CLAIMS).read_text())["claim"]
    for row in rows:
        unknown = set(row) - _KEYS
        if unknown or row["verdict"] not in VERDICTS or row["paper"] not in PAPERS:
            raise ValueError(f"claim {row['number']}: verdict {row['verdict']!r}, keys {sorted(unknown)}")
        if row.get("figures") and not row.get("code"):
            raise ValueError(f"claim {row['number']} has figures, and names no code under them")
        if row["verdict"] == "never tried" and (row.get("figures") or row.get("ours")):
            raise ValueError(f"claim {row['number']} was never tried, and has figures")
    if [row["number"] for row in rows] != list(range(1, len(rows) + 1)):
        raise ValueError("claims are not numbered from 1 on")
    return rows


@functools.cache
def what_runs(source: str) -> str:
    """A Python file's lines without comments, docstrings and empty lines. The same on every version of Python."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            # A docstring of a module, class, function or attribute: a string statement has no effect.
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest(root: Path, row: Mapping[str, Any]) -> str:
    """Of the code under the row's figure. A file that has gone counts as changed."""
    found = hashlib.sha256()
    for name in row.get("code", ()):
        path = root / name
        content = path.read_text() if path.is_file() else "gone"
        if path.suffix == ".py" and path.is_file():
            content = what_runs(content)
        found.update(f"{name}\0{content}\0".encode())
    return found.hexdigest()[:16]


def is_stale(root: Path, row: Mapping[str, Any]) -> bool:
    """Whether its figure is not known to be of the present code. Rows without a figure never are."""
    return bool(row.get("figures")) and row.get("digest") != digest(root, row)


def our_figure(root: Path, row: Mapping[str, Any]) -> str:
    """The row's sentence with its figures. Raises KeyError for a ratio that its result does not have."""
    values = []
    for figure in row.get("figures", ()):
        value = _result(root, figure["result"])["ratios"][figure["ratio"]]
        values.append(value - 1 if figure.get("change") else value)
    text: str = row.get("ours", "")
    return text.format(*values) if values else text


def page(root: Path) -> str:
    """docs/claims.md."""
    rows = read_claims(root)
    counts = Counter(row["verdict"] for row in rows)
    stale_count = sum(is_stale(root, row) for row in rows)
    lines = [
        "# The papers' claims",
        "",
        "<!-- Written by scripts/claims.py from benchmarks/claims.toml and benchmarks/results. Do not edit. -->",
        "",
        f"{len(rows)} claims of four papers, and what was found of each here. Nothing is tuned to a paper.",
        "",
        "| verdict | claims | |",
        "| --- | ---: | --- |",
        *(f"| {verdict} | {counts[verdict]} | {meaning} |" for verdict, meaning in VERDICTS.items()),
        "",
        f"{stale_count} figures are stale: code under them has changed since they were measured, or it is not known"
        " that it has not. They are marked.",
    ]
    for paper, source in PAPERS.items():
        lines += ["", f"## {paper} ({source})", ""]
        lines += ["| | the paper says | verdict | here | how | measured |", "| ---: | --- | --- | --- | --- | --- |"]
        lines += [_line(root, row) for row in rows if row["paper"] == paper]
    return "\n".join(lines) + "\n"


def stamp(root: Path, numbers: Sequence[int]) -> None:
    """Takes the digests of these rows."""
    parts = re.split(r"(?m)^(?=\[\[claim\]\]$)", (root / CLAIMS).read_text())
    for row in read_claims(root):
        if row["number"] not in numbers:
            continue
        part = re.sub(r"(?m)^digest = .*\n", "", parts[row["number"]].rstrip("\n") + "\n")
        ending = "\n" if row["number"] < len(parts) - 1 else ""
        parts[row["number"]] = f'{part}digest = "{digest(root, row)}"\n{ending}'
    (root / CLAIMS).write_text("".join(parts))


def _line(root: Path, row: Mapping[str, Any]) -> str:
    results = list(dict.fromkeys(figure["result"] for figure in row.get("figures", ())))
    measured = [
        f"`python -m benchmarks.{name}`, {result['commit']}, {result['date']}"
        for name in results
        for result in (_result(root, name),)
    ]
    if is_stale(root, row):
        measured.append("**stale**")
    here = ". ".join(text.rstrip(".") for text in (our_figure(root, row), row.get("why", "")) if text)
    cells = (str(row["number"]), row["says"], row["verdict"], here, row.get("how", ""), "; ".join(measured))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _result(root: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((root / "benchmarks/results" / f"{name}.json").read_text())
    return result


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--stamp", type=int, nargs="+", default=(), metavar="N", help="rows that were just measured")
    given = parser.parse_args()
    stamp(ROOT, given.stamp)
    if not given.check:
        (ROOT / PAGE).write_text(page(ROOT))
    elif (ROOT / PAGE).read_text() != page(ROOT):
        sys.exit(f"{PAGE} is not what scripts/claims.py writes: run it")


if __name__ == "__main__":
    main()
