"""Modules that an import loads, tested in a new interpreter."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _loaded_by(statement: str) -> set[str]:
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


def test_no_torch_comes_with_rpc_cluster_and_policy() -> None:
    loaded = _loaded_by("\n".join(map(_import_all, ("kaveri.rpc", "kaveri.cluster", "kaveri.policy"))))
    assert "torch" not in loaded
    assert "grpc" in loaded


def test_the_router_works_where_torch_is_not_installed() -> None:
    # None is how Python says, to `import` and to find_spec alike, that there is no such module.
    hide = "import sys\nsys.modules['torch'] = None\n"
    load = "\nfrom kaveri.text.tokenizer import ModelTokenizer\nModelTokenizer.load('kaveri-tiny').close()"
    _loaded_by(hide + _import_all("services.router") + load)


def test_the_router_needs_the_package_of_the_fields_grpc_with_its_flag_alone() -> None:
    assert "smg_grpc_proto" not in _loaded_by("from services.router.service import serve")
    assert "smg_grpc_proto" in _loaded_by("import services.router.vllm_grpc")


def test_a_gateway_without_a_keys_file_does_not_need_the_package_that_counts() -> None:
    assert "limits" not in _loaded_by("import services.gateway.service")
