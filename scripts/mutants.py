"""Scores the test suite with planted bugs: `make mutants`. tests/mutants/README.md says how to write one.

Each mutant is applied to a copy of the project, by itself. Its narrowest tests run first, its wider ones only when it
survived those. A mutant is killed when a test fails. One whose tests did not end is counted by itself: a loaded machine
does that too.
"""

import argparse
import collections
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
_LONGEST_TEST_S = 180
"""Of one test: longer than the waits within tests, which fail by themselves. Tests that take longer unmutated do not
belong into a mutant's list."""
_LONGEST_RUN_S = 600
_SURVIVED, _FAILED = 0, 1
"""pytest's exit codes; every other one means that the tests could not run."""
_TIMED_OUT = re.compile(r"Timeout \(>|\+ Timeout \+")
"""What pytest-timeout says."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug."""

    room: str
    mutant_id: str
    file: str
    find: str
    replace: str
    why: str
    tests: tuple[str, ...]
    wider: tuple[str, ...] = ()
    equivalent: str = ""

    def apply(self, root: Path) -> None:
        """Raises ValueError unless `find` stands exactly once in the file, and `replace` differs from it."""
        path = root / self.file
        source = path.read_text() if path.is_file() else ""
        if source.count(self.find) != 1:
            raise ValueError(
                f"{self.mutant_id}: `find` stands {source.count(self.find)} times in {self.file}, not once"
            )
        if self.find == self.replace:
            raise ValueError(f"{self.mutant_id}: `replace` equals `find`")
        _write_source(path, source.replace(self.find, self.replace).encode())


def load(lists: Path = LISTS) -> list[Mutant]:
    """All mutants, by room. Raises TypeError for an unknown or missing key."""
    mutants = []
    for path in sorted(lists.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            tests, wider = tuple(entry.pop("tests")), tuple(entry.pop("wider", ()))
            mutants.append(Mutant(room=path.stem, mutant_id=entry.pop("id"), tests=tests, wider=wider, **entry))
    return mutants


def score(mutants: Iterable[Mutant], outcomes: dict[str, str]) -> str:
    """A Markdown table of the rooms. Equivalent mutants do not count."""
    killed: collections.Counter[str] = collections.Counter()
    hung: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for mutant in mutants:
        if not mutant.equivalent and mutant.mutant_id in outcomes:
            total[mutant.room] += 1
            killed[mutant.room] += outcomes[mutant.mutant_id] == "killed"
            hung[mutant.room] += outcomes[mutant.mutant_id] == "hung"
    rows = ["| room | mutants | killed | hung | |", "| --- | ---: | ---: | ---: | ---: |"]
    rows += [
        f"| {room} | {total[room]} | {killed[room]} | {hung[room]} | {killed[room] / total[room]:.0%} |"
        for room in sorted(total)
    ]
    if total:
        share = f"{killed.total() / total.total():.0%}"
        rows.append(f"| all | {total.total()} | {killed.total()} | {hung.total()} | {share} |")
    return "\n".join(rows)


def main() -> int:
    """Exit status 1 when a mutant could not be tried."""
    arguments = _arguments()
    mutants = [
        mutant
        for mutant in load()
        if not mutant.equivalent
        and (not arguments.room or mutant.room in arguments.room)
        and (not arguments.only or mutant.mutant_id in arguments.only)
    ]
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in mutants:
        waiting.put(mutant)
    outcomes: dict[str, str] = {}

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="kaveri-mutants-") as folder:
            copy = _copy_project(Path(folder) / "project")
            while True:
                try:
                    mutant = waiting.get_nowait()
                except queue.Empty:
                    return
                started_s = time.monotonic()
                outcome, by = _try(mutant, copy)
                outcomes[mutant.mutant_id] = outcome
                seconds = time.monotonic() - started_s
                print(f"{outcome:9} {seconds:6.1f} s  {mutant.room}: {mutant.mutant_id}  {by}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(arguments.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for mutant in mutants:
        if outcomes.get(mutant.mutant_id) in ("survived", "hung"):
            print(f"\n{outcomes[mutant.mutant_id]}: {mutant.mutant_id} ({mutant.file})\n  {mutant.why}")
    print("\n" + score(mutants, outcomes))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
    return int(len(outcomes) < len(mutants) or "untried" in outcomes.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", action="append", help="only this list, for example services-prefill; may be repeated")
    parser.add_argument("--only", action="append", metavar="ID", help="only this mutant; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="mutants tried at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write each mutant's outcome as JSON")
    return parser.parse_args()


def _copy_project(target: Path) -> Path:
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for file in filter(None, files):
        if (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)
    return target


def _try(mutant: Mutant, copy: Path) -> tuple[str, str]:
    """The outcome, and the test that failed."""
    original = (ROOT / mutant.file).read_bytes()
    try:
        mutant.apply(copy)
        for tests in (mutant.tests, mutant.wider):
            if tests and (result := _run_tests(tests, copy))[0] != "survived":
                return result
        return "survived", ""
    except ValueError as error:
        print(error, file=sys.stderr)
        return "untried", ""
    finally:
        _write_source(copy / mutant.file, original)


def _write_source(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    # A mutant of the same size, written within the same second, would be taken for what was compiled.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def _run_tests(tests: Sequence[str], copy: Path) -> tuple[str, str]:
    environment = dict(
        os.environ,
        PYTHONPATH=str(copy),
        HYPOTHESIS_PROFILE="mutants",
        HYPOTHESIS_STORAGE_DIRECTORY=str(copy / ".hypothesis"),
    )
    # Fixtures are not limited: behind a failure they may take as long as the test.
    limits = (f"--timeout={_LONGEST_TEST_S}", "-o", "timeout_func_only=true")
    options = ("-x", "-q", "-p", "no:cacheprovider", *limits)
    command = (sys.executable, "-m", "pytest", *options, *tests)
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = process.communicate(timeout=_LONGEST_RUN_S)[0]
    except subprocess.TimeoutExpired:
        return "hung", ""
    finally:
        # The tests' own child processes, which a test that was cut short has left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == _SURVIVED:
        return "survived", ""
    if process.returncode == _FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return "hung" if _TIMED_OUT.search(output) else "killed", failed[1] if failed else ""
    print(output[-2000:], file=sys.stderr)
    return "untried", ""


if __name__ == "__main__":
    sys.exit(main())
