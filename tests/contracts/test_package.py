"""Contents of the kaveri package, and the packages it needs."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from kaveri.domain.view import WIRE

ROOT = Path(__file__).resolve().parents[2]
_SERVE = (
    "redis",
    "numpy",
    "xxhash",
    "transformers",
    "jinja2",
    "yaml",
    "structlog",
    "prometheus_client",
    "typer",
    "rich",
)
_HIDE = f"import sys\nfor name in {(*_SERVE, 'uvloop', 'opentelemetry')!r}:\n    sys.modules[name] = None\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site-packages")
    return folder / "site-packages"


def _run(script: str, site_packages: Path = ROOT, status: int = 0) -> str:
    """Run a script with -S: otherwise Python would find the source tree, which is installed as editable."""
    environment = {"PYTHONPATH": f"{site_packages}:{sysconfig.get_path('purelib')}"}
    command = [sys.executable, "-S", "-P", "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_the_wheel_has_one_top_level_package(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"kaveri"}


def test_services_of_the_wheel_are_found_before_another_package_of_that_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise RuntimeError('an application')")
    find = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom kaveri.programs import settings_types\n"
    shown = _run(f"{find}settings_types()\nprint(sys.modules['services'].__path__[0])", installed)
    assert shown.strip() == str(installed / "kaveri" / "installed" / "services")


@pytest.mark.parametrize("role", ["router", "decode"])
def test_a_service_of_the_wheel_starts(installed: Path, role: str) -> None:
    start = "from kaveri.config.services import program_of, ServiceKind\nimport runpy, sys\n"
    start += f"_, _, module, *arguments = program_of(ServiceKind({role!r}))\nsys.argv = ['', *arguments, '--help']\n"
    assert f"kaveri {role}" in _run(f"{start}runpy.run_module(module, run_name='__main__', alter_sys=True)", installed)


def test_the_sdk_needs_none_of_the_packages_of_the_services() -> None:
    call = "import kaveri\nwith kaveri.Client('127.0.0.1:1', timeout_s=5) as client:\n    client.generate('hello')"
    assert "kaveri.errors.Unavailable" in _run(_HIDE + call, status=1)


def test_without_the_extra_the_command_says_what_to_install() -> None:
    shown = _run(f"{_HIDE}from kaveri.cli.entry import main\nmain()", status=1)
    assert shown.startswith("kaveri: typer is not installed: pip install ")
    assert shown.endswith("[serve]'\n")


def test_every_extra_with_a_service_brings_what_services_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    alone = {name for name, needs in project["optional-dependencies"].items() if "kaveri[serve]" not in needs}
    assert alone == {"serve", "otel", "docs", "dev"}
    assert {need.partition(">")[0] for need in project["dependencies"]} == {
        "grpcio",
        "grpcio-health-checking",
        "grpcio-reflection",
        "protobuf",
        "googleapis-common-protos",
    }


def test_another_version_of_llguidance_raises_the_wire_number() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*needed["dependencies"], *(each for extra in needed["optional-dependencies"].values() for each in extra)]
    # Answers that move are masked alike. When you change the version, raise WIRE, then both here.
    assert {each for each in every if each.startswith("llguidance")} == {"llguidance==1.7.6"}
    assert WIRE == 7
