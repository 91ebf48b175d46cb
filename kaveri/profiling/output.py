"""Checks before long work that its output file can be written."""

from pathlib import Path

from kaveri.errors import ConfigError


def check_output(flag: str, path: Path) -> None:
    """Raises ConfigError, naming the flag, when no file can be written there. Leaves an existing file unchanged."""
    if not path.parent.is_dir():
        raise ConfigError(flag, f"there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(flag, f"{path} is a folder; give a file in it")
    existed = path.exists()
    if existed and not path.is_file():
        return  # Opening a pipe would wait for its reader.
    try:
        # Try it: permissions alone do not tell, for example for root or on a read-only file system.
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise not_written(flag, path, error) from error


def not_written(flag: str, path: Path, error: OSError) -> ConfigError:
    """The error for a file that could not be written after all."""
    return ConfigError(flag, f"{path} cannot be written: {error.strerror or error}")
