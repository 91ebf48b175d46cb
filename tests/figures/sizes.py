"""Sizes of the source tree: lines, RPCs between services, attributes, function bodies, import cycles, words."""

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CLIENT_SERVICES = frozenset({"InferenceService", "ClusterService", "LengthPredictorService"})
"""gRPC services that do not count: for clients and for the predictor."""
_GENERATED = ("kaveri", "v1")


def product_files() -> list[Path]:
    return [path for room in ("kaveri", "services") for path in _python_files(room) if not _is_generated(path)]


def product_lines() -> Mapping[str, int]:
    """Return the lines of kaveri/ and services/ by folder, such as "kaveri/engine", largest first."""
    return dict(Counter(_by_room(product_files())).most_common())


def test_lines() -> int:
    return sum(_line_count(path) for path in _python_files("tests") if "simulation" not in path.parts)


def file_lines() -> list[int]:
    return sorted(_line_count(path) for path in product_files())


def instance_rpcs() -> list[str]:
    """Return the RPCs between instances and routers: "PrefillService.Prefill"."""
    found = []
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        service = ""
        for line in path.read_text().splitlines():
            if opened := re.match(r"service (\w+)", line):
                service = opened[1]
            elif (called := re.match(r"\s+rpc (\w+)", line)) and service not in _CLIENT_SERVICES:
                found.append(f"{service}.{called[1]}")
    return found


def attribute_counts() -> Mapping[str, int]:
    """Return the number of attributes of each class's objects, by "file:class"."""
    found = {}
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not _is_enumeration(node):
                found[f"{path.relative_to(ROOT)}:{node.name}"] = len(set(_attributes(node)))
    return found


def body_lines() -> Mapping[str, int]:
    """Return the lines of each function's body without its docstring, by "file:function"."""
    found = {}
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path.relative_to(ROOT)}:{node.name}"] = _body_lines(node)
    return found


@dataclass(frozen=True)
class Circles:
    """One import cycle between files and one between folders ("rooms"), as lists of names; empty if there is none."""

    files: Sequence[str]
    rooms: Sequence[str]

    @property
    def count(self) -> int:
        return len(self.files) + len(self.rooms)


def circles() -> Circles:
    """Find import cycles, also by a module's name in a string. `__main__` modules are left out: nothing imports
    them."""
    modules = {_module_of(path): path for path in product_files() if path.name != "__main__.py"}
    graph = {module: set(_imports(path, modules)) - {module} for module, path in modules.items()}
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        room = _room_of(module)
        rooms.setdefault(room, set()).update(_room_of(name) for name in imported if _room_of(name) != room)
    return Circles(_circle(graph), _circle(rooms))


def words(name: str) -> int:
    return len((ROOT / name).read_text().split())


def tree_figures() -> Mapping[str, int]:
    """Return the sizes that tests/figures/budget.toml limits, by name."""
    attributes = sorted(attribute_counts().values())
    return {
        "product_lines": sum(product_lines().values()),
        "attributes_p95": percentile(attributes, 0.95),
        "attributes_max": attributes[-1],
        "body_lines_max": max(body_lines().values()),
        "circles": circles().count,
    }


def percentile(values: Sequence[int], share: float) -> int:
    """Return the smallest of the ascending values that at least `share` of them do not exceed."""
    return values[max(0, -(-int(share * 100) * len(values) // 100) - 1)]


def _python_files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _is_generated(path: Path) -> bool:
    return path.relative_to(ROOT).parts[:2] == _GENERATED


def _line_count(path: Path) -> int:
    return len(path.read_text().splitlines())


def _by_room(paths: Sequence[Path]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for path in paths:
        parts = path.relative_to(ROOT).parts
        found["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += _line_count(path)
    return dict(found)


def _is_enumeration(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        # Fields of dataclasses and protocols' attributes.
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if "ClassVar" not in ast.unparse(statement.annotation):
                yield statement.target.id
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    owner = inner.value
                    if isinstance(owner, ast.Name) and owner.id == "self":
                        yield inner.attr


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            named = {f"{node.module}.{name.name}" for name in node.names} & modules.keys()
            yield from named or {node.module} & modules.keys()
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            strings = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (name for name in strings if isinstance(name, str) and name in modules)


def _circle(graph: Mapping[str, set[str]]) -> Sequence[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []
