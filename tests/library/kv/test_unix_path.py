"""The path of a Unix listener, which several processes may want at once."""

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from kaveri.errors import ConfigError
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.receiver import KvReceiver
from kaveri.kv.transfer.ticket import KvEndpoint
from kaveri.kv.transports import make_transports, unix_path
from kaveri.kv.transports.unix_path import UnixPath
from kaveri.testing.transport_peer import Recorder
from tests.library.kv.kv_stranger import LAYOUT


def listener(path: str) -> tuple[socket.socket, UnixPath]:
    listening = socket.socket(socket.AF_UNIX)
    try:
        return listening, UnixPath(listening, path, 4)
    except BaseException:
        listening.close()
        raise


def reaches(path: str, listening: socket.socket) -> bool:
    listening.settimeout(0.0)
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(BlockingIOError):
        connection.connect(path)
        listening.accept()[0].close()
        return True
    return False


@pytest.mark.parametrize("is_dead_there", [False, True])
def test_of_listeners_that_race_for_a_path_one_gets_it(tmp_path: Path, is_dead_there: bool) -> None:
    for number in range(20):
        path = str(tmp_path / f"{number}.sock")
        if is_dead_there:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
        start, got, refused = threading.Barrier(4), list[tuple[socket.socket, UnixPath]](), list[OSError]()

        def race(path: str = path, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                got.append(listener(path))  # noqa: B023 - joined below
            except OSError as error:
                refused.append(error)  # noqa: B023

        racing = [threading.Thread(target=race) for _ in range(4)]
        for thread in racing:
            thread.start()
        for thread in racing:
            thread.join()
        ((listening, held),) = got
        assert len(refused) == 3
        with listening:
            assert reaches(path, listening)
            held.remove()
        assert os.listdir(tmp_path) == []


def test_a_listener_leaves_the_path_of_its_successor(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    first, held_first = listener(path)
    os.unlink(path)
    second, held_second = listener(path)
    with first, second:
        held_first.remove()
        assert reaches(path, second)
        held_second.remove()
        held_second.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["a file", "a folder", "a link", "a live socket"])
def test_what_is_no_dead_socket_stays(tmp_path: Path, what: str) -> None:
    place = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as live:
        if what == "a file":
            place.write_text("kept")
        elif what == "a folder":
            place.mkdir()
        elif what == "a link":
            place.symlink_to("nowhere")
        else:
            live.bind(str(place))
            live.listen()
        before = place.lstat()
        with pytest.raises(ConfigError, match="Address already in use"):
            KvReceiver(
                KvPool(LAYOUT, 1),
                Recorder(),
                listen=[KvEndpoint("unix", str(place))],
                epoch=1,
                transports=make_transports(),
            )
        assert place.lstat().st_ino == before.st_ino
        assert os.listdir(tmp_path) == ["kv.sock"]


def test_a_path_that_nobody_could_connect_to_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / ("k" * 120))
    with pytest.raises(OSError, match="longer than 107"):
        listener(path)


def test_a_folder_that_stays_locked_is_named_and_keeps_no_listener_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_path, "_LOCK_WITHIN_S", 0.1)
    first, held = listener(str(tmp_path / "first.sock"))
    folder = os.open(tmp_path, os.O_RDONLY)
    with first:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="holds the folder's lock"):
            listener(str(tmp_path / "second.sock"))
        held.remove()
    os.close(folder)
    assert os.listdir(tmp_path) == []


def test_a_relative_path_is_taken_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listening, held = listener("kv.sock")
    with listening:
        assert reaches("kv.sock", listening)
        assert os.stat("kv.sock").st_mode & 0o777 == 0o600
        held.remove()
    assert os.listdir(tmp_path) == []
