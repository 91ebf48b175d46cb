"""kaveri plugins: lists every transport, engine, tool parser and policy that a flag can name here."""

import json
from typing import Annotated

from kaveri.cli.options import option


def plugins(as_json: Annotated[bool, option("One JSON object per line.", "--json")] = False) -> None:
    """List transports, engines, tool parsers and policies: Kaveri's own, and those that installed packages register.

    Each package's module is imported, to find out whether it can be. Flags also take package.module:name.
    """
    from kaveri.engine.settings import ENGINES
    from kaveri.hosting.policy_settings import POLICY_POINTS
    from kaveri.kv.transports import TRANSPORTS
    from kaveri.parsers.answer import TOOL_PARSERS

    rows = [
        {"kind": point.kind, "name": found.name, "from": found.origin, "path": found.path, "fault": point.fault(found)}
        for point in (ENGINES, TRANSPORTS, TOOL_PARSERS, *POLICY_POINTS)
        for found in point.registrations()
    ]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    shown = [("kind", "name", "from", "state")]
    shown += [(row["kind"], row["name"], row["from"], " ".join(row["fault"].split()) or "ok") for row in rows]
    widths = [max(len(line[column]) for line in shown) for column in range(3)]
    for line in shown:
        print("  ".join([*(f"{text:{width}}" for text, width in zip(line, widths, strict=False)), line[3]]))
