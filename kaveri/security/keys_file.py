"""The keys file of a running process, reread when its content changes. Not thread-safe: for one event loop."""

import asyncio
import hmac
from collections.abc import Callable

from prometheus_client import Gauge

from kaveri.errors import ConfigError
from kaveri.security.api_keys import ApiKey, KeyLimits, digest_of, key_table, new_secret, parse_keys, with_key_revoked
from kaveri.security.regular_file import locked, read_regular, replace
from kaveri.telemetry.logs import get_logger

LOOK_EVERY_S = 0.5
KEYS_FILE_REFUSED = Gauge(
    "kaveri_keys_file_refused", "1 while the keys file cannot be used and the former keys stay in use, else 0."
)


class KeysFile:
    """API keys from a file. Changes apply once two consecutive reads agree, because a partly written file may parse
    without its last keys. A file that cannot be read, does not parse or has lost all keys changes nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        text = _read(path)
        self._seen = self._settled = (text, "")
        """Last result of _try_read(), and last one that two consecutive reads agreed on."""
        self._keys = _by_digest(parse_keys(text, path))
        self._failure = ""
        """Reason why the file is rejected; empty if it is in use."""

    @property
    def count(self) -> int:
        return sum(not key.is_revoked for key in self._keys.values())

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the valid key with this secret, or None. Timing reveals nothing about valid keys: the lookup uses a
        digest in a dictionary ordered differently in each process, and the final comparison takes constant time."""
        digest = digest_of(secret)
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) and not key.is_revoked else None

    async def follow(self) -> None:
        """Apply changes of the file within two seconds, until cancelled. Logs an unusable file once."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Read the file once; apply its content if the previous read found the same."""
        # On a thread, since the disk may be slow.
        found = await asyncio.to_thread(_try_read, self._path)
        is_same, self._seen = found == self._seen, found
        if is_same and found != self._settled:
            self._settled = found
            text, failure = found
            try:
                if not failure:
                    await self._use(text)
            except ConfigError as error:
                failure = str(error)
            if failure:
                self._refuse(failure)

    async def _use(self, text: str) -> None:
        keys = _by_digest(await asyncio.to_thread(parse_keys, text, self._path))
        if self._keys and not keys:
            advice = "to revoke the last one run `kaveri key revoke NAME`"
            raise ConfigError("--keys-file", f"{self._path} has lost all of its keys; {advice}")
        self._keys, self._failure = keys, ""
        KEYS_FILE_REFUSED.set(0)
        get_logger().info("keys_file_read", path=self._path, keys=self.count)

    def _refuse(self, failure: str) -> None:
        KEYS_FILE_REFUSED.set(1)
        if failure != self._failure:
            self._failure = failure
            get_logger().error("keys_file_refused", error=failure, effect="the former keys stay in use")


def add_key(path: str, name: str, limits: KeyLimits, is_admin: bool = False) -> str:
    """Add a new key to the file and return it; only its digest is stored. A new file is readable by its owner only.
    Raises ConfigError, also when the file is invalid or has this name."""
    secret = new_secret()

    def add(text: str) -> str:
        if any(key.name == name for key in parse_keys(text, path)):
            raise ConfigError("NAME", f"is {name}, which {path} has already; remove that table first")
        line_end = "\n" if text and not text.endswith("\n") else ""
        return text + line_end + key_table(name, secret, limits, is_admin)

    _change(path, add)
    return secret


def revoke_key(path: str, name: str) -> None:
    """Mark a key as revoked. Raises ConfigError, also when the file is invalid or has no valid key of this name."""
    _read(path)  # Do not create a missing file.
    _change(path, lambda text: with_key_revoked(text, name, path))


def _change(path: str, change: Callable[[str], str]) -> None:
    try:
        with locked(path) as content:
            replace(path, change(content.decode()).encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--keys-file", f"cannot change {path}: {_reason(error)}") from error


def _read(path: str) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--keys-file", f"cannot read {path}: {_reason(error)}") from error


def _try_read(path: str) -> tuple[str, str]:
    """Return the file's text and an empty error, or an empty text and the error."""
    try:
        return _read(path), ""
    except ConfigError as error:
        return "", str(error)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _by_digest(keys: tuple[ApiKey, ...]) -> dict[bytes, ApiKey]:
    return {key.digest: key for key in keys}
