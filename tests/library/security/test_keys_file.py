"""A keys file: how keys are added, what it may say, and what becomes of changes while a process reads it."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from kaveri.errors import ConfigError
from kaveri.security.api_keys import MAX_KEYS, KeyLimits, digest_of, parse_keys
from kaveri.security.keys_file import MAX_FILE_BYTES, KeysFile, add_key

_DIGEST = digest_of(b"x").hex()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "keys.toml")


def test_a_new_key_is_found_with_its_limits_and_only_its_hash_is_kept(path: str) -> None:
    alice = add_key(path, "alice", KeyLimits(requests_per_s=5, in_flight=2))
    bob = add_key(path, "bob", KeyLimits(tokens_per_min=1000))
    keys = KeysFile(path)
    found = keys.find(alice.encode())
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(requests_per_s=5, in_flight=2))
    other = keys.find(bob.encode())
    assert other is not None
    assert (other.name, other.limits) == ("bob", KeyLimits(tokens_per_min=1000))
    text = Path(path).read_text()
    assert alice not in text
    assert alice.removeprefix("kaveri-") not in text
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("secret", [b"", b"kaveri-", b"\xff\x00", b"kaveri-" + b"A" * 43, b"a" * 100_000])
def test_what_is_no_key_is_not_found(path: str, secret: bytes) -> None:
    add_key(path, "alice", KeyLimits())
    assert KeysFile(path).find(secret) is None


def test_the_hash_of_a_key_is_no_key(path: str) -> None:
    digest = digest_of(add_key(path, "alice", KeyLimits()).encode())
    assert KeysFile(path).find(digest) is None
    assert KeysFile(path).find(digest.hex().encode()) is None


def test_keys_are_256_random_bits(path: str) -> None:
    secrets = {add_key(path, f"k{number}", KeyLimits()) for number in range(50)}
    assert len(secrets) == 50
    assert all(len(secret) == len("kaveri-") + 43 for secret in secrets)


def test_a_name_that_is_there_is_refused_and_the_file_stays_as_it_is(path: str) -> None:
    add_key(path, "alice", KeyLimits())
    before = Path(path).read_bytes()
    with pytest.raises(ConfigError, match=r"NAME: is alice, which .* has already"):
        add_key(path, "alice", KeyLimits())
    assert Path(path).read_bytes() == before


def test_a_key_is_added_behind_a_file_that_does_not_end_with_a_line(path: str) -> None:
    Path(path).write_text(f'[old]\nsha256 = "{_DIGEST}"')
    add_key(path, "new", KeyLimits())
    assert KeysFile(path).count == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[alice", "is no keys file"),
        ('sha256 = "1"', "sha256: stands outside of a table"),
        ("[alice]", r"\[alice\] sha256: must be the SHA-256"),
        (f'[alice]\nsha256 = "{_DIGEST.upper()}"', r"\[alice\] sha256: must be"),
        ("[alice]\nsha256 = 5", r"\[alice\] sha256: must be"),
        (f'[alice]\nsha256 = "{_DIGEST}"\nrequests = 5', r"\[alice\] requests: is no field"),
        (f'[alice]\nsha256 = "{_DIGEST}"\nin_flight = -1', r"\[alice\] in_flight: is -1"),
        (f'[alice]\nsha256 = "{_DIGEST}"\nin_flight = true', r"\[alice\] in_flight: is True"),
        (f'[alice]\nsha256 = "{_DIGEST}"\nrequests_per_s = 0.5', r"\[alice\] requests_per_s: is 0.5"),
        (f'[alice]\nsha256 = "{_DIGEST}"\n[alice]\n', "is no keys file"),
        (f'["a b"]\nsha256 = "{_DIGEST}"', "write up to 64 letters"),
        (f'[a]\nsha256 = "{_DIGEST}"\n[b]\nsha256 = "{_DIGEST}"', r"\[b\]: has the same sha256 as \[a\]"),
        ("\n".join(f"[k{number}]" for number in range(MAX_KEYS + 1)), f"at most {MAX_KEYS}"),
        ("a=" + "[" * 100_000, "is no keys file"),
    ],
)
def test_a_broken_file_is_refused_by_table_and_field(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_keys(text, "keys.toml")


def test_a_key_in_the_place_of_its_hash_is_not_shown(path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys('[alice]\nsha256 = "kaveri-secret"', path)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * (MAX_FILE_BYTES + 1)], ids=["none", "binary", "huge"])
def test_a_file_that_cannot_be_read_ends_the_start(path: str, content: bytes | None) -> None:
    if content is not None:
        Path(path).write_bytes(content)
    with pytest.raises(ConfigError, match="--keys-file"):
        KeysFile(path)


async def test_changes_are_taken_up_and_a_broken_file_keeps_the_former_keys(path: str) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    keys = KeysFile(path)
    bob = add_key(path, "bob", KeyLimits()).encode()
    assert keys.find(bob) is None
    await keys.look()
    assert keys.find(bob) is not None
    good = _text(path)
    with structlog.testing.capture_logs() as logged:
        _replace(path, good + "[broken")
        for _ in range(3):
            await keys.look()
        os.unlink(path)
        await keys.look()
    assert [line["event"] for line in logged] == ["keys_file_refused", "keys_file_refused"], "once for each reason"
    assert keys.find(alice) is not None
    assert keys.find(bob) is not None
    # Revoked, in a file that replaces the former one.
    _replace(path, good.partition("\n[bob]")[0])
    await keys.look()
    assert keys.find(bob) is None
    assert keys.find(alice) is not None


async def test_the_same_content_under_the_same_time_is_read_again_after_a_failure(path: str) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    keys = KeysFile(path)
    os.rename(path, path + ".away")
    await keys.look()
    os.rename(path + ".away", path)
    with structlog.testing.capture_logs() as logged:
        await keys.look()
    assert [line["event"] for line in logged] == ["keys_file_read"]
    assert keys.find(alice) is not None


def _text(path: str) -> str:
    return Path(path).read_text()


def _replace(path: str, text: str) -> None:
    Path(path + ".new").write_text(text)
    os.replace(path + ".new", path)


def _run(*arguments: str) -> Any:
    command = [sys.executable, "-P", "-c", "from kaveri.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_the_key_once_and_refuses_wrong_limits(path: str) -> None:
    made = _run("key", "new", "alice", "--keys-file", path, "--requests-per-s", "5")
    assert made.returncode == 0, made.stderr
    found = KeysFile(path).find(made.stdout.strip().encode())
    assert found is not None
    assert found.limits == KeyLimits(requests_per_s=5)
    wrong = _run("key", "new", "bob", "--keys-file", path, "--in-flight", "-1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--in-flight: is -1" in wrong.stderr
    assert KeysFile(path).count == 1


def test_a_key_is_an_operators_only_where_its_table_says_so(path: str) -> None:
    user = add_key(path, "user", KeyLimits())
    operator = add_key(path, "operator", KeyLimits(in_flight=1), is_admin=True)
    keys = KeysFile(path)
    found = [keys.find(secret.encode()) for secret in (user, operator)]
    assert [key.is_admin for key in found if key is not None] == [False, True]
    with pytest.raises(ConfigError, match=r"\[x\] admin: is 1; write true or false"):
        parse_keys(f'[x]\nsha256 = "{_DIGEST}"\nadmin = 1\n', "keys.toml")
