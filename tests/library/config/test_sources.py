from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from kaveri.config.settings import ReadSettings, read_settings, setting
from kaveri.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SourcedSettings:
    max_batch: int = setting("requests", 64, least=1)
    lease_ttl_s: float = setting("seconds", 1.0)
    verbose: bool = setting("say more", False)
    kinds: tuple[str, ...] = setting("kinds", ("a",), lambda text: tuple(text.split(",")))
    options: str = setting("JSON", "")
    port: int = setting("port", 0, least=0, most=65535)
    url: str = setting("a secret", "", mask=lambda text: text[-1:])
    token: str = setting("another", "", mask=lambda text: "***")
    made: str = "not a setting"


SECTIONS: Mapping[str, frozenset[str]] = {"router": frozenset({"max_requests"}), "up": frozenset()}


def read(path: Path | None, *flags: str, **environment: str) -> ReadSettings[SourcedSettings]:
    named = ("--config", str(path)) if path is not None else ()
    return read_settings(SourcedSettings, "kaveri decode", [*named, *flags], environment, lambda: SECTIONS)


def written(folder: Path, text: str) -> Path:
    path = folder / "kaveri.toml"
    path.write_text(text)
    return path


def test_a_flag_wins_over_a_variable_over_the_section_over_the_top_of_the_file_over_the_default(tmp_path: Path) -> None:
    path = written(tmp_path, "max_batch = 2\nlease_ttl_s = 3\n[decode]\nmax_batch = 4\n")
    assert read(None).config.max_batch == 64
    assert read(path).config == SourcedSettings(max_batch=4, lease_ttl_s=3.0)
    assert read(path, KAVERI_MAX_BATCH="8").config.max_batch == 8
    assert read(path, "--max-batch=16", KAVERI_MAX_BATCH="8").config.max_batch == 16
    assert read(path, "--max-batch", "16", "--max-batch", "32").config.max_batch == 32
    assert read(None, KAVERI_CONFIG=str(path)).config.max_batch == 4


def test_the_values_of_a_file_are_those_of_flags(tmp_path: Path) -> None:
    text = '[decode]\nverbose = true\nkinds = ["b", "c"]\nlease_ttl_s = 0.5\noptions = {size = 64}\n'
    config = read(written(tmp_path, text)).config
    assert config == SourcedSettings(verbose=True, kinds=("b", "c"), lease_ttl_s=0.5, options='{"size": 64}')


def test_a_flag_that_is_true_or_false_needs_no_value() -> None:
    assert read(None, "--verbose").config == SourcedSettings(verbose=True)
    assert read(None, "--verbose", "--max-batch", "8").config == SourcedSettings(verbose=True, max_batch=8)
    assert read(None, "--verbose", "off", "--port", "1").config == SourcedSettings(port=1)
    assert read(None, "--verbose=no").config == SourcedSettings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[decode]\nmax_batch = 0\n", "FILE [decode] max_batch: is 0; it must be at least 1"),
        ("max_batch = 0.5\n", "FILE max_batch: '0.5' is no whole number"),
        (
            "[decode]\nmax_btch = 8\n",
            "FILE [decode] max_btch: is no setting of kaveri decode; the nearest is max_batch",
        ),
        ("[decode]\nmax_requests = 8\n", "FILE [decode] max_requests: is no setting of kaveri decode"),
        ("max_reqests = 8\n", "FILE max_reqests: is no setting of Kaveri; the nearest is max_requests"),
        ("[rooter]\nx = 8\n", "FILE [rooter]: is no section; the nearest is router"),
        ("[decode]\nmade = 'up'\n", "FILE [decode] made: is no setting of kaveri decode"),
        (
            "max_batch = 1979-05-27\n",
            "FILE max_batch: has a value of a kind that no setting takes; write text, a number, true, false or a list",
        ),
        ("max_batch = \n", "--config: cannot read FILE: Invalid value (at line 1, column 13)"),
        ("url = 'a'\nurl_file = '/b'\n", "FILE url_file: is set, and FILE url too; set one of them"),
    ],
)
def test_what_a_file_cannot_say_is_one_line_that_names_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).replace(str(path), "FILE").startswith(says)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_what_named_it() -> None:
    with pytest.raises(ConfigError, match=r"--config: cannot read /no/such: .*No such file"):
        read(Path("/no/such"))
    with pytest.raises(ConfigError, match="KAVERI_CONFIG: cannot read /no/such"):
        read(None, KAVERI_CONFIG="/no/such")


def test_what_other_services_take_is_left_to_them(tmp_path: Path) -> None:
    path = written(tmp_path, "max_requests = 9\n[router]\nanything = 9\n[up]\nport = 7\n")
    assert read(path, KAVERI_MAX_REQUESTS="9", KAVERI_TARGET="host:1", HOME="/").config == SourcedSettings()


def test_a_secret_may_be_in_a_file_at_every_level_and_the_higher_level_wins(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("from a\n")
    (tmp_path / "b").write_text("from b\n")
    path = written(
        tmp_path, f"url = 'plain'\ntoken_file = '{tmp_path / 'a'}'\n[decode]\nurl_file = '{tmp_path / 'b'}'\n"
    )
    read_all = read(path)
    assert (read_all.config.url, read_all.config.token) == ("from b", "from a")
    assert read(path, "--token", "flag").config.token == "flag"
    assert read(path, "--token-file", str(tmp_path / "b"), KAVERI_TOKEN="variable").config.token == "from b"
    with pytest.raises(ConfigError, match="KAVERI_TOKEN_FILE: is set, and KAVERI_TOKEN too"):
        read(path, KAVERI_TOKEN="x", KAVERI_TOKEN_FILE="/y")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-btch", "8"], "--max-btch: is no flag of kaveri decode; the nearest is --max-batch"),
        (["--zzz", "8"], "--zzz: is no flag of kaveri decode"),
        (["--max_batch", "8"], "--max_batch: is no flag of kaveri decode; the nearest is --max-batch"),
        (["--max-batch"], "--max-batch: has no value; write --max-batch VALUE"),
        (["--max-batch", "--port"], "--max-batch: has no value; write --max-batch VALUE"),
        (["--max-batch", "8", "9"], "flags: '9' is no flag; write --name value"),
        (["--made", "8"], "--made: is no flag of kaveri decode"),
    ],
)
def test_what_is_no_flag_is_one_line(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, *flags)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("KAVERI_MAX_BTCH", "is no variable of Kaveri; the nearest is KAVERI_MAX_BATCH"),
        ("KAVERI_MAX_REQUEST", "is no variable of Kaveri; the nearest is KAVERI_MAX_REQUESTS"),
        ("KAVERI_PORTS", "is no variable of Kaveri; the nearest is KAVERI_PORT"),
        ("KAVERI_", "is no variable of Kaveri"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused_with_the_nearest(variable: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, **{variable: "8"})
    assert str(caught.value).startswith(f"{variable}: {says}")


def test_variables_of_kubernetes_service_links_are_ignored_and_reported() -> None:
    links = {
        "KAVERI_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KAVERI_ROUTER_SERVICE_PORT": "50051",
        "KAVERI_ROUTER_SERVICE_PORT_GRPC": "50051",
        "KAVERI_ROUTER_PORT": "tcp://10.0.0.1:50051",
        "KAVERI_ROUTER_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "KAVERI_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "KAVERI_ROUTER_PORT_50051_TCP_PORT": "50051",
        "KAVERI_ROUTER_PORT_50051_TCP_PROTO": "tcp",
        "KAVERI_SERVICE_HOST": "10.0.0.1",
        "KAVERI_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    }
    found = read(None, KAVERI_MAX_BATCH="8", **links)
    assert found.config == SourcedSettings(max_batch=8)
    assert found.service_links == tuple(sorted(links))


def test_a_port_that_kubernetes_wrote_says_so_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        read(None, KAVERI_PORT="tcp://10.0.0.1:50051")
    assert str(caught.value) == (
        "KAVERI_PORT: is 'tcp://10.0.0.1:50051', which Kubernetes made for a Service of this name; "
        "set `enableServiceLinks: false` in the pod's spec"
    )


def test_rows_say_value_and_origin_of_every_setting_and_mask_secrets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2\n")
    path = written(tmp_path, f"[decode]\nlease_ttl_s = 3\ntoken_file = '{tmp_path / 'token'}'\n")
    rows = read(path, "--max-batch", "8", "--url", "host:hunter3", KAVERI_VERBOSE="on").rows()
    assert rows == [
        ("max_batch", "8", "--max-batch"),
        ("lease_ttl_s", "3.0", f"{path} [decode] lease_ttl_s"),
        ("verbose", "true", "KAVERI_VERBOSE"),
        ("kinds", "a", "default"),
        ("options", "empty", "default"),
        ("port", "0", "default"),
        ("url", "3", "--url"),
        ("token", "***", f"{path} [decode] token_file"),
    ]
