"""Counts stilted words in prose: docstrings, comments, messages, Markdown and the comments of protos.

    python scripts/plain_words.py                 one line per room: words, stilted words, stilted words per 1,000
    python scripts/plain_words.py --list PATH...  every match as FILE:LINE
    python scripts/plain_words.py --limit 0.5     exits with 1 when the whole tree has more per 1,000 words

It reads the files that git tracks. It does not judge grammar: a low count is necessary for plain English, not enough.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STILTED = re.compile(
    r"\b("
    r"whoever|whomever|whom|nobody|somebody|anew|affairs?|whence|thence|whereupon|wherein|therein|thereof|hitherto|lest"
    r"|(?:is|are|was|were|be|been|being|gets) told(?! apart)|of no account|for want of"
    r"|what (?:became|becomes|has become) of|as many as|by no more than|(?:be|is|are|was|were|been) had"
    r"|all the same|for ever|but for|in place of"
    r"|at the (?:most|least)|those who|he who|that which|as it were|by and by|ever so|none the less|the like"
    r")\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_SKIPPED = (
    "kaveri/v1/",
    "benchmarks/results/",
    "training/",
    "kaveri/models/",
    "scripts/plain_words.py",
    "CHANGELOG.md",
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each piece of prose in a file."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from _python_prose(text)
    elif path.suffix == ".proto":
        for number, line in enumerate(text.splitlines(), 1):
            if "//" in line:
                yield number, line.split("//", 1)[1]
    elif path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield number, re.sub(r"`[^`]*`", "", line)


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        # A string without a space is a name or a key.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield from enumerate(node.value.splitlines(), node.lineno)


def room(name: str) -> str:
    """The folder that a file is counted in: two levels for the library and the services."""
    parts = Path(name).parts
    return (
        "/".join(parts[:2])
        if parts[0] in ("kaveri", "services", "tests", "benchmarks") and len(parts) > 2
        else parts[0]
    )


def main() -> int:
    """Prints the counts. Returns 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or folders; without any: the whole tree")
    parser.add_argument("--list", action="store_true", help="print every match")
    parser.add_argument("--limit", type=float, help="most stilted words per 1,000")
    given = parser.parse_args()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", *given.paths], check=True, cwd=ROOT, capture_output=True, text=True
    )
    words: dict[str, int] = defaultdict(int)
    found: dict[str, int] = defaultdict(int)
    for name in sorted(filter(None, tracked.stdout.split("\0"))):
        if name.startswith(_SKIPPED) or not (ROOT / name).is_file():
            continue
        for number, text in prose(ROOT / name):
            words[room(name)] += len(_WORD.findall(text))
            for match in STILTED.finditer(text):
                found[room(name)] += 1
                if given.list:
                    print(f"{name}:{number}: {match[0]}: {text.strip()}")
    for key in sorted(words):
        _show(key, words[key], found[key])
    _show("all", sum(words.values()), sum(found.values()))
    rate = _rate(sum(words.values()), sum(found.values()))
    return 1 if given.limit is not None and rate > given.limit else 0


def _show(name: str, words: int, found: int) -> None:
    print(f"{name:24s} {words:8d} words {found:5d} stilted {_rate(words, found):6.2f} per 1,000")


def _rate(words: int, found: int) -> float:
    return 1000 * found / max(1, words)


if __name__ == "__main__":
    sys.exit(main())
