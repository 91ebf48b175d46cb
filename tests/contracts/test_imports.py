"""What an import drags in, asked of a fresh interpreter."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _loaded_by(statement: str) -> set[str]:
    """The top-level modules that are loaded after `statement`."""
    script = f"{statement}\nimport sys\nprint('\\n'.join({{name.split('.')[0] for name in sys.modules}}))"
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=140)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.splitlines())


def test_the_sdk_is_light() -> None:
    heavy = {"torch", "transformers", "redis", "numpy", "services", "structlog", "prometheus_client", "typer", "rich"}
    assert not _loaded_by("import kaveri") & heavy


def test_the_command_line_is_light() -> None:
    heavy = {"torch", "transformers", "redis", "numpy", "services"}
    assert not _loaded_by("import kaveri.cli.main") & heavy


def _import_all(package: str) -> str:
    folder = ROOT / Path(*package.split("."))
    return "import " + ", ".join(f"{package}.{path.stem}" for path in sorted(folder.glob("[a-z]*.py")))


@pytest.mark.parametrize("package", ["kaveri.rpc", "kaveri.cluster", "kaveri.policy"])
def test_no_torch_comes_with(package: str) -> None:
    assert "torch" not in _loaded_by(_import_all(package))


def test_the_router_works_where_torch_is_not_installed() -> None:
    # None is how Python says, to `import` and to find_spec alike, that there is no such module.
    hide = "import sys\nsys.modules['torch'] = None\n"
    load = "\nfrom kaveri.text.tokenizer import ModelTokenizer\nModelTokenizer.load('kaveri-tiny').close()"
    _loaded_by(hide + _import_all("services.router") + load)


def test_the_router_needs_the_package_of_the_fields_grpc_with_its_flag_alone() -> None:
    assert "smg_grpc_proto" not in _loaded_by("from services.router.service import serve")
    assert "smg_grpc_proto" in _loaded_by("import services.router.vllm_grpc")


def test_the_check_would_see_torch() -> None:
    pytest.importorskip("torch")
    assert "torch" in _loaded_by("import torch")


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports for type checkers only count too."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in ("kaveri", "services")
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                named = {f"{node.module}.{name.name}" for name in node.names}
                graph[module] |= (named & modules.keys()) or ({node.module} & modules.keys())
    assert len(graph) > 200
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_a_gateway_without_a_keys_file_does_not_need_the_package_that_counts() -> None:
    assert "limits" not in _loaded_by("import services.gateway.service")
