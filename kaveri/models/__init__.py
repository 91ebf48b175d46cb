"""Owns the models bundled with Kaveri: maps their names to the folders that hold their files."""

from pathlib import Path

KAVERI_TINY = "kaveri-tiny"

_FOLDERS = {KAVERI_TINY: "kaveri_tiny"}
_PREDICTOR_FOLDER = "predictor"


def resolve_model(name: str) -> str:
    """The folder of a bundled model's files; any other name (a path, a hub id) comes back unchanged."""
    folder = _FOLDERS.get(name)
    if folder is None:
        return name
    return str(Path(__file__).parent / folder)


def resolve_predictor(name: str) -> str:
    """The folder of the length predictor made for a bundled model; any other name (a path) comes back unchanged."""
    return str(Path(resolve_model(name)) / _PREDICTOR_FOLDER) if name in _FOLDERS else name


def has_predictor(model: str) -> bool:
    """Whether a length predictor comes with a model: whether resolve_predictor(model) names one."""
    return model in _FOLDERS and (Path(resolve_predictor(model)) / "kaveri_predictor.json").is_file()
