"""Checks output files before long work, and saves figures."""

from pathlib import Path
from typing import TYPE_CHECKING

from kaveri.errors import ConfigError
from kaveri.extras import require_modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png", ".pdf")


def check_output(flag: str, path: Path) -> None:
    """Raise ConfigError, naming `flag`, if `path` cannot be written. Leaves an existing file unchanged."""
    if not path.parent.is_dir():
        raise ConfigError(flag, f"there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(flag, f"{path} is a folder; give a file in it")
    existed = path.exists()
    if existed and not path.is_file():
        return  # Opening a pipe would wait for its reader.
    try:
        # Try writing: permissions are no proof, for example for root or on a read-only file system.
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise not_written(flag, path, error) from error


def check_plot(path: Path) -> None:
    """Raise ConfigError, naming --plot, if save_figure() could not write there."""
    if path.suffix not in _FORMATS:
        raise ConfigError("--plot", f"is {path}; it must end in {', '.join(_FORMATS)}")
    check_output("--plot", path)
    require_modules("--plot", "predictor", "matplotlib")


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure in the format of the path's suffix; equal figures give equal bytes. Raises OSError."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def not_written(flag: str, path: Path, error: OSError) -> ConfigError:
    """Build the error for an output file whose writing failed."""
    return ConfigError(flag, f"{path} cannot be written: {error.strerror or error}")
