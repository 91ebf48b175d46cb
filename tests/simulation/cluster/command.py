"""The command line of the simulation: one seed with its plan and trace, or many seeds and an account of them."""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kaveri.text.tokenizer import ModelTokenizer

_PHASES = ("load", "recovery", "probes", "rest")
_PROGRESS_EVERY = 250
"""So often the account is written, and a line about it."""


@dataclass(slots=True)
class ScheduleAccount:
    """What many schedules came to."""

    first_seed: int
    schedules: int = 0
    violations: dict[int, list[str]] = field(default_factory=dict)
    """By seed."""
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    requests: int = 0
    hashes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Small enough to be kept."""
        shown = {name.removeprefix("fault:"): n for name, n in sorted(self.counts.items()) if name.startswith("fault:")}
        return {
            "first_seed": self.first_seed,
            "schedules": self.schedules,
            "violations": {str(seed): found for seed, found in sorted(self.violations.items())},
            "faults": shown,
            "rows": {n.removeprefix("row:"): c for n, c in sorted(self.counts.items()) if n.startswith("row:")},
            "reached_phase": {phase: self.counts[f"phase:{phase}"] for phase in _PHASES},
            "requests": self.requests,
            "outcomes": {
                n.removeprefix("outcome:"): c for n, c in sorted(self.counts.items()) if n.startswith("outcome:")
            },
            "virtual_s": round(self.virtual_s),
            "schedules_per_cpu_s": round(self.schedules / max(self.cpu_s, 1e-9), 2),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when there was a violation."""
    options = _parser().parse_args(arguments)
    if "torch" not in sys.modules:
        # Nothing here computes with it, and transformers would import it.
        cast(dict[str, ModuleType | None], sys.modules)["torch"] = None
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if options.count is None:
        return _replay(options.seed, options.trace, options.faults, options.plant)
    return _run_many(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cluster", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print what happened, line by line")
    parser.add_argument("--count", type=int, help="run so many seeds, and print an account")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--no-faults", dest="faults", action="store_false", help="leave the faults of the plans out")
    parser.add_argument("--planted", "--plant", dest="plant", help="switch a planted bug on: see docs/simulation.md")
    parser.add_argument("--account", help="file to write the account to, as JSON, now and then and at the end")
    parser.add_argument("--stop-after", type=int, default=20, help="seeds with violations after which to stop")
    parser.add_argument("--hashes", action="store_true", help="print the hash of every trace")
    return parser


def _replay(seed: int, trace: bool, faults: bool, plant: str | None) -> int:
    from tests.simulation.cluster.draw import draw_plan
    from tests.simulation.cluster.schedule import run_schedule

    plan = draw_plan(seed, faults=faults)
    print(plan)
    with _planted(plant):
        result = run_schedule(plan, _tokenizer(), lines=trace)
    for line in result.lines:
        print(line)
    print(f"{result.virtual_s:.3f} virtual seconds, {result.callbacks} callbacks, trace {result.hash}")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    return 1 if result.violations else 0


def _run_many(options: argparse.Namespace) -> int:
    account = ScheduleAccount(options.seed)
    started_s = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    for seed, one in _results(seeds, options):
        account.schedules += 1
        account.counts.update(one["counts"])
        account.virtual_s += one["virtual_s"]
        account.cpu_s += one["cpu_s"]
        account.requests += one["requests"]
        if options.hashes:
            print(seed, one["hash"])
        if one["violations"]:
            account.violations[seed] = one["violations"]
            print(f"seed {seed}: {one['violations'][0]}", flush=True)
            if len(account.violations) >= options.stop_after:
                break
        if account.schedules % _PROGRESS_EVERY == 0:
            print(f"{account.schedules} schedules, {len(account.violations)} with violations", file=sys.stderr)
            _write(account, options.account)
    _write(account, options.account)
    print(json.dumps(account.to_json()))
    rate = account.schedules / (time.monotonic() - started_s)
    print(f"{account.schedules} schedules, {len(account.violations)} with violations, {rate:.1f} a second")
    return 1 if account.violations else 0


def _write(account: ScheduleAccount, path: str | None) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(account.to_json(), file, indent=1)
            file.write("\n")


def _results(seeds: Sequence[int], options: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any]]]:
    _Shared.settings = _CommandSettings(options.faults, options.plant, _tokenizer())
    gc.collect()
    gc.freeze()
    if options.jobs == 1:
        yield from map(_one, seeds)
        return
    # Forked: what was imported and loaded is shared.
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        yield from pool.imap(_one, seeds, chunksize=4)


@dataclass(frozen=True, slots=True)
class _CommandSettings:
    faults: bool
    plant: str | None
    tokenizer: "ModelTokenizer"


class _Shared:
    """What forked processes find."""

    settings: _CommandSettings | None = None


def _one(seed: int) -> tuple[int, dict[str, Any]]:
    from tests.simulation.cluster.draw import draw_plan
    from tests.simulation.cluster.schedule import run_schedule

    settings = _Shared.settings
    assert settings is not None
    started_s = time.process_time()
    with _planted(settings.plant):
        result = run_schedule(draw_plan(seed, faults=settings.faults), settings.tokenizer)
    kept = {name: n for name, n in result.counts.items() if ":" in name}
    return seed, {
        "violations": result.violations,
        "hash": result.hash,
        "virtual_s": result.virtual_s,
        "cpu_s": time.process_time() - started_s,
        "requests": len(result.plan.requests),
        "counts": kept,
    }


def _planted(name: str | None) -> contextlib.AbstractContextManager[None]:
    if name is None:
        return contextlib.nullcontext()
    from tests.simulation.cluster.planting import PLANTED

    # They import every service.
    for module in ("", "_blame", "_chats", "_lives", "_owners", "_replicas", "_terms"):
        importlib.import_module(f"tests.simulation.cluster.planted{module}")
    return PLANTED[name].apply()


def _tokenizer() -> "ModelTokenizer":
    from tests.simulation.cluster.schedule import simulated_tokenizer

    return simulated_tokenizer()
