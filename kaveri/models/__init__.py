"""Models bundled with Kaveri."""

from pathlib import Path

KAVERI_TINY = "kaveri-tiny"

_FOLDERS = {KAVERI_TINY: "kaveri_tiny"}


def resolve_model(name: str) -> str:
    """Return the folder of a bundled model; any other name (a path, a hub id) unchanged."""
    return str(Path(__file__).parent / _FOLDERS[name]) if name in _FOLDERS else name


def bundled_predictor(model: str) -> str | None:
    """Return the folder of a model's bundled length predictor; None if it has none."""
    folder = Path(resolve_model(model)) / "predictor"
    return str(folder) if model in _FOLDERS and (folder / "kaveri_predictor.json").is_file() else None
