"""Prints the figures of the tree's structure: `make figures`. With --json PATH they are written as JSON, too."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from tests.figures import sizes
from tests.figures.passage import joined, trace_request


def collect() -> dict[str, Any]:
    """Return all figures: sizes from the files, and counts from one traced request."""
    lines = sizes.product_lines()
    attributes = sorted(sizes.attribute_counts().values())
    bodies = sorted(sizes.body_lines().values())
    of_files = sizes.file_lines()
    circles = sizes.circles()
    rpcs = sizes.instance_rpcs()
    passages = asyncio.run(trace_request())
    return {
        "one request": {name: passage.counts for name, passage in passages.items()}
        | {"all processes": joined(passages.values()).counts},
        "product lines": sum(lines.values()),
        "by room": lines,
        "test lines": sizes.test_lines(),
        "RPCs between services": len(rpcs),
        "their names": rpcs,
        "lines per file": {"p50": sizes.percentile(of_files, 0.5), "p95": sizes.percentile(of_files, 0.95)},
        "attributes per class": {"p95": sizes.percentile(attributes, 0.95), "max": attributes[-1]},
        "lines per body": {"p95": sizes.percentile(bodies, 0.95), "max": bodies[-1]},
        "circles": {"files": list(circles.files), "rooms": list(circles.rooms)},
        "words": {name: sizes.words(name) for name in ("README.md", "docs/ARCHITECTURE.md", "docs/operations.md")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file to write them to")
    arguments = parser.parse_args()
    figures = collect()
    for name, value in figures.items():
        print(f"{name}: {value}" if not isinstance(value, dict) else f"{name}:")
        for key, part in value.items() if isinstance(value, dict) else ():
            print(f"  {key}: {part}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
