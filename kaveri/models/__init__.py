"""Owns the models bundled with Kaveri: maps their names to the folders that hold their files."""

from pathlib import Path

KAVERI_TINY = "kaveri-tiny"

_FOLDERS = {KAVERI_TINY: "kaveri_tiny"}


def resolve_model(name: str) -> str:
    """The folder of a bundled model's files; any other name (a path, a hub id) comes back unchanged."""
    folder = _FOLDERS.get(name)
    if folder is None:
        return name
    return str(Path(__file__).parent / folder)


def bundled_predictor(model: str) -> str | None:
    """The folder of the length predictor that is bundled with a model; None when there is none."""
    folder = Path(resolve_model(model)) / "predictor"
    return str(folder) if model in _FOLDERS and (folder / "kaveri_predictor.json").is_file() else None
