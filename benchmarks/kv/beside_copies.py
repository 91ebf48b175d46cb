"""How much replication slows the pushes of prompts that share its link (10 Gbit/s, emulated).

Between two processes. One sends: prompts over one KvSender, and the blocks of running requests over another, as prefill
and decode instances on one machine do, whose links share its network port. The other takes prompts in a pool and copies
in a replica store. Full replication: 32 requests decode in steps of 25 ms, and each block is copied when its last token
would be drawn. Prompts are pushed one after the other, in turn alone and beside the copies.

With 64 KiB of KV a token, as of Llama-3-8B, copies take 7 % of the link. With 800 KiB, as of OPT-13B, they ask for 84 %
of it, and only a limit (`--replication-rate`) leaves prompts their speed: the copies then fall behind.
"""

import contextlib
import itertools
import multiprocessing
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.support.harness import Options, Report, run
from benchmarks.support.shared_port import SharedPortTransport
from kaveri.engine.copier_thread import Pace
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.replicas.host import HostReplicas
from kaveri.kv.replicas.notes import token_note
from kaveri.kv.replicas.store import ReplicaKey
from kaveri.kv.tiers.pool import KvPool
from kaveri.kv.transfer.digest import Digests
from kaveri.kv.transfer.receiver import KvReceiver, ReceiverOptions
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushEvent, PushMarked
from kaveri.kv.transfer.ticket import KvEndpoint, Ticket
from kaveri.kv.transports import make_transports
from kaveri.telemetry.logs import configure_logs

LINK = "10Gbps"
LINK_BYTES_PER_S = 10e9 / 8
BLOCK_TOKENS = 16
REQUESTS, STEP_S = 32, 0.025
REPLICAS = 8
"""Copies that are open at a time. Each takes the blocks of several requests, which saves memory here."""
REPLICA_BLOCKS = 8
"""Blocks of each, before it begins again."""
WAIT_S = 60.0
LAYERS = 32
MIB = 2**20


@dataclass(frozen=True)
class CopiesCase:
    """One size of KV, and the copier's limit."""

    name: str
    token_bytes: int
    prompt_tokens: int
    rate: int
    """Most bytes of copies in a second; 0: no limit."""
    least: float | None

    @property
    def layout(self) -> KvLayout:
        """Of blocks with so much KV."""
        return KvLayout("beside-copies", LAYERS, BLOCK_TOKENS, 1, self.token_bytes // (LAYERS * 2 * 2), "bfloat16")


CASES = (
    CopiesCase("64 KiB a token", 64 * 1024, 2_048, 0, 0.9),
    CopiesCase("800 KiB a token, no limit", 800 * 1024, 256, 0, None),
    CopiesCase("800 KiB a token, 100 MiB/s", 800 * 1024, 256, 100 * MIB, 0.9),
)


class Copies:
    """Pushes a block whenever one would be whole, from a thread of its own, until it is stopped."""

    def __init__(self, case: CopiesCase, control: "Control", transport: SharedPortTransport) -> None:
        self._control = control
        self._events: queue.Queue[PushEvent] = queue.Queue()
        self._pool = KvPool(case.layout, REPLICAS)
        self._sender = KvSender(self._pool, self._events.put, transports=(transport,))
        self._pace = Pace(case.rate)
        self._block_bytes = case.layout.layer_count * case.layout.block_bytes
        self._ending = threading.Event()
        self._running = threading.Event()
        self.block_count = 0
        self.due_count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set_running(self, running: bool) -> None:
        """Copies, or pauses."""
        (self._running.set if running else self._running.clear)()

    def close(self) -> None:
        self._ending.set()
        self._running.set()
        self._thread.join(WAIT_S)
        self._sender.close()

    def _run(self) -> None:
        every_s = BLOCK_TOKENS * STEP_S / REQUESTS
        for round_number in itertools.count():
            tickets = [self._control.open_replica(number, round_number) for number in range(REPLICAS)]
            for ticket in tickets:
                self._sender.open(ticket)
            for index in range(REPLICA_BLOCKS):
                for slot, ticket in enumerate(tickets):
                    began_s = time.monotonic()
                    if not self._running.is_set():
                        self._running.wait()
                    if self._ending.is_set():
                        return
                    time.sleep(self._pace.wait_s(self._block_bytes, time.monotonic()))
                    self._sender.write_layers(ticket.transfer_id, range(LAYERS), index, (slot,))
                    note = token_note(range(BLOCK_TOKENS))
                    self._sender.mark(ticket.transfer_id, index + 1, note)
                    # The next block is read when the last one has gone, as the copier's slots are freed.
                    self._await_mark()
                    self.block_count += 1
                    left_s = every_s - (time.monotonic() - began_s)
                    if left_s > 0:
                        time.sleep(left_s)
            for ticket in tickets:
                self._sender.abort(ticket.transfer_id)

    def _await_mark(self) -> None:
        while not isinstance(event := self._events.get(timeout=WAIT_S), PushMarked):
            # Copies that were given up before may tell of their end now.
            assert not isinstance(event, PushAccepted), event


class Control:
    """Asks the receiving process for tickets. Any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def open_replica(self, number: int, round_number: int) -> Ticket:
        """Of an open push into the replica store."""
        return self._ask("replica", number, round_number)

    def grant(self) -> Ticket:
        """For a whole prompt."""
        return self._ask("prompt")

    def end(self) -> None:
        """Ends the process."""
        with self._lock:
            self._connection.send(("end",))

    def _ask(self, *question: object) -> Ticket:
        with self._lock:
            self._connection.send(question)
            answer = self._connection.recv()
        assert isinstance(answer, Ticket), answer
        return answer


def push_prompt(sender: KvSender, events: "queue.Queue[PushEvent]", control: Control, blocks: range) -> float:
    """Seconds until the receiver has accepted a prompt."""
    ticket = control.grant()
    began_s = time.perf_counter()
    sender.open(ticket)
    for layer in range(LAYERS):
        sender.write(ticket.transfer_id, layer, 0, blocks)
    sender.finish(ticket.transfer_id, b"")
    event = events.get(timeout=WAIT_S)
    assert isinstance(event, PushAccepted), event
    return time.perf_counter() - began_s


def measure_case(case: CopiesCase, repeats: int) -> tuple[list[float], list[float], float]:
    """Seconds of a prompt alone and beside copies, and the copied bytes per second meanwhile."""
    blocks = range(case.prompt_tokens // BLOCK_TOKENS)
    transport = SharedPortTransport(make_transports(("shm",))[0], LINK)
    alone: list[float] = []
    beside: list[float] = []
    with _receiving_process(case) as control:
        events: queue.Queue[PushEvent] = queue.Queue()
        sender = KvSender(KvPool(case.layout, len(blocks)), events.put, transports=(transport,))
        copies = Copies(case, control, transport)
        push_prompt(sender, events, control, blocks)
        copied_s, copied_count = 0.0, 0
        for _ in range(repeats):
            copies.set_running(False)
            time.sleep(0.3)
            alone.append(push_prompt(sender, events, control, blocks))
            copies.set_running(True)
            time.sleep(0.3)
            began_s, before = time.monotonic(), copies.block_count
            beside.append(push_prompt(sender, events, control, blocks))
            time.sleep(0.3)
            copied_s += time.monotonic() - began_s
            copied_count += copies.block_count - before
        copies.close()
        sender.close()
    return alone, beside, copied_count * case.layout.layer_count * case.layout.block_bytes / copied_s


def measure(options: Options, report: Report) -> None:
    """All cases, prompts alone and beside copies in turn."""
    configure_logs("beside_copies", "benchmark", level="error")
    repeats = options.choose(20, 5)
    report.workload = {
        "link": LINK,
        "cases": [case.name for case in CASES],
        "prompt_tokens": [case.prompt_tokens for case in CASES],
        "requests": REQUESTS,
        "step_s": STEP_S,
        "block_tokens": BLOCK_TOKENS,
        "repeats": repeats,
    }
    for case in CASES:
        alone, beside, copied_per_s = measure_case(case, repeats)
        report.row("prompt push", [1e3 * seconds for seconds in alone], "ms", case=case.name, beside="nothing")
        report.row("prompt push", [1e3 * seconds for seconds in beside], "ms", case=case.name, beside="copies")
        needed = REQUESTS / STEP_S * case.token_bytes
        report.note(
            f"{case.name}: copies ask for {needed / LINK_BYTES_PER_S:.2f} of the link and had "
            f"{copied_per_s / LINK_BYTES_PER_S:.2f}"
        )
        ratio = statistics.median(alone) / statistics.median(beside)
        report.ratio(f"prompt push, alone / beside full replication, {case.name}", ratio, case.least)


@contextlib.contextmanager
def _receiving_process(case: CopiesCase) -> Iterator[Control]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(theirs, case, folder), daemon=True)
        process.start()
        theirs.close()
        control = Control(ours)
        try:
            yield control
        finally:
            control.end()
            process.join(WAIT_S)
            ours.close()


def _receive(connection: Connection, case: CopiesCase, folder: str) -> None:
    configure_logs("beside_copies", "receiver", level="error")
    transports = make_transports(("shm",))
    block_count = case.prompt_tokens // BLOCK_TOKENS
    pool = KvPool(case.layout, block_count)
    landed: queue.Queue[object] = queue.Queue()
    receiver = KvReceiver(
        pool,
        landed.put,
        listen=[KvEndpoint("shm", str(Path(folder) / "prompts.sock"))],
        epoch=1,
        transports=transports,
        digests=Digests.OFF,
    )
    store = HostReplicas(
        case.layout,
        # Copies that are given up keep their blocks until their push has ended.
        3 * REPLICAS * (REPLICA_BLOCKS + 1) * case.layout.layer_count * case.layout.block_bytes,
        listen=[KvEndpoint("shm", str(Path(folder) / "copies.sock"))],
        transports=transports,
        epoch=1,
        receiving=ReceiverOptions(digests=Digests.OFF),
    )
    store.start(lambda event: None)
    while (order := connection.recv())[0] != "end":
        if order[0] == "prompt":
            connection.send(receiver.grant(range(block_count), case.prompt_tokens, WAIT_S))
        else:
            key = ReplicaKey(f"request-{order[1]}", 0, order[2])
            connection.send(store.open(key, case.layout, REPLICA_BLOCKS * BLOCK_TOKENS - 1, WAIT_S))
    receiver.close()
    store.close()


if __name__ == "__main__":
    run("kv.beside_copies", measure, description=__doc__)
