"""Checks untrusted grammars in a child process with limits on time and memory.

Step limits are not enough: llguidance allocates all of {"minItems": 1000000000} at once, and a failed allocation
aborts its process. Engines compile only grammars that passed the check.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections import OrderedDict

from tokenizers import Tokenizer

from kaveri import leash
from kaveri.domain.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from kaveri.errors import DeadlineExceeded, InvalidArgument, NoCapacity

COMPILE_S = 1.0
"""Most CPU time that one grammar may take. Elapsed time would refuse valid grammars on a busy machine."""
_ANSWER_S = 30.0
"""Longest wait for an answer: the process may be starved of CPU, or stopped."""
_LOAD_S = 60.0
_MEMORY_BYTES = 512 * 2**20
"""Most memory that compiling may add."""
_REMEMBERED = 1024
_MOST_WAITING = 64
_LINE_BYTES = 4 * MAX_GRAMMAR_BYTES


class GrammarChecker:
    """Checks grammars one at a time, and remembers the results. The process starts with the first one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._setup = b""
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._results: OrderedDict[bytes, str] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[str]] = {}

    async def check(self, grammar: Grammar, deadline_s: float) -> None:
        """Raise InvalidArgument if the grammar is wrong, takes too much time or memory, or no text matches it;
        DeadlineExceeded at time.monotonic() == deadline_s; NoCapacity while too many wait, or if the process does not
        start or answer."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.source}".encode()).digest()
        limit = self._results.get(digest)
        if limit is None:
            limit = await self._wait(digest, grammar, deadline_s)
        else:
            self._results.move_to_end(digest)
        if limit:
            value = f"a {grammar.kind.value} of {len(grammar.source)} characters"
            raise InvalidArgument("params.grammar", value, limit)

    async def _wait(self, digest: bytes, grammar: Grammar, deadline_s: float) -> str:
        """Wait for a check, which goes on if the caller gives up: others may wait for the same."""
        task = self._under_way.get(digest)
        if task is None:
            if len(self._under_way) >= _MOST_WAITING:
                raise _no_capacity(f"{_MOST_WAITING} grammars wait to be checked")
            task = self._under_way[digest] = asyncio.create_task(self._one(digest, grammar))
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlineExceeded from error

    async def _one(self, digest: bytes, grammar: Grammar) -> str:
        try:
            async with self._lock:
                limit = await self._checked(grammar)
        finally:
            del self._under_way[digest]
        self._results[digest] = limit
        while len(self._results) > _REMEMBERED:
            self._results.popitem(last=False)
        return limit

    async def close(self) -> None:
        """End the process, and checks under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    async def _checked(self, grammar: Grammar) -> str:
        """Return the limit that the grammar breaks, worded for InvalidArgument; empty if the grammar is valid."""
        for _ in range(2):
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps([grammar.kind, grammar.source]).encode() + b"\n")
                answer = await self._line(process, _ANSWER_S)
            except BaseException:
                await self._end()
                raise
            if answer is not None:
                return str(json.loads(answer))
            has_ended = process.stdout.at_eof()
            await self._end()
            if not has_ended:
                # Clients that re-attach try again, as after every NoCapacity.
                raise _no_capacity("the process that checks grammars does not answer")
            if process.returncode not in (-signal.SIGKILL, -signal.SIGTERM):
                break
            # Killed, perhaps for other processes' memory: check it once more. If killed again, blame the grammar.
        return f"a grammar that compiles within {COMPILE_S:g} s and {_MEMORY_BYTES // 2**20} MiB"

    async def _start(self) -> asyncio.subprocess.Process:
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid())]
        self._process = process = await asyncio.create_subprocess_exec(
            *leashed,
            *(sys.executable, "-P", "-m", "kaveri.text.grammar_check"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Discard Rust's abort message when an allocation fails.
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_BYTES,
        )
        assert process.stdin is not None
        try:
            if not self._setup:
                self._setup = await asyncio.to_thread(self._written_setup)
            process.stdin.write(self._setup)
            ready = await self._line(process, _LOAD_S)
        except BaseException:
            await self._end()
            raise
        if ready is None:
            await self._end()
            raise _no_capacity("the process that checks grammars does not start")
        return process

    def _written_setup(self) -> bytes:
        return json.dumps([self._tokenizer.to_str(), self._vocab_size]).encode() + b"\n"

    async def _line(self, process: asyncio.subprocess.Process, timeout_s: float) -> bytes | None:
        """Return the process's next line; None if none comes in time, or the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(timeout_s):
                await process.stdin.drain()
                return await process.stdout.readline() or None
        return None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # Do not kill a process that has exited: asyncio would lose its exit status and log a warning.
        assert process.stdout is not None
        if not process.stdout.at_eof():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


def _no_capacity(reason: str) -> NoCapacity:
    return NoCapacity("router", retry_after_s=COMPILE_S, reason=reason)


def main() -> None:
    """Run the process: read a tokenizer, then grammars, a JSON line each; write a JSON line for each."""
    from kaveri.text.grammars import check_grammar, grammar_tokenizer

    tokenizer_json, vocab_size = json.loads(sys.stdin.readline())
    tokenizer = grammar_tokenizer(tokenizer_json, vocab_size, frozenset())
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, taken + _MEMORY_BYTES))
    print('"ready"', flush=True)
    for line in sys.stdin:
        kind, source = json.loads(line)
        limit = ""
        # Its signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        try:
            check_grammar(tokenizer, Grammar(GrammarKind(kind), source))
        except InvalidArgument as error:
            limit = error.limit
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(limit), flush=True)


if __name__ == "__main__":
    main()
