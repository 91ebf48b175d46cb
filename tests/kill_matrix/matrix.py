"""Runs the kill matrix: a cluster under load whose processes die, hang and are cut off, again and again."""

import asyncio
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kaveri import AsyncClient, KaveriError
from kaveri.cli.flip import flip_instance
from kaveri.domain.view import Phase
from kaveri.engine.stepwise.fake import FakeModel
from kaveri.local.config import StackConfig
from kaveri.local.process import ChildProcess
from kaveri.local.stack import LocalStack
from kaveri.models import KAVERI_TINY
from tests.kill_matrix.cluster import LOGPROB_TOLERANCE, Rest, count_events, stack_settings
from tests.kill_matrix.links import CLIENT, REDIS, Links, family_of
from tests.kill_matrix.load import AskedRequest, MatrixLoad
from tests.kill_matrix.plan import Aim, DrawnFault, HitKind, MatrixQuestion, draw_fault, draw_questions
from tests.support.local_cluster import LocalCluster
from tests.support.redis_fixture import free_port
from tests.support.thinking_model import write_thinking_model

_CUTS = (HitKind.CUT_OFF, HitKind.LINK_CUT)
_PHASE_WITHIN_S = 1.0
"""A fault happens anyway if no request reaches its phase within this time."""
_READY_WITHIN_S = 180.0
_SLOT_S = 2.5
"""A fault lets the next one begin after this time, even if its process is not back."""
_ENDED_WITHIN_S = 60.0
"""Requests end within this time once no fault is active."""
_DRAIN_GRACE_S = 20.0
_LEARNED_WITHIN_S = 300.0
_ROUTER_PORTS = (12_000, 30_000)
_QUESTION_COUNT = 40
_LARGEST_TOKEN = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixOptions:
    engine: str = "fake"
    pairs: bool = False
    """Keep prompts where they are computed, in the pools, with the copies of their requests."""
    faults: int = 100
    seed: int = 0
    kinds: tuple[HitKind, ...] = (HitKind.KILLED, HitKind.FROZEN)
    clients: int = 8
    together: int = 3
    lease_ttl_s: float = 1.0
    keep_logs: bool = False
    rest_every: int = 100


@dataclass(slots=True)
class MatrixAccount:
    faults: Counter[str] = field(default_factory=Counter)
    """By "kind role", "kind phase" and "kind aim"."""
    count: int = 0
    rests: int = 0
    violations: list[str] = field(default_factory=list)


class KillMatrix:
    def __init__(
        self, options: MatrixOptions, cluster: LocalCluster, load: MatrixLoad, rest: Rest, links: Links | None
    ):
        self.account = MatrixAccount()
        self._options = options
        self._cluster = cluster
        self._load = load
        self._rest = rest
        self._links = links
        self._rng = random.Random(f"faults {options.seed}")
        self._hit: set[str] = set()
        self._slots = asyncio.Semaphore(options.together)
        self._slots_taken: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaver: ChildProcess | None = None

    async def run(self) -> None:
        options = self._options
        self._start_leaver()
        try:
            while self.account.count < options.faults:
                if not await self._next_fault():
                    continue
                is_last = self.account.count == options.faults
                if is_last or self.account.count % options.rest_every == 0:
                    await self._look_at_rest()
                    if not is_last:
                        self._start_leaver()
                        self._load.go_on()
        finally:
            tasks = [*self._tasks, *self._slots_taken]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_leaver()

    async def _next_fault(self) -> bool:
        """Cause a fault. False if every process of its role is hit already."""
        fault = draw_fault(self._rng, self._options.kinds)
        await self._slots.acquire()
        asked = await self._load.reaches(fault.phase, _PHASE_WITHIN_S)
        self._note_deaths()
        await asyncio.sleep(fault.after_s)
        target = self._target(fault, asked)
        if target is None:
            self._slots.release()
            return False
        self.account.count += 1
        for part in (fault.role, fault.phase, fault.aim):
            self.account.faults[f"{fault.kind}: {part}"] += 1
        say(f"{self.account.count} {target} {fault.kind} for {fault.lasts_s:.1f} s, phase {fault.phase}")
        task = self._spawn(target, self._act(fault, target))
        slot = asyncio.create_task(self._free_slot(task, fault.lasts_s + _SLOT_S))
        self._slots_taken.add(slot)
        slot.add_done_callback(self._slots_taken.discard)
        return True

    def _spawn(self, target: str, happening: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._happen(target, happening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _happen(self, target: str, happening: Coroutine[Any, Any, None]) -> None:
        self._hit.add(target)
        try:
            await happening
        except Exception as error:
            self.account.violations.append(f"{target}: {error!r}")
        finally:
            self._hit.discard(target)

    async def _free_slot(self, task: asyncio.Task[None], after_s: float) -> None:
        await asyncio.wait({task}, timeout=after_s)
        self._slots.release()

    def _target(self, fault: DrawnFault, asked: AskedRequest | None) -> str | None:
        names = [name for name in self._names(fault.role) if name not in self._hit]
        if asked is not None and fault.aim is not Aim.ANY:
            owner = asked.owner
            aimed = owner.holder_instance_id if fault.aim is Aim.HOLDER else owner.decode_instance_id
            if fault.role == "prefill":
                aimed = owner.prefill_instance_id
            if aimed in names:
                return aimed
        return names[int(fault.choice * len(names))] if names else None

    def _names(self, role: str) -> list[str]:
        if role in (REDIS, CLIENT):
            return [role]
        return [name for name in self._cluster.stack.instance_ids if name.rpartition("-")[0] == role]

    async def _act(self, fault: DrawnFault, target: str) -> None:
        if target == CLIENT:
            await self._end_leaver()
            await asyncio.sleep(fault.lasts_s)
            self._start_leaver()
            return
        match fault.kind:
            case HitKind.KILLED | HitKind.DRAINED:
                await self._restart(target, fault.lasts_s, drains=fault.kind is HitKind.DRAINED)
            case HitKind.FROZEN:
                frozen = family_of(self._cluster.stack.process(target).pid)
                try:
                    for process in frozen:
                        process.suspend()
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    for process in frozen:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.resume()
            case HitKind.CUT_OFF | HitKind.LINK_CUT:
                await self._cut(fault, target)
            case HitKind.FLIPPED:
                own, other = (Phase.PREFILL, Phase.DECODE) if fault.role == "prefill" else (Phase.DECODE, Phase.PREFILL)
                await self._flip(target, other)
                await asyncio.sleep(fault.lasts_s)
                await self._flip(target, own)

    async def _flip(self, target: str, phase: Phase) -> None:
        # Refused without a leader, for the last instance of a phase, and while no router answers.
        with contextlib.suppress(KaveriError):
            await flip_instance(target, (phase,), ",".join(self._cluster.stack.targets))
            self.account.faults[f"flipped: to {phase}"] += 1

    async def _restart(self, target: str, down_s: float, *, drains: bool) -> None:
        stack = self._cluster.stack
        if drains:
            status = await stack.process(target).stop(stack.config.supervision.drain_timeout_s + _DRAIN_GRACE_S)
            if status:
                self.account.violations.append(f"{target} ended its drain with status {status}")
        else:
            await stack.process(target).kill()
        await asyncio.sleep(down_s)
        await stack.restart(target)
        if target != REDIS:
            await self._is_back(target)

    async def _is_back(self, name: str) -> None:
        stack = self._cluster.stack
        async with asyncio.timeout(_READY_WITHIN_S):
            while not stack._is_ready(name, stack.view()):
                child = stack.process(name)
                assert child.exit_status is None, f"ended with {child.exit_status} while starting"
                await stack.wait_for_change(0.1)

    async def _cut(self, fault: DrawnFault, target: str) -> None:
        assert self._links is not None, "there are no links to cut"
        others = [name for name in (*self._cluster.stack.instance_ids, REDIS, CLIENT) if name != target]
        if target == REDIS:
            others.remove(CLIENT)
        if fault.kind is HitKind.LINK_CUT:
            others = [others[int(fault.choice * len(others))]]
        self._links.cut(target, others)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._links.heal(target, others)

    def _note_deaths(self) -> None:
        for name in (*self._cluster.stack.instance_ids, REDIS):
            process = self._cluster.stack.process(name)
            if process.exit_status is not None and name not in self._hit:
                said = " ".join(process.last_lines(2))[-1000:]
                self.account.violations.append(f"{name} ended by itself, status {process.exit_status}: {said}")
                self._hit.add(name)
                self._spawn(name, self._restart(name, 0.0, drains=False))

    async def _look_at_rest(self) -> None:
        await asyncio.gather(*self._tasks)
        await self._end_leaver()
        self.account.violations += await self._load.pause(_ENDED_WITHIN_S)
        self._note_deaths()
        await asyncio.gather(*self._tasks)
        self.account.violations += await self._rest.problems()
        self.account.violations += self._load.answers.failed[:]
        self._load.answers.failed.clear()
        self.account.rests += 1
        say(f"at rest after {self.account.count} faults: {len(self.account.violations)} violations")

    def _start_leaver(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.kill_matrix.leaver",
            str(self._options.seed),
            *self._cluster.stack.targets,
        ]
        log = self._cluster.stack.log_dir / "client.log"
        self._leaver = ChildProcess.start(CLIENT, command, log, dict(os.environ))

    async def _end_leaver(self) -> None:
        if self._leaver is not None and self._leaver.exit_status is None:
            await self._leaver.kill()
        self._leaver = None


def say(line: str) -> None:
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


async def run_matrix(options: MatrixOptions) -> dict[str, Any]:
    """Run a cluster, its load and all faults. Returns the account; its "violations" are empty if all was well."""
    over_links = any(kind in _CUTS for kind in options.kinds)
    metrics_port = free_port()
    settings = stack_settings(options.engine, metrics_port, over_links=over_links, pairs=options.pairs)
    settings["lease_ttl_s"] = options.lease_ttl_s
    # Below those that the kernel gives to others while a router is away.
    settings["port"] = random.Random().randrange(*_ROUTER_PORTS)
    chats = options.engine != "fake"
    rng = random.Random(f"questions {options.seed}")
    questions = draw_questions(rng, _QUESTION_COUNT, _LARGEST_TOKEN, chats=chats)
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        if chats:
            model = write_thinking_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            # The name that the predictor was made for.
            settings |= {"model": model, "served_model_name": KAVERI_TINY}
        links = None
        if over_links:
            links = Links(tuple(StackConfig.of(**settings).roles))
            await links.open()
            stack.push_async_callback(links.close)
            stack.enter_context(links.between_processes())
        cluster = await stack.enter_async_context(_run_cluster(links, settings))
        client = await stack.enter_async_context(AsyncClient(cluster.stack.targets))
        load = MatrixLoad(client, questions, options.seed, LOGPROB_TOLERANCE[options.engine])
        stack.push_async_callback(load.stop)
        await _learn(load, questions, options.engine)
        rest = Rest(cluster, metrics_port)
        await _warm_up(load, rest, options.clients)
        matrix = KillMatrix(options, cluster, load, rest, links)
        await matrix.run()
        account = _summary(options, matrix.account, load, time.monotonic() - began_s) | count_events(cluster)
        folder = cluster.stack.log_dir
        if account["violations"] or options.keep_logs:
            account["logs"] = _keep_logs(folder)
    if folder.exists():
        account["violations"].append(f"{folder} is left")
    return account


@contextlib.asynccontextmanager
async def _run_cluster(links: Links | None, settings: dict[str, Any]) -> AsyncIterator[LocalCluster]:
    stack = LocalStack(StackConfig.of(restart=False, drain_timeout_s=15.0, **settings), report=say)
    if links is not None:
        links.follow(stack.pids)
    async with stack:
        yield LocalCluster(stack)


async def _learn(load: MatrixLoad, questions: Sequence[MatrixQuestion], engine: str) -> None:
    answers = await load.learn()
    if engine != "fake":
        return
    for question, answer in zip(questions, answers, strict=True):
        made_up = tuple(FakeModel().answer(question.prompt, 0, len(answer.token_ids)))
        # Rules change what the model would draw.
        assert question.has_rules or answer.token_ids == made_up, "the undisturbed answers are wrong"


async def _warm_up(load: MatrixLoad, rest: Rest, clients: int) -> None:
    """Run as many requests at once as later, so that processes reach their usual resource use."""
    load.start(clients)
    async with asyncio.timeout(_LEARNED_WITHIN_S):
        while load.answers.exact < 3 * clients and not load.answers.failed:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    hanging = await load.pause(_ENDED_WITHIN_S)
    problems = [*hanging, *load.answers.failed, *await rest.problems()]
    assert not problems, f"before the first fault: {problems}"
    rest.remember()
    load.go_on()


def _keep_logs(folder: Path) -> str:
    kept = Path(tempfile.mkdtemp(prefix="kill-matrix-logs-"))
    for path in folder.glob("*.log"):
        shutil.copy(path, kept)
    return str(kept)


def _summary(options: MatrixOptions, account: MatrixAccount, load: MatrixLoad, seconds: float) -> dict[str, Any]:
    answers = load.answers
    return {
        "engine": options.engine,
        "pairs": options.pairs,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "faults": account.count,
        "faults_by": dict(sorted(account.faults.items())),
        "rests": account.rests,
        "requests_exact": answers.exact,
        "sendings_refused": answers.refused,
        "longest_pauses": answers.longest,
        "pause_s_p50": _quantile(answers.pauses_s, 50),
        "pause_s_p99": _quantile(answers.pauses_s, 99),
        "requests_reattached": answers.reattached,
        "requests_resumed": answers.resumed,
        "requests_placed_again": answers.placed_again,
        "recomputed_tokens": answers.recomputed_tokens,
        "violations": account.violations,
    }


def _quantile(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1], 3) if len(values) > 1 else 0.0
