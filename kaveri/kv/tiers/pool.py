"""Memory pools of KV blocks, and the allocation of blocks to owners. Knows no requests."""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kaveri.errors import ConfigError, NoCapacity
from kaveri.kv.layout.layout import KvLayout


class SharedMemory:
    """Anonymous memory file of this host, mapped and prefaulted. Freed when no process holds it any more.

    bytes: [byte_count], uint8, zeroed, page-aligned. descriptor: the file's, sealed so that no process can shrink the
    file while others map it; closed with this object.
    """

    def __init__(self, byte_count: int) -> None:
        self.descriptor = os.memfd_create("kaveri-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, max(1, byte_count))
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        raw = np.frombuffer(mmap.mmap(self.descriptor, max(1, byte_count)), np.uint8)
        raw.fill(0)
        self.bytes: npt.NDArray[np.uint8] = raw[:byte_count]


class KvPool:
    """Pool of KV blocks in prefaulted host memory: `block_count` blocks in each of the layout's layers.

    memory: [layer_count, block_count, block_bytes], uint8, C-contiguous, page-aligned. Every page is touched at
    creation, since the first touch is several times slower than a copy. Other processes of the host can map the memory;
    not that of over(), unless it is in a SharedMemory.
    """

    def __init__(self, layout: KvLayout, block_count: int) -> None:
        shape = (layout.layer_count, block_count, layout.block_bytes)
        shared = SharedMemory(int(np.prod(shape)))
        self._hold(layout, block_count, shared.bytes.reshape(shape), shared)

    @classmethod
    def over(cls, layout: KvLayout, memory: npt.NDArray[np.uint8], shared: "SharedMemory | None" = None) -> "KvPool":
        """Create a pool over memory that the caller has allocated and touched, and keeps alive as long as the pool.

        memory: [layer_count, block_count, block_bytes], uint8, C-contiguous, a numpy array (else ConfigError). shared:
        the memory file whose first bytes it is; None: other processes cannot map it.
        """
        if not isinstance(memory, np.ndarray):
            # Most likely device memory, which no transport accepts.
            raise ConfigError(
                "kv memory", f"pools are host memory, in a numpy array, and this is a {type(memory).__name__}"
            )
        expected = (layout.layer_count, memory.shape[1], layout.block_bytes)
        if memory.shape != expected or memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise ValueError(f"{memory.dtype} {memory.shape} is no pool of this layout: uint8 {expected}, in one piece")
        assert shared is None or shared.bytes.ctypes.data == memory.ctypes.data, "the memory is not that of the file"
        pool = cls.__new__(cls)
        pool._hold(layout, memory.shape[1], memory, shared)
        return pool

    @property
    def descriptor(self) -> int:
        """Descriptor of the pool's memory file. Raises ConfigError if there is none, so no process can map the pool."""
        if self._shared is None:
            raise ConfigError("kv transport", "shm needs a pool in a memory file; this engine's blocks lie elsewhere")
        return self._shared.descriptor

    def split(self, part: KvLayout) -> "KvPool":
        """Return a view of this memory as a pool of smaller blocks, of some of the heads (`part`). Block b is blocks
        [ways * b, ways * (b + 1)) there, if `ways` parts make a whole block."""
        if part not in self._splits:
            ways, rest = divmod(self.layout.block_bytes, part.block_bytes)
            assert not rest, "parts of another size"
            shape = (self.layout.layer_count, self.block_count * ways, part.block_bytes)
            self._splits[part] = KvPool.over(part, self.memory.reshape(shape), self._shared)
        return self._splits[part]

    def _hold(
        self, layout: KvLayout, block_count: int, memory: npt.NDArray[np.uint8], shared: "SharedMemory | None"
    ) -> None:
        self.layout = layout
        self.block_count = block_count
        self.memory = memory
        self._shared = shared
        self._splits: dict[KvLayout, KvPool] = {}
        self._layers = [layer.data.cast("B") for layer in memory.reshape(layout.layer_count, -1)]

    def regions(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return views of these blocks' bytes in one layer, in this order; adjacent blocks share one view.

        block_ids must lie in [0, block_count): a view beyond the end is silently truncated.
        """
        return self.regions_at(layer, self.spans(block_ids))

    def regions_at(self, layer: int, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return views of a layer's bytes at the byte ranges from spans()."""
        view = self._layers[layer]
        return [view[start:end] for start, end in spans]

    def spans(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the blocks' byte ranges [start, stop) within any layer, in this order, merged for adjacent blocks."""
        block_bytes = self.layout.block_bytes
        if block_ids and is_run(block_ids):
            return [(block_ids[0] * block_bytes, (block_ids[-1] + 1) * block_bytes)]
        spans: list[tuple[int, int]] = []
        start = end = -1  # the current run: blocks [start, end)
        for block in block_ids:
            if block != end:
                if end > start:
                    spans.append((start * block_bytes, end * block_bytes))
                start = block
            end = block + 1
        if end > start:
            spans.append((start * block_bytes, end * block_bytes))
        return spans


def is_run(block_ids: Sequence[int]) -> bool:
    """Return True if the block ids are consecutive and ascending. There must be at least one."""
    first, count = block_ids[0], len(block_ids)
    return block_ids[-1] - first == count - 1 and list(block_ids) == list(range(first, first + count))


class BlockAllocator:
    """Allocates block ids [0, total) to owners; each is free or held by exactly one owner. Thread-safe."""

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        # Popped from the end; reversed so that a fresh pool allocates low ids first.
        self._free = list(range(total - 1, -1, -1))
        self._held: dict[Hashable, list[int]] = {}
        self.total = total

    @property
    def free_count(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, owner: Hashable, count: int) -> list[int]:
        """Allocate `count` more blocks to `owner` and return only those. Raises NoCapacity, allocating none."""
        with self._lock:
            if count > len(self._free):
                raise self._too_few(count)
            split = len(self._free) - count
            blocks = self._free[split:][::-1]
            del self._free[split:]
            self._held.setdefault(owner, []).extend(blocks)
            return blocks

    def release(self, owner: Hashable) -> int:
        """Free all blocks of `owner` and return their number; 0 for an unknown owner."""
        with self._lock:
            blocks = self._held.pop(owner, [])
            self._free.extend(reversed(blocks))
            return len(blocks)

    def release_last(self, owner: Hashable, count: int) -> None:
        """Free the `count` blocks that were allocated to `owner` last."""
        with self._lock:
            blocks = self._held[owner]
            assert 0 < count <= len(blocks), f"{count} of {len(blocks)} blocks"
            self._free.extend(reversed(blocks[-count:]))
            del blocks[-count:]

    def move(self, owner: Hashable, new_owner: Hashable) -> None:
        """Transfer all blocks of `owner` to `new_owner`, in the same order; for example while a transfer may still
        write to them."""
        with self._lock:
            blocks = self._held.pop(owner, [])
            if blocks:
                self._held.setdefault(new_owner, []).extend(blocks)

    def move_first(self, owner: Hashable, new_owner: Hashable, count: int, more: int = 0) -> list[int]:
        """Transfer the first `count` blocks of `owner` to `new_owner`, which holds none, and allocate `more` to it.
        Returns all. Raises NoCapacity, with nothing changed."""
        with self._lock:
            if more > len(self._free):
                raise self._too_few(more)
            split = len(self._free) - more
            held = self._held[owner]
            assert count <= len(held), f"{count} of {len(held)} blocks"
            assert new_owner not in self._held, f"{new_owner} holds blocks"
            blocks = held[:count] + self._free[split:][::-1]
            del held[:count], self._free[split:]
            if not held:
                del self._held[owner]
            self._held[new_owner] = list(blocks)
            return blocks

    def blocks_of(self, owner: Hashable) -> tuple[int, ...]:
        """Block ids held by `owner`, in order of allocation; empty for an unknown owner."""
        with self._lock:
            return tuple(self._held.get(owner, ()))

    def owners(self) -> tuple[Hashable, ...]:
        """All owners that blocks were allocated to and not released."""
        with self._lock:
            return tuple(self._held)

    def check_integrity(self, expected_owners: Iterable[Hashable] | None = None) -> None:
        """Assert that every block is free or held exactly once, and that only `expected_owners` hold any.

        Does not check the blocks' contents.
        """
        with self._lock:
            seen = self._free + [block for blocks in self._held.values() for block in blocks]
            assert sorted(seen) == list(range(self.total)), "a block is leaked or held twice"
            if expected_owners is not None:
                strangers = set(self._held) - set(expected_owners)
                assert not strangers, f"blocks are held by {strangers}"

    def _too_few(self, wanted: int) -> NoCapacity:
        reason = f"{wanted} blocks wanted, {len(self._free)} of {self.total} free"
        return NoCapacity("kv pool", retry_after_s=0.1, reason=reason)
