"""Writes the table of HTTP parameters in docs/doors.md from the gateway's code.

Usage: python scripts/parameter_table.py [--check]. With --check nothing is written, and the status is 1 if the table
is old.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.gateway.fields import Accepts
from services.gateway.openapi import CHAT, COMPLETION, IGNORED_OF_CHAT
from services.gateway.parsed_request import HARMLESS_OF_CHAT, HARMLESS_OF_COMPLETIONS

DOC = Path(__file__).resolve().parents[1] / "docs" / "doors.md"
BEGIN, END = "<!-- parameters: scripts/parameter_table.py -->\n", "<!-- end of parameters -->"


def table() -> str:
    """Return the table in Markdown: a row for each parameter."""
    honoured = [set(each["properties"]) - set(IGNORED_OF_CHAT) for each in (COMPLETION, CHAT)]
    harmless = [HARMLESS_OF_COMPLETIONS, HARMLESS_OF_CHAT]
    names = sorted({*honoured[0], *honoured[1], *harmless[0], *harmless[1]})
    rows = [
        f"| `{name}` | {_cell(name, honoured[0], harmless[0])} | {_cell(name, honoured[1], harmless[1])} |"
        for name in names
    ]
    return "\n".join(["| parameter | completions | chat |", "| --- | --- | --- |", *rows]) + "\n"


def _cell(name: str, honoured: set[str], harmless: Mapping[str, Accepts]) -> str:
    if name in honoured:
        return "honoured"
    if name not in harmless:
        return "no such parameter"
    says = harmless[name].says
    return "refused" if not says else "taken, not used" if says == "any" else f"refused but for {says}"


def main() -> int:
    """Write or check the table."""
    text = DOC.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = f"{head}{BEGIN}{table()}{END}{tail}"
    if "--check" in sys.argv[1:]:
        return int(made != text)
    DOC.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
