"""A benchmark's result as a JSON file: one row per line, numbers rounded to four significant digits."""

import json
from pathlib import Path
from typing import Any

_LISTED = ("ratios", "asked", "comparisons", "rows", "notes")
"""Keys whose entries stand on lines of their own."""


def read_result(path: Path) -> dict[str, Any]:
    """The result that `write_result` wrote."""
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Replaces `path`."""
    lines = [f" {json.dumps(key)}: {_value(key, value)}" for key, value in rounded(result).items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _value(key: str, value: Any) -> str:
    if key not in _LISTED or not value:
        return json.dumps(value)
    if isinstance(value, dict):
        entries = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
        return "{\n" + ",\n".join(entries) + "\n }"
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"


def rounded(value: Any) -> Any:
    """`value` with every float in it at four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return value
