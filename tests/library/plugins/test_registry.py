import sys
from pathlib import Path

import pytest

from kaveri.cli.main import main
from kaveri.config.settings import read_settings
from kaveri.engine.factory import build_engine
from kaveri.engine.settings import ENGINES, EngineSettings
from kaveri.errors import ConfigError
from kaveri.hosting.policy_settings import DECODE_PLACEMENTS, FAULTS, POLICY_POINTS, PolicyFaults
from kaveri.kv.transports import TRANSPORTS, make_transports
from kaveri.policy.placement import DecodePlacementPolicy
from kaveri.policy.plugins import Guarded
from kaveri.programs import settings_types

POINTS = (ENGINES, TRANSPORTS, *POLICY_POINTS)
SOURCE = """
import random
from kaveri.kv.transports import tcp_transport
from kaveri.policy.plugins import DecodePlacement

class Last(DecodePlacement):
    def choose(self, options, demand, rng):
        return options[-1].instance_id

class Broken(DecodePlacement):
    def __init__(self):
        raise OSError("no disk")
    choose = Last.choose

last = Last()
no_policy = 7

class Abstract(DecodePlacement):
    pass

def link(advertise_host=None):
    made = tcp_transport(advertise_host)
    made.name = made.label = "stub"
    return made

def no_link():
    return 7

def broken_link():
    raise OSError("no device")

def no_engine(settings):
    return settings
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a distribution "stub 1.0" with the module `stub_plugins`. Returns its file of entry points."""
    (tmp_path / "stub_plugins.py").write_text(SOURCE)
    (tmp_path / "stub_broken.py").write_text("raise SystemExit('this module is no library')")
    info = tmp_path / "stub-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = info / "entry_points.txt"
    entries.write_text("[kaveri.policies]\ndecode-placement.last = stub_plugins:Last\n")
    return entries


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stub_plugins", "stub_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.kind)
def test_every_name_of_our_own_can_be_loaded(point: object) -> None:
    assert point in POINTS
    for name in point.own:  # type: ignore[attr-defined]
        point.load(name)  # type: ignore[attr-defined]


def test_our_own_policy_is_used_as_it_is_and_a_plug_in_is_guarded(package: Path) -> None:
    assert DECODE_PLACEMENTS.parse("heavy-light") is DecodePlacementPolicy.HEAVY_LIGHT
    for text in ("last", "stub_plugins:Last", "stub_plugins:last"):
        assert isinstance(DECODE_PLACEMENTS.parse(text), Guarded)


@pytest.mark.parametrize(
    ("section", "flag", "text", "reason"),
    [
        ("prefill", "--decode-placement", "nearest", "is 'nearest'; choose power-of-two, .*, last, or package.mod"),
        ("prefill", "--decode-placement", "stub_plugins:no_policy", "is no kaveri.policy.plugins.DecodePlacement"),
        ("prefill", "--decode-placement", "stub_plugins:Broken", "cannot be made: OSError: no disk"),
        ("prefill", "--decode-placement", "stub_plugins:Abstract", "cannot be made: TypeError"),
        ("prefill", "--decode-placement", "stub_plugins:missing", "has no attribute 'missing'"),
        ("prefill", "--decode-placement", "stub_plugins:", "write package.module:name"),
        ("prefill", "--prefill-policy", "stub_plugins:Last", "is no kaveri.policy.plugins.PromptOrder"),
        ("prefill", "--engine", "sglang", "choose transformers, vllm, fake, timed, or package.module:name"),
        ("router", "--placement-policy", "no.such:thing", "ModuleNotFoundError: No module named 'no'"),
        ("decode", "--decode-policy", "stub_broken:thing", "SystemExit: this module is no library"),
        ("decode", "--replication", "mirror", "choose off, pair, ring, spread, or package.module:name"),
        ("decode", "--kv-transports", "tcp,rdma", "is 'rdma'; choose shm, unix, tcp"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_flag(
    package: Path, section: str, flag: str, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        read_settings(settings_types()[section], f"kaveri {section}", (flag, text), {})
    assert raised.value.field == flag
    assert "\n" not in str(raised.value)


def test_a_name_that_two_packages_register_is_refused(package: Path) -> None:
    info = package.parent.parent / "other-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[kaveri.policies]\ndecode-placement.last = elsewhere:Last\n")
    with pytest.raises(ValueError, match=r"other 2\.0 and stub 1\.0 register|stub 1\.0 and other 2\.0 register"):
        DECODE_PLACEMENTS.load("last")


def test_the_list_names_each_plug_in_its_package_and_what_is_wrong_with_it(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write_text(
        "[kaveri.policies]\ndecode-placement.last = stub_plugins:Last\nreplication.ring = stub_plugins:Ring\n"
        "[kaveri.engines]\nstub = stub_broken:engine\n"
    )
    monkeypatch.setattr(sys, "argv", ["kaveri", "plugins"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    rows = {
        tuple(line.split(maxsplit=2)[:2]): line.split(maxsplit=2)[2]
        for line in capsys.readouterr().out.split("\n")
        if line
    }
    assert rows["--decode-placement", "last"].split() == ["stub", "1.0", "ok"]
    assert rows["--decode-placement", "power-of-two"].split() == ["kaveri", "ok"]
    assert "not used" in rows["--replication", "ring"]
    assert "this module is no library" in rows["engine", "stub"]


def test_a_transport_from_outside_is_made_and_listens_under_its_own_name(package: Path) -> None:
    settings = EngineSettings(engine="fake", kv_transports=("stub_plugins:link", "unix"), kv_cache_memory=2**20)
    engine = build_engine(settings)
    try:
        assert [endpoint.transport for endpoint in engine.info.kv_endpoints] == ["stub", "unix"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("stub_plugins:no_link",), "made a int, which is no Transport: it has no name, label"),
        (("stub_plugins:broken_link",), "cannot be made: OSError: no device"),
        (("stub_plugins:link", "stub_plugins:link"), "stub is there twice"),
    ],
)
def test_what_is_no_transport_is_refused(package: Path, names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        make_transports(names)
    assert raised.value.field == "kv_transports"


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("stub_plugins:no_engine", "made a EngineSettings, which is neither an engine nor a ModelRunner"),
        ("stub_plugins:no_policy", "cannot be made: TypeError"),
    ],
)
def test_what_is_no_engine_is_refused(package: Path, engine: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        build_engine(EngineSettings(engine=engine, kv_transports=("unix",), kv_cache_memory=2**20))
    assert raised.value.field == "engine"


def test_faults_are_counted_each_time_and_logged_once_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    before = FAULTS.labels("decode_placement")._value.get()
    report = PolicyFaults("decode_placement", "stub:Last")
    for _ in range(5):
        report("answered None")
    assert FAULTS.labels("decode_placement")._value.get() == before + 5
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("policy_failed") == 1
