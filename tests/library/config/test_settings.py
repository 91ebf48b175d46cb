import enum
from dataclasses import dataclass
from pathlib import Path

import pytest

from kaveri.config.settings import MAX_NAME_LENGTH, hidden, name_text, present, setting, size_bytes
from kaveri.errors import ConfigError
from tests.support.settings import parse_config


class Order(enum.StrEnum):
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A service for tests."""

    model: str = setting("path of the model")
    chunk_tokens: int = setting("tokens per chunk; 50% of nothing", 512)
    lease_ttl_s: float = setting("seconds", 1.0)
    log_dir: str | None = setting("where logs go; None: nowhere", None)
    verbose: bool = setting("say more", False)
    memory_bytes: int = setting("bytes", 0, parse=size_bytes)
    port: int = setting("port", 0, least=0, most=65535)
    interval_s: float = setting("seconds", 1.0, above=0)
    dtype: str = setting("element type", "auto", choices=("auto", "float32"))
    token: str = setting("secret", "", mask=hidden)
    order: Order = setting("order", Order.FIRST)  # noqa: RUF009 - it is a field


def parse(*arguments: str, **environment: str) -> Settings:
    return parse_config(Settings, "kaveri test", arguments, environment)


def test_values_get_the_fields_type() -> None:
    settings = parse("--model", "m", "--lease-ttl-s", "0.5", "--log-dir", "/logs", "--memory-bytes", "2MiB")
    assert (settings.lease_ttl_s, settings.log_dir, settings.memory_bytes) == (0.5, "/logs", 2 * 2**20)
    assert parse("--model", "m").log_dir is None


def test_size_beyond_every_number_is_refused() -> None:
    with pytest.raises(ValueError, match="more than any machine has"):
        size_bytes("9" * 400 + "GiB")
    with pytest.raises(ConfigError, match="--memory-bytes"):
        parse("--model", "m", "--memory-bytes", "9" * 400)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("ON", True), ("no", False), ("0", False), ("False", False)]
)
def test_booleans_are_words(text: str, value: bool) -> None:
    assert parse("--model", "m", "--verbose", text).verbose is value


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        ([], {}, "--model"),
        (["--model", "m", "--chunk-tokens", "many"], {}, "--chunk-tokens"),
        (["--model", "m"], {"KAVERI_CHUNK_TOKENS": "many"}, "KAVERI_CHUNK_TOKENS"),
        (["--model", "m", "--verbose", "maybe"], {}, "--verbose"),
        (["--model", "m", "--memory-bytes", "lots"], {}, "--memory-bytes"),
        (["--model", "m", "--chunk", "1"], {}, "--chunk"),
    ],
)
def test_what_cannot_be_read_is_named(arguments: list[str], environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(Settings, "kaveri test", arguments, environment)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "text", "says"),
    [
        ("--port", "65536", "is 65536; it must be at most 65535"),
        ("--port", "-1", "is -1; it must be at least 0"),
        ("--port", "http", "'http' is no whole number"),
        ("--interval-s", "0", "is 0.0; it must be more than 0"),
        ("--interval-s", "nan", "'nan' is no finite number"),
        ("--interval-s", "inf", "'inf' is no finite number"),
        ("--interval-s", "soon", "'soon' is no number"),
        ("--order", "random", "is 'random'; choose first, last"),
        ("--dtype", "float9", "is 'float9'; choose auto, float32"),
    ],
)
def test_what_breaks_a_limit_is_named_with_its_limit(flag: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--model", "m", flag, text)
    assert str(caught.value) == f"{flag}: {says}"


def test_limits_themselves_are_taken() -> None:
    assert parse("--model", "m", "--port", "65535").port == 65535
    assert parse("--model", "m", "--order", "last").order is Order.LAST
    assert parse("--model", "m", "--dtype", "float32").dtype == "float32"


def test_secret_comes_from_the_file_that_its_variable_names(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2\n")
    variables = {"KAVERI_MODEL": "m", "KAVERI_TOKEN_FILE": str(path)}
    assert parse(**variables).token == "hunter2"
    assert parse(KAVERI_MODEL="m", KAVERI_TOKEN="plain", KAVERI_TOKEN_FILE="").token == "plain"
    with pytest.raises(ConfigError, match=r"KAVERI_TOKEN_FILE: cannot read /no/such: .*No such file"):
        parse(KAVERI_MODEL="m", KAVERI_TOKEN_FILE="/no/such")
    with pytest.raises(ConfigError, match="KAVERI_MODEL_FILE: is no variable of Kaveri"):
        parse(KAVERI_MODEL_FILE=str(path))


def test_help_lists_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "--chunk-tokens <tokens> Tokens per chunk; 50% of nothing. [env var: KAVERI_CHUNK_TOKENS; default: 512]"
        in shown
    )
    assert "[env var: KAVERI_MODEL; required]" in shown
    assert "[env var: KAVERI_TOKEN or KAVERI_TOKEN_FILE; default: empty]" in shown


@pytest.mark.parametrize("text", ["", "a", "decode-0.blue_1", "x" * MAX_NAME_LENGTH])
def test_names_are_letters_digits_and_a_few_signs(text: str) -> None:
    assert name_text(text) == text


@pytest.mark.parametrize("text", ["a:b", "a b", "é", "*", "a\n", "x" * (MAX_NAME_LENGTH + 1)])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write up to 128 letters"):
        name_text(text)


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_empty_text_is_refused_where_one_is_needed(text: str) -> None:
    with pytest.raises(ValueError, match="is empty"):
        present(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("64k", 64_000), ("2GB", 2 * 10**9), ("512MiB", 512 * 2**20), ("1.5 KiB", 1536)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1TB", "1 2", "0x10", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        size_bytes(text)
