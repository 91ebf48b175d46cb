"""Randomised run of a KV transport: random layouts and blocks, transfers that end in random ways, and another process
that is killed or stopped at a random moment. A seed always draws the same run; timing depends on the kernel.

Asserts for each run: blocks of a landed transfer hold what was sent once its event arrives; marked blocks of an open
transfer do when it ends in any way; released blocks are never written to; other blocks never change; source blocks
released by the sender are never read; each transfer ends once on each live side; no block, thread or descriptor is
left."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kaveri.errors import NoCapacity
from kaveri.kv.layout.layout import KvLayout
from kaveri.kv.tiers.pool import BlockAllocator, KvPool
from kaveri.kv.transfer.digest import Digest, xxh3
from kaveri.kv.transfer.receiver import CREDIT_BYTES, TransferLanded
from kaveri.kv.transfer.sender import KvSender, PushAccepted, PushFailed
from kaveri.kv.transfer.ticket import Ticket
from kaveri.testing.transport_peer import (
    Event,
    PeerNursery,
    PeerProcess,
    Recorder,
    Side,
    fill_pool,
    load_patient_transport,
    open_descriptors,
)

FREED = 0xEE
"""Byte that fills released target blocks, to detect later writes."""
_READ_MARK = 0xDD
"""Byte that fills released source blocks, to detect that they are still read."""
_POOL_BYTES = 4 << 20
"""Max size of a KV pool; every transport moves it in milliseconds."""
_DELAY_S = 0.004
"""Max pause between two steps, and before a signal: about the duration of such a transfer."""

_LANDS = ("land", "land", "land", "land", "end twice")
_CUT = ("abort", "revoke", "expire")
_FAILS = (*_CUT, "end early", "flip a byte", "wrong secret", "stale epoch")
_EITHER = ("abort late", "revoke late")
_FAULTS = ("kill", "kill", "stop", "stop and kill", "none")


class FlippedByte:
    """Digest that is wrong as if a byte after the first `right_bytes` had been corrupted in transit."""

    def __init__(self, right_bytes: int = 0) -> None:
        self._right_bytes = right_bytes
        self._digest: Digest = xxh3()

    def update(self, data: memoryview, /) -> None:
        """Add data to the digest; its last byte is flipped if it reaches beyond `right_bytes`."""
        seen = bytearray(data)
        if len(seen) > self._right_bytes:
            seen[-1] ^= 1
        self._right_bytes -= len(seen)
        self._digest.update(memoryview(seen))

    def intdigest(self) -> int:
        return self._digest.intdigest()


@dataclass
class _Transfer:
    ending: str
    source: list[int]
    pieces: list[tuple[int, int, int]]
    """(layer, first index, end index) of each write, in order; indices into `source`."""
    expires_in_s: float
    is_open: bool
    ticket: Ticket | None = None
    is_opened: bool = False


@dataclass
class _RunAccount:
    """Expected content of the receiver's pool. Used by the main thread and the listener of transfers, under `lock`."""

    memory: npt.NDArray[np.uint8]
    reference: npt.NDArray[np.uint8]
    """Content of the sender's pool before any block was released."""
    allocator: BlockAllocator
    expected: npt.NDArray[np.uint8] = field(init=False)
    transfers: dict[bytes, _Transfer] = field(default_factory=dict)
    landed: set[bytes] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Reentrant: waiting for a ticket handles other events of the peer process."""

    def __post_init__(self) -> None:
        self.expected = self.memory.copy()

    def settle(self, event: Event, marked_count: int) -> None:
        """Check and record the end of a transfer. marked_count: blocks that the sender had marked as complete."""
        with self.lock:
            transfer = self.transfers[event.transfer_id]
            assert transfer.ticket is not None
            blocks = list(transfer.ticket.block_ids)
            marked = self.memory[:, blocks[:marked_count]]
            if (marked != self.reference[:, transfer.source[:marked_count]]).any():
                self.wrong.append(f"{transfer.ending}: marked with wrong bytes")
            if isinstance(event, TransferLanded):
                self.landed.add(event.transfer_id)
                self.expected[:, blocks] = self.reference[:, transfer.source]
                if (self.memory[:, blocks] != self.expected[:, blocks]).any():
                    self.wrong.append(f"{transfer.ending}: landed with wrong bytes")
            else:
                self.memory[:, blocks] = self.expected[:, blocks] = FREED
                self.allocator.release(event.transfer_id)

    def check(self) -> None:
        with self.lock:
            is_settled = np.ones(self.allocator.total, bool)
            for owner in self.allocator.owners():
                if owner not in self.landed:
                    is_settled[list(self.allocator.blocks_of(owner))] = False
            differing = np.argwhere((self.memory != self.expected).any(axis=2) & is_settled)
            assert not self.wrong, self.wrong
            assert not len(differing), f"wrong bytes in (layer, block) {differing[:10].tolist()}"
            self.allocator.check_integrity(self.transfers)


class RandomRun:
    """Randomised run of a transport; see the module docstring. Call carry_out() once."""

    def __init__(self, factory: str, address: str, nursery: PeerNursery, seed: int) -> None:
        self._factory, self._address, self._nursery, self._seed = factory, address, nursery, seed
        self._chance = chance = random.Random(seed)
        self._layout = KvLayout(
            "random",
            layer_count=chance.randint(1, 4),
            block_tokens=chance.choice((1, 4, 16, 32)),
            kv_head_count=chance.choice((1, 2, 4, 8)),
            head_dim=chance.choice((5, 16, 64, 128)),
            dtype=chance.choice(("float32", "bfloat16")),
        )
        most = _POOL_BYTES // (self._layout.layer_count * self._layout.block_bytes)
        self._block_count = min(chance.randint(2, 64), max(2, most))
        self._credit_bytes = chance.choice((CREDIT_BYTES, 1))
        self._epoch = chance.randrange(1 << 64)
        self._where = chance.choice(("here", "sender elsewhere", "receiver elsewhere"))
        self._fault = "none" if self._where == "here" else chance.choice(_FAULTS)
        self._transfers = self._draw_transfers()

    def carry_out(self) -> None:
        threads, descriptors = set(threading.enumerate()), open_descriptors()
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(self._nursery.start()) if self._where != "here" else None
            self._receiver: Side | PeerProcess
            self._sender: Side | PeerProcess
            self._start(stack, peer)
            self._bring_on(peer)
            is_killed = peer is not None and not peer.is_alive
            self._settle(is_killed)
            self._account.check()
            if not (is_killed and self._where == "receiver elsewhere"):
                self._account.allocator.check_integrity(self._account.landed)
            if self._where != "sender elsewhere" and self._chance.random() < 0.3:
                self._start_again(stack, is_killed)
            for side in (self._sender, self._receiver):
                # In this process the other side's threads and descriptors are included.
                left = side.end() if isinstance(side, Side) or side.is_alive else []
                assert isinstance(side, Side) or not left, f"{left} of the other process"
                assert not side.recorder.doubled
            self._account.check()
        left_threads, left_descriptors = set(threading.enumerate()) - threads, open_descriptors() - descriptors
        assert not left_threads, f"threads are left: {left_threads}"
        assert not left_descriptors, f"descriptors are left: {left_descriptors}"

    def _draw_transfers(self) -> list[_Transfer]:
        chance = self._chance
        free = chance.sample(range(self._block_count), self._block_count)
        endings = (*_LANDS, *_FAILS, *_EITHER)
        transfers = []
        for _ in range(chance.randint(1, 6)):
            ending = chance.choice(endings)
            if ending == "flip a byte" and self._where == "sender elsewhere":
                ending = "abort"
            # Each transfer has its own source blocks, to be overwritten when it fails.
            count = min(
                len(free), chance.choice((0, 1, chance.randint(1, 8), *[chance.randint(1, self._block_count)] * 3))
            )
            source = [free.pop() for _ in range(count)]
            pieces = self._draw_pieces(count)
            if ending == "end early":
                pieces = pieces[:-1] if pieces else pieces
            elif ending in _CUT:
                pieces = pieces[: chance.randint(0, len(pieces))]
            if not count and ending in ("end early", "flip a byte"):
                ending = "land"
            expires_in_s = chance.uniform(0.03, 0.2) if ending == "expire" else 600.0
            # Fewer blocks than granted are no error of an open transfer.
            is_open = ending != "end early" and chance.random() < 0.4
            transfers.append(_Transfer(ending, source, pieces, expires_in_s, is_open))
        return transfers

    def _draw_pieces(self, block_count: int) -> list[tuple[int, int, int]]:
        layers = []
        for layer in range(self._layout.layer_count):
            cuts = sorted(
                self._chance.sample(range(1, block_count), self._chance.randint(0, max(0, block_count - 1)) // 2)
            )
            bounds = [0, *cuts, block_count] if block_count else [0]
            layers.append([(layer, start, end) for start, end in pairwise(bounds)])
        pieces = []
        while layers := [layer for layer in layers if layer]:
            pieces.append(self._chance.choice(layers).pop(0))
        return pieces

    def _start(self, stack: contextlib.ExitStack, peer: PeerProcess | None) -> None:
        layout, count = self._layout, self._block_count
        reference = KvPool(layout, count)
        fill_pool(reference, self._seed)
        listen = (layout, count, self._address, self._epoch, self._credit_bytes)
        if self._where == "receiver elsewhere":
            assert peer is not None
            self._receiver = peer
            target, self._endpoints = peer.start_receiver(*listen, self._landing_ended)
        else:
            self._receiver = here = Side(self._factory, self._landing_ended)
            stack.callback(here.end)
            target, self._endpoints = here.start_receiver(*listen)
        target.memory[:] = 0x11
        self._account = _RunAccount(target.memory, reference.memory.copy(), BlockAllocator(count))
        if self._where == "sender elsewhere":
            assert peer is not None
            self._sender = peer
            peer.start_sender(layout, count, self._seed)
        else:
            self._sender = here = Side(self._factory, self._scribble)
            stack.callback(here.end)
            self._source = here.start_sender(layout, count, self._seed)
            # Second recorder, for the sender with wrong digests.
            self._wrong = Recorder(self._scribble)
            self._wrong_sender = KvSender(
                self._source, self._wrong, transports=[load_patient_transport(self._factory)], digest=FlippedByte
            )
            stack.callback(self._wrong_sender.close)

    def _landing_ended(self, event: Event) -> None:
        steps = self._receiver.recorder.steps.get(event.transfer_id, ())
        self._account.settle(event, max((step.block_count for step in steps), default=0))

    def _scribble(self, event: Event) -> None:
        if isinstance(event, PushFailed):
            with self._account.lock:
                transfer = self._account.transfers.get(event.transfer_id)
            if transfer is not None:
                self._source.memory[:, transfer.source] = _READ_MARK

    def _bring_on(self, peer: PeerProcess | None) -> None:
        """Execute the steps of all transfers in random order, with the fault (kill or stop) at a random step."""
        chance = self._chance
        if self._where == "receiver elsewhere":
            for transfer in self._transfers:
                self._grant(transfer)
        steps = [self._steps(transfer) for transfer in self._transfers]
        fault_at = chance.randint(0, sum(len(transfer.pieces) + 3 for transfer in self._transfers))
        count = 0
        while steps:
            if count == fault_at:
                self._strike(peer)
            step = chance.choice(steps)
            if next(step, None) is None:
                steps.remove(step)
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0, _DELAY_S))
            count += 1
        if count <= fault_at:
            self._strike(peer)
        if peer is not None and self._fault.startswith("stop"):
            time.sleep(chance.uniform(0, _DELAY_S))
            peer.signal(signal.SIGKILL if self._fault == "stop and kill" else signal.SIGCONT)

    def _strike(self, peer: PeerProcess | None) -> None:
        if peer is not None and self._fault != "none":
            time.sleep(self._chance.uniform(0, _DELAY_S))
            peer.signal(signal.SIGKILL if self._fault == "kill" else signal.SIGSTOP)

    def _grant(self, transfer: _Transfer) -> None:
        owner = object()
        with contextlib.suppress(NoCapacity), self._account.lock:
            blocks = self._account.allocator.allocate(owner, len(transfer.source))
            tokens = len(blocks) * self._layout.block_tokens
            grant = "grant_open" if transfer.is_open else "grant"
            transfer.ticket = self._receiver.ask(grant, blocks, tokens, transfer.expires_in_s)
            self._account.allocator.move(owner, transfer.ticket.transfer_id)
            self._account.transfers[transfer.ticket.transfer_id] = transfer

    def _steps(self, transfer: _Transfer) -> Iterator[bool]:
        if transfer.ticket is None and self._where != "receiver elsewhere":
            self._grant(transfer)
            yield True
        if transfer.ticket is None:
            return
        shown, ending, transfer_id = transfer.ticket, transfer.ending, transfer.ticket.transfer_id
        if ending == "wrong secret":
            shown = replace(shown, secret=bytes(16))
        if ending == "stale epoch":
            shown = replace(shown, epoch=(shown.epoch + 1) % (1 << 64))
        tell = self._tell_wrong if ending == "flip a byte" else self._sender.tell
        tell("open", shown)
        transfer.is_opened = True
        yield True
        written = [0] * self._layout.layer_count
        marked_count = 0
        for layer, start, end in transfer.pieces:
            tell("write", transfer_id, layer, start, transfer.source[start:end])
            written[layer] = end
            yield True
            if transfer.is_open and min(written) > marked_count and self._chance.random() < 0.7:
                marked_count = min(written)
                tell("mark", transfer_id, marked_count, b"mark")
                yield True
        if ending in (*_CUT, *_EITHER) and self._chance.random() < 0.5:
            # In the middle of earlier commands.
            time.sleep(self._chance.uniform(0, _DELAY_S))
        if ending == "abort":
            tell("abort", transfer_id)
        elif ending == "revoke":
            self._receiver.tell("revoke", transfer_id)
        elif ending != "expire":
            tell("finish", transfer_id, b"note")
        if ending == "end twice":
            tell("finish", transfer_id, b"another note")
        elif ending == "abort late":
            tell("abort", transfer_id)
        elif ending == "revoke late":
            self._receiver.tell("revoke", transfer_id)

    def _tell_wrong(self, method: str, *arguments: object) -> None:
        getattr(self._wrong_sender, method)(*arguments)

    def _settle(self, is_killed: bool) -> None:
        for transfer in self._transfers:
            ticket, ending = transfer.ticket, transfer.ending
            if ticket is None:
                continue
            pushed = landed = None
            if transfer.is_opened and not (is_killed and self._where == "sender elsewhere"):
                pushed = self._wrong.wait(ticket) if ending == "flip a byte" else self._sender.wait(ticket)
            if not (is_killed and self._where == "receiver elsewhere"):
                if is_killed or ending in ("wrong secret", "stale epoch"):
                    self._receiver.tell("revoke", ticket.transfer_id)
                landed = self._receiver.wait(ticket)
            self._compare(transfer, pushed, landed, is_killed)

    def _compare(self, transfer: _Transfer, pushed: Event | None, landed: Event | None, is_killed: bool) -> None:
        assert transfer.ticket is not None
        outcome = f"{transfer.ending}: {pushed}, {landed}"
        if isinstance(pushed, PushAccepted):
            assert landed is None or isinstance(landed, TransferLanded), outcome
            blocks = list(transfer.ticket.block_ids)
            sent = self._account.reference[:, transfer.source]
            assert (self._account.memory[:, blocks] == sent).all(), f"accepted with wrong bytes; {outcome}"
        if isinstance(landed, TransferLanded):
            assert transfer.ending not in _FAILS, outcome
            assert landed.note == b"note", outcome
        elif transfer.ending in _LANDS:
            assert is_killed, outcome
        if transfer.ending in _FAILS:
            assert not isinstance(pushed, PushAccepted), outcome

    def _start_again(self, stack: contextlib.ExitStack, is_killed: bool) -> None:
        """Assert that a restarted receiver (next epoch, same address) accepts transfers of the running sender."""
        address, epoch = self._endpoints[0].address, (self._epoch + 1) % (1 << 64)
        again = stack.enter_context(self._nursery.start())
        if not is_killed:
            self._receiver.end()
        target, _ = again.start_receiver(self._layout, 2, address, epoch, self._credit_bytes)
        ticket = again.ask("grant", [1, 0], 1, 600.0)
        self._sender.tell("open", ticket)
        for layer in range(self._layout.layer_count):
            self._sender.tell("write", ticket.transfer_id, layer, 0, [0, 1])
        self._sender.tell("finish", ticket.transfer_id, b"")
        event = self._sender.wait(ticket)
        assert isinstance(event, PushAccepted), event
        assert (target.memory[:, [1, 0]] == self._source.memory[:, [0, 1]]).all()
        again.wait(ticket)
        assert not (left := again.end()), left
