"""A class name means one thing: a search for it finds one definition."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kaveri", "services", "benchmarks", "tests")


def _definitions() -> dict[str, list[str]]:
    """Class name to the lines that define it. Generated code is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[:2] == ("kaveri", "v1"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{name}:{node.lineno}")
    return found


def test_no_class_name_is_defined_twice() -> None:
    found = _definitions()
    assert len(found) > 500, "the classes were not found"
    assert not {name: where for name, where in found.items() if len(where) > 1}
