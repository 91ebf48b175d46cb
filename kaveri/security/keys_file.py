"""The keys file of a running process: read at start, read again when it changes. For one event loop."""

import asyncio
import fcntl
import hmac
import os
from pathlib import Path

from kaveri.errors import ConfigError
from kaveri.security.api_keys import ApiKey, KeyLimits, digest_of, key_table, new_secret, parse_keys
from kaveri.telemetry.logs import get_logger

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 4 * 2**20
_Stamp = tuple[int, int, int]
"""Time of the last change, size and inode: one of them differs after a change."""


class KeysFile:
    """The keys that are good now."""

    def __init__(self, path: str) -> None:
        """Reads the file. Raises ConfigError."""
        self._path = path
        self._stamp, self._keys = _read(path)
        self._failure = ""
        """Why the file was not taken when it was last read; empty: it was."""

    @property
    def count(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    def find(self, secret: bytes) -> ApiKey | None:
        """The key with this secret; None: no such key.

        The time that it takes says nothing about good keys: what is looked up is a hash, in a dictionary whose order
        depends on a random number of this process, and the last comparison takes constant time.
        """
        digest = digest_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None

    async def follow(self) -> None:
        """Takes up changes within two seconds, until cancelled. A broken file changes nothing, and is logged once."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Reads the file again if it has changed."""
        try:
            # On a thread: its disk may be slow.
            found = await asyncio.to_thread(_read_if_changed, self._path, self._stamp if not self._failure else None)
        except ConfigError as error:
            if str(error) != self._failure:
                self._failure = str(error)
                get_logger().error("keys_file_refused", error=self._failure, effect="the former keys stay in use")
            return
        if found is not None:
            self._stamp, keys = found
            if keys != self._keys or self._failure:
                get_logger().info("keys_file_read", path=self._path, keys=len(keys))
            self._keys, self._failure = keys, ""


def add_key(path: str, name: str, limits: KeyLimits, is_admin: bool = False) -> str:
    """Adds a new key to the file, which is made for its owner only if there is none. Returns the key, which is kept
    nowhere. Raises ConfigError, also when the file is broken or has this name."""
    secret = new_secret()
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read().decode()
            if any(key.name == name for key in parse_keys(text, path)):
                raise ConfigError("NAME", f"is {name}, which {path} has already; remove that table first")
            table = key_table(name, secret, limits, is_admin)
            # One write, so that a gateway reads all of it or nothing.
            file.write(("\n" + table if text and not text.endswith("\n") else table).encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--keys-file", f"cannot add to {path}: {error}") from error
    return secret


def _read_if_changed(path: str, stamp: _Stamp | None) -> tuple[_Stamp, dict[bytes, ApiKey]] | None:
    try:
        if _stamp(os.stat(path)) == stamp:
            return None
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read(path)


def _read(path: str) -> tuple[_Stamp, dict[bytes, ApiKey]]:
    try:
        # Before it is read: a change in between is then seen at the next look.
        found = os.stat(path)
        if found.st_size > MAX_FILE_BYTES:
            raise ConfigError("--keys-file", f"{path} has {found.st_size} bytes; at most {MAX_FILE_BYTES} are read")
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    return _stamp(found), {key.digest: key for key in parse_keys(text, path)}


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError("--keys-file", f"cannot read {path}: {error}")
