"""The cluster of the kill matrix, and the check that nothing is left in it at rest."""

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kaveri.domain.view import ClusterView
from kaveri.models import KAVERI_TINY, bundled_predictor
from tests.support.local_cluster import LocalCluster
from tests.support.metrics_pages import read_page

ORPHAN_GRACE_S = 3.0
_STEP_S = "0.02"
_REST_S = ORPHAN_GRACE_S + 12.0
"""Orphans and kept answers end after their grace; the rest is for heartbeats and a busy machine."""
# Pools are so small that batches of unlike length are levelled (kaveri/policy/balance.py).
ENGINES: dict[str, dict[str, Any]] = {
    "fake": {
        "engine": "fake",
        "kv_cache_memory": "1MiB",
        "prefill_flags": ("--fake-step-s", _STEP_S, "--chunk-tokens", "128"),
        "decode_flags": ("--fake-step-s", _STEP_S),
    },
    # In bfloat16 near ties depend on who else is in the batch.
    "kaveri-tiny": {"engine": "transformers", "dtype": "float32", "kv_cache_memory": "12MiB"},
    "vllm": {"engine": "vllm", "dtype": "float32", "kv_cache_memory": "12MiB", "start_timeout_s": 900.0},
}
LOGPROB_TOLERANCE = {"fake": 0.0, "kaveri-tiny": 1e-3, "vllm": 1e-3}
_EMPTY = {
    "router": ("kaveri_router_in_flight_requests", "kaveri_router_unread_answers", "kaveri_router_waiting_requests"),
    "prefill": ("kaveri_prefill_orphans", "kaveri_prefill_queued_tokens", "kaveri_kv_push_queued_bytes"),
    "decode": (
        "kaveri_decode_orphans",
        "kaveri_decode_kept_answers",
        "kaveri_decode_line_requests",
        "kaveri_replicas_held",
        "kaveri_replicas_owned",
        "kaveri_kv_landing_blocks",
        'kaveri_kv_blocks{state="held"}',
    ),
}
"""Metrics that are 0 at rest, by role; series with other labels are summed."""
_THREAD_SLACK = 28
"""Max additional threads of a process. Executors start threads when they have work. An instance that flips has up to
five for each of four peers, which push prompts and copies in both directions."""
_DESCRIPTOR_SLACK = 40
_MEMORY_SLACK_BYTES = 160 * 2**20
"""Max additional memory of a process. An instance that flips allocates the buffers of both phases: up to 120 MiB were
measured over 140 flips, and 82 MiB at a prefill instance with kaveri-tiny without flips."""
_ERROR = re.compile(r'"level": ?"(?:error|critical)"|^Traceback|^\w*Error\b|SIGSEGV|Fatal')


def stack_settings(engine: str, metrics_port: int, *, over_links: bool, pairs: bool = False) -> dict[str, Any]:
    """pairs: keep prompts where they are computed, in the pools, with the copies of their requests."""
    settings: dict[str, Any] = {
        "router_count": 2,
        "prefill_count": 2,
        "decode_count": 3,
        "predictor": bundled_predictor(KAVERI_TINY) or "",
        "metrics_port": metrics_port,
        "start_timeout_s": 300.0,
        "replication": "spread",
        "replica_memory": "32MiB",
        "replica_min_tokens": "16",
        "orphan_grace_s": str(ORPHAN_GRACE_S),
        # A call that a broken link delivers late leaves a reservation, whose abort was not delivered, until it expires.
        "reservation_ttl_s": "8",
    }
    if pairs:
        settings |= {"replication": "pair", "replica_place": "pool"}
    if over_links:
        settings["kv_transports"] = "tcp"
    return settings | ENGINES[engine]


@dataclass(slots=True)
class Rest:
    cluster: LocalCluster
    metrics_port: int
    new: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Most threads, descriptors and resident bytes of a process after the first requests, by role."""
    _log_offsets: dict[str, int] = field(default_factory=dict)

    def remember(self) -> None:
        for name, found in self._held().items():
            before = self.new.get(_role(name), (0, 0, 0))
            self.new[_role(name)] = tuple(map(max, before, found))  # type: ignore[assignment]

    async def problems(self) -> list[str]:
        """Wait until nothing is left of any request. Returns one line for each thing that is."""
        found: list[str] = []
        give_up_s = asyncio.get_running_loop().time() + _REST_S
        while asyncio.get_running_loop().time() < give_up_s:
            found = [*_not_free(self.cluster), *await self._not_empty(), *self._grown()]
            if not found:
                break
            await self.cluster.stack.wait_for_change(0.1)
        return [*found, *self.errors_logged()]

    def errors_logged(self) -> list[str]:
        found = []
        for name in self.cluster.stack.instance_ids:
            path = Path(self.cluster.stack.process(name).log_path)
            with path.open("rb") as log:
                log.seek(self._log_offsets.get(name, 0))
                text = log.read()
            self._log_offsets[name] = self._log_offsets.get(name, 0) + len(text)
            lines = text.decode(errors="replace").splitlines()
            found += [f"{name} logged {line[:600]}" for line in lines if _ERROR.search(line)][:3]
        return found

    async def _not_empty(self) -> list[str]:
        names = [name for name in self.cluster.stack.instance_ids if _role(name) in _EMPTY]
        texts = await asyncio.gather(*(asyncio.to_thread(self._scrape, name) for name in names))
        found = []
        for name, text in zip(names, texts, strict=True):
            for metric in _EMPTY[_role(name)]:
                start = (metric,) if "{" in metric else (f"{metric} ", f"{metric}{{")
                values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start)]
                if sum(values):
                    found.append(f"{name}: {metric} is {sum(values):g} at rest")
        return found

    def _scrape(self, name: str) -> str:
        port = self.metrics_port + self.cluster.stack.instance_ids.index(name)
        try:
            return read_page(f"127.0.0.1:{port}", timeout_s=5)
        except OSError as error:
            return f"kaveri_replicas_held unreadable_{type(error).__name__} 1"

    def _grown(self) -> list[str]:
        found = []
        for name, (threads, descriptors, resident) in self._held().items():
            most = self.new.get(_role(name))
            if most is None:
                continue
            for what, now, limit in (
                ("threads", threads, most[0] + _THREAD_SLACK),
                ("descriptors", descriptors, most[1] + _DESCRIPTOR_SLACK),
                ("bytes of memory", resident, most[2] + _MEMORY_SLACK_BYTES),
            ):
                if now > limit:
                    found.append(f"{name} has {now} {what}, allowed are {limit}")
        return found

    def _held(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for name, pid in self.cluster.pids().items():
            process = psutil.Process(pid)
            found[name] = (process.num_threads(), process.num_fds(), process.memory_info().rss)
        return found


def count_events(cluster: LocalCluster) -> dict[str, int]:
    counts = {"attempt_lost": 0, "owner_changed": 0, "request_reattached": 0, "request_resumed": 0}
    recomputed = 0
    for name in cluster.stack.instance_ids:
        for line in cluster.log_text(name).splitlines():
            event = next((event for event in counts if f'"{event}"' in line), None)
            if event is None:
                continue
            counts[event] += 1
            if event == "request_resumed":
                # A kill may have cut the line short.
                with contextlib.suppress(ValueError):
                    recomputed += int(json.loads(line)["recomputed_tokens"])
    return counts | {"recomputed_tokens_of_resumes": recomputed}


def _not_free(cluster: LocalCluster) -> list[str]:
    view: ClusterView = cluster.view()
    found = [f"{name} is not there" for name in cluster.stack.instance_ids if name not in view.instances]
    for name, status in view.instances.items():
        load = status.load
        if load.free_blocks != load.total_blocks:
            found.append(f"{name} has {load.free_blocks} of {load.total_blocks} blocks free")
        if load.running_requests or load.waiting_requests:
            found.append(f"{name} runs {load.running_requests} requests, and {load.waiting_requests} wait")
        if load.replica_free_bytes != load.replica_total_bytes:
            found.append(f"{name} has {load.replica_free_bytes} of {load.replica_total_bytes} bytes for copies free")
    return found


def _role(name: str) -> str:
    return name.rpartition("-")[0] or name
