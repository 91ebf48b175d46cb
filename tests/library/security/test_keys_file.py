import asyncio
import contextlib
import os
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from prometheus_client import REGISTRY

from kaveri.errors import ConfigError
from kaveri.security.api_keys import MAX_KEYS, KeyLimits, digest_of, key_table, parse_keys
from kaveri.security.keys_file import KeysFile, add_key, revoke_key
from kaveri.security.regular_file import MAX_FILE_BYTES

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


def test_what_is_no_key_is_not_found_and_neither_is_its_hash(path: str) -> None:
    digest = digest_of(add_key(path, "alice", KeyLimits()).encode())
    others = (b"", b"kaveri-", b"\xff\x00", b"kaveri-" + b"A" * 43, b"a" * 100_000)
    assert [KeysFile(path).find(secret) for secret in (*others, digest, digest.hex().encode())] == [None] * 7


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
    await _settle(keys)
    assert keys.find(bob) is not None
    good = _text(path)
    with structlog.testing.capture_logs() as logged:
        _rename_over(path, good + "[broken")
        for _ in range(5):
            await keys.look()
        assert _refused() == 1
        os.unlink(path)
        await _settle(keys)
    assert [line["event"] for line in logged] == ["keys_file_refused", "keys_file_refused"], "once for each reason"
    assert keys.find(alice) is not None
    assert keys.find(bob) is not None
    _rename_over(path, good)
    with structlog.testing.capture_logs() as logged:
        await _settle(keys)
    assert [line["event"] for line in logged] == ["keys_file_read"], "it is in use again"
    _rename_over(path, good.partition("\n[bob]")[0])
    await _settle(keys)
    assert keys.find(bob) is None
    assert keys.find(alice) is not None
    assert _refused() == 0


def _truncate_and_write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _rename_over(path: str, text: str) -> None:
    Path(path + ".new").write_text(text)
    os.replace(path + ".new", path)


def _move_away_and_write(path: str, text: str) -> None:
    """Save as vim does with `backupcopy=no`."""
    os.rename(path, path + "~")
    Path(path).write_text(text)
    os.unlink(path + "~")


def _swap_link(path: str, text: str) -> None:
    target = f"{path}.{uuid.uuid4().hex}"
    Path(target).write_text(text)
    os.symlink(target, path + ".link")
    os.replace(path + ".link", path)


def _swap_data_folder(path: str, text: str) -> None:
    """Save as the kubelet does with a Secret: keys.toml -> ..data/keys.toml, ..data -> ..<time>."""
    folder = Path(path).parent
    version = folder / f"..{uuid.uuid4().hex}"
    version.mkdir()
    (version / "keys.toml").write_text(text)
    former = os.readlink(folder / "..data") if (folder / "..data").is_symlink() else None
    os.symlink(version.name, folder / "..data_tmp")
    os.replace(folder / "..data_tmp", folder / "..data")
    if former is None:
        os.symlink("..data/keys.toml", path + ".link")
        os.replace(path + ".link", path)
    else:
        shutil.rmtree(folder / former)


_SAVES = (_truncate_and_write, _rename_over, _move_away_and_write, _swap_link, _swap_data_folder)


@pytest.mark.parametrize("save", _SAVES)
async def test_every_way_to_save_is_noticed(path: str, save: Callable[[str, str], None]) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    only_alice = _text(path)
    bob = add_key(path, "bob", KeyLimits()).encode()
    both = _text(path)
    keys = KeysFile(path)
    for text in (only_alice, both, only_alice, both):
        save(path, text)
        await _settle(keys)
        assert keys.find(alice) is not None
        assert (keys.find(bob) is not None) == (text == both)


async def test_a_change_that_keeps_size_time_and_inode_is_noticed(path: str) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    before = os.stat(path)
    keys = KeysFile(path)
    _truncate_and_write(path, _text(path).replace(digest_of(alice).hex(), _DIGEST))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    await _settle(keys)
    assert keys.find(alice) is None
    assert keys.find(b"x") is not None


async def test_a_file_cut_off_behind_a_table_is_not_taken_while_it_is_written(path: str) -> None:
    alice, bob = (add_key(path, name, KeyLimits()).encode() for name in ("alice", "bob"))
    text = _text(path)
    keys = KeysFile(path)
    whole = text + key_table("carol", "c", KeyLimits())
    for end in (whole.index("\n[bob]"), whole.index("\n[carol]"), len(whole)):
        _truncate_and_write(path, whole[:end])
        await keys.look()
        assert keys.find(alice) is not None
        assert keys.find(bob) is not None
        assert keys.find(b"c") is None
    await keys.look()
    assert keys.find(b"c") is not None


@pytest.mark.parametrize("text", ["", "# nobody\n"])
async def test_a_file_that_has_lost_all_keys_changes_nothing_and_is_logged_once(path: str, text: str) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    keys = KeysFile(path)
    with structlog.testing.capture_logs() as logged:
        _truncate_and_write(path, text)
        for _ in range(5):
            await keys.look()
    assert [line["event"] for line in logged] == ["keys_file_refused"]
    assert "has lost all of its keys; to revoke the last one run `kaveri key revoke NAME`" in logged[0]["error"]
    assert keys.find(alice) is not None
    assert _refused() == 1


async def test_the_last_key_is_revoked_by_a_command(path: str) -> None:
    secrets = [add_key(path, name, KeyLimits(in_flight=2), is_admin=True).encode() for name in ("alice", "bob")]
    _truncate_and_write(path, "# of the team\n" + _text(path))
    keys = KeysFile(path)
    for name, left in (("alice", 1), ("bob", 0)):
        assert _run("key", "revoke", name, "--keys-file", path).returncode == 0
        await _settle(keys)
        assert keys.count == left
    assert [keys.find(secret) for secret in secrets] == [None, None]
    assert _text(path).startswith("# of the team\n"), "comments stay"
    assert _refused() == 0
    assert KeysFile(path).count == 0, "also at a start"
    with pytest.raises(ConfigError, match=r"NAME: is alice, and .* has no key of this name that is not revoked"):
        revoke_key(path, "alice")
    with pytest.raises(ConfigError, match=r"NAME: is alice, which .* has already"):
        add_key(path, "alice", KeyLimits())


@pytest.mark.parametrize(
    "text", [f'alice = {{sha256 = "{_DIGEST}"}}', f'[alice]\nsha256 = "{_DIGEST}"\nrevoked = false']
)
def test_a_table_that_the_command_cannot_change_is_for_its_owner(path: str, text: str) -> None:
    Path(path).write_text(text)
    with pytest.raises(ConfigError, match=r"NAME: is alice, whose table .* add `revoked = true` to it"):
        revoke_key(path, "alice")
    assert _text(path) == text


def test_a_file_that_is_missing_is_not_made_by_a_revocation(path: str) -> None:
    with pytest.raises(ConfigError, match="--keys-file: cannot read"):
        revoke_key(path, "alice")
    assert not os.path.exists(path)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, partial(os.symlink, "/dev/zero")])
async def test_what_is_no_regular_file_blocks_nobody_and_changes_nothing(path: str, put: Callable[[str], None]) -> None:
    alice = add_key(path, "alice", KeyLimits()).encode()
    keys = KeysFile(path)
    os.unlink(path)
    put(path)
    with structlog.testing.capture_logs() as logged, _unblocking(path):
        await asyncio.wait_for(_settle(keys), 30)
        await asyncio.wait_for(_settle(keys), 30)
        for open_file in (KeysFile, lambda path: add_key(path, "bob", KeyLimits()), lambda path: revoke_key(path, "b")):
            with pytest.raises(ConfigError, match=r"--keys-file: cannot (read|change) .*: not a regular file"):
                await asyncio.wait_for(asyncio.to_thread(open_file, path), 30)
    assert [line["event"] for line in logged] == ["keys_file_refused"]
    assert keys.find(alice) is not None


@contextlib.contextmanager
def _unblocking(path: str) -> Iterator[None]:
    """Unblock readers of a FIFO, so that a failing test ends."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def test_keys_that_are_added_together_are_all_there_and_readers_find_a_whole_file(path: str) -> None:
    add_key(path, "first", KeyLimits())
    command = (
        "import sys; from kaveri.security.keys_file import add_key; from kaveri.security.api_keys import KeyLimits\n"
    )
    command += "for number in range(20): add_key(sys.argv[1], f'{sys.argv[2]}-{number}', KeyLimits())"
    adding = [subprocess.Popen([sys.executable, "-c", command, path, f"k{number}"]) for number in range(4)]
    counts = [1]
    while any(process.poll() is None for process in adding):
        counts.append(KeysFile(path).count)
    assert [process.returncode for process in adding] == [0] * 4
    assert counts == sorted(counts)
    assert KeysFile(path).count == 81
    assert os.listdir(os.path.dirname(path)) == ["keys.toml"]


def test_the_command_keeps_a_links_target_and_the_files_mode(path: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target.toml")
    add_key(target, "alice", KeyLimits())
    os.chmod(target, 0o640)
    os.symlink("target.toml", path)
    add_key(path, "bob", KeyLimits())
    assert os.path.islink(path)
    assert KeysFile(target).count == 2
    assert stat.S_IMODE(os.stat(target).st_mode) == 0o640


async def _settle(keys: KeysFile) -> None:
    for _ in range(2):
        await keys.look()


def _refused() -> float | None:
    return REGISTRY.get_sample_value("kaveri_keys_file_refused")


def _text(path: str) -> str:
    return Path(path).read_text()


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
